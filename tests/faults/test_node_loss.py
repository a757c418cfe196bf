"""A node of the cluster goes, with every rank on it: the job goes on where Ray finds another place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_ranks_of_a_lost_node_start_on_another_and_give_the_same_bits(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.node_loss", str(tmp_path)]
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
    result = json.loads(output.splitlines()[-1])
    assert result["found"] == result["expected"] and len(set(result["found"])) > 1
    assert result["recoveries"] == [["worker_died", 2]]
