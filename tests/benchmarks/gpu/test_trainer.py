"""The Trainer checks of a GPU run on a CPU, without Ray, and pass there."""

from __future__ import annotations

from pathlib import Path

from tests.support.gpu_scripts import run_gpu_script

NAMES = (
    *("train_step", "first_ratio", "reference_kl", "host_syncs", "weights_out", "determinism", "sleep"),
    *("modes/recompute_full", "modes/recompute_selective", "modes/recompute_offload", "modes/cpu_offload"),
    *("modes/optimizer", "modes/replicate", "compile"),
    *("updates/adamw", "updates/muon", "updates/bfloat16_moments", "updates/8bit_moments", "updates/lora"),
)


def test_every_check_passes_on_a_cpu_but_the_one_that_needs_a_gpu(tmp_path: Path) -> None:
    ran = run_gpu_script("trainer.py", tmp_path, without=("matplotlib", "ray", "tensorboard", "trl"))
    assert ran.status == 0, ran.printed + ran.errors
    rows = {row["name"]: row for row in ran.record["results"]["checks"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        name: "SKIP" if name == "host_syncs" else "PASS" for name in NAMES
    }
    assert rows["first_ratio"]["figures"] == {"ratio_deviation_max": 0.0}
    assert rows["reference_kl"]["figures"]["first_step"] == 0.0
    assert rows["determinism"]["figures"]["repeats"] is True
    assert all(f"{rows[name]['verdict']} {name}" in ran.printed for name in NAMES)
