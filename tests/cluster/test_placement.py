"""Which GPU a rank has, and which an engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_a_colocated_engine_has_the_gpu_of_its_rank_and_so_has_its_successor(example: Path) -> None:
    command = [sys.executable, "-m", "tests.support.logical_gpus", str(example / "model")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as script:  # fmt: skip
        try:
            output, said = script.communicate(timeout=PATIENCE_S)
        finally:
            if script.poll() is None:
                os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, said
    found = json.loads(output.splitlines()[-1])
    assert sorted(found["ranks"]) == [["0", "0"], ["1", "1"]]
    assert found["engines"] == found["engines, one new"] == found["ranks"]
