"""Modules of tests/support that are programs: each has its own cluster, and prints what it found as its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def found_by(module: str, *arguments: str) -> Any:
    """What `python -m module` prints last, from JSON; its processes end with it."""
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as script:  # fmt: skip
        try:
            output, said = script.communicate(timeout=PATIENCE_S)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, said
    return json.loads(output.splitlines()[-1])
