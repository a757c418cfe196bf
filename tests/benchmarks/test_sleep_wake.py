"""Sleeping changes no loss, compared in hex; on CUDA that takes deterministic kernels, here and in the fault matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import sleep_wake
from tests.support import recorded_job

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_compared_to_the_bit_is_computed_by_deterministic_kernels(tmp_path: Path, device: str) -> None:
    slept = sleep_wake.settings(tmp_path, torch.device(device))
    killed = recorded_job.settings(tmp_path, tmp_path / "run", mesh={"device": device})
    for config in (slept, killed):
        assert config.mesh.device == device and config.run.deterministic == (device == "cuda")


@pytest.mark.slow
def test_a_few_cycles_change_no_digest_and_no_loss(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/sleep_wake.py", "--cycles", "2", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["digests_that_changed"] == 0 and found["device_bytes_of_what_sleeps"] == 0
    assert found["losses_as_without_sleep"]
