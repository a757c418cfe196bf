"""The Trainer checks of a GPU run on a CPU, without Ray, and pass there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
# what a machine with torch, transformers and pydantic alone may lack
WITHOUT = """
import functools, runpy, sys
import torch

torch.compile = functools.partial(torch.compile, backend="eager")  # traced, not compiled: inductor takes half a minute
sys.modules.update(dict.fromkeys(["matplotlib", "ray", "tensorboard", "trl"]))  # as if they were not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
NAMES = (
    *("train_step", "first_ratio", "reference_kl", "host_syncs", "weights_out", "determinism", "sleep"),
    *("modes/recompute_full", "modes/recompute_selective", "modes/cpu_offload", "modes/prefetch"),
    *("modes/optimizer", "modes/replicate", "compile"),
)


def test_every_check_passes_on_a_cpu_but_the_one_that_needs_a_gpu(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks/gpu/trainer.py"), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--time-limit-s", "1400", "--json", str(record)],
        env=environment, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(record.read_text())
    assert written["command"].startswith("python benchmarks/gpu/trainer.py --device cpu")
    rows = {row["name"]: row for row in written["results"]["checks"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        name: "SKIP" if name == "host_syncs" else "PASS" for name in NAMES
    }
    assert rows["first_ratio"]["figures"] == {"ratio_deviation_max": 0.0}
    assert rows["reference_kl"]["figures"]["first_step"] == 0.0
    assert rows["determinism"]["figures"]["repeats"] is True
    assert all(f"{rows[name]['verdict']} {name}" in done.stdout for name in NAMES)
