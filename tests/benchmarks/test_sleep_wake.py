"""What benchmarks compare in hex is computed by deterministic kernels on CUDA."""

from __future__ import annotations

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
