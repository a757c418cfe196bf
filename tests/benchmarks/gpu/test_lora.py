"""The steps of adapters of a GPU run on a CPU, without Ray."""

from __future__ import annotations

from pathlib import Path

from tests.support.gpu_scripts import run_gpu_script


def test_steps_of_adapters_run_and_are_set_beside_the_estimate_of_memory(tmp_path: Path) -> None:
    ran = run_gpu_script("lora.py", tmp_path, "--only", "short/stored", "long/131072", without=("ray", "trl"))
    assert ran.status == 0, ran.printed + ran.errors
    short, long = ran.record["results"]["checks"]
    assert short["verdict"] == long["verdict"] == "PASS"
    assert short["figures"]["tokens_per_step"] == 4 * 64 and long["figures"]["tokens_per_step"] == 2048
    assert short["figures"]["estimated_gb"] < long["figures"]["estimated_gb"]
