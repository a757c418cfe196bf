"""The step of a GPU runs on a CPU without Ray and pydantic, and all that it times takes the same step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.gpu_scripts import ScriptRun, run_gpu_script

SHAPE = ["--models", "tiny", "--tokens", "96", "--sample-tokens", "32", "--prompt-tokens", "8"]


def run(folder: Path, *arguments: str) -> ScriptRun:
    """One step of the tiny model on a machine with torch and transformers alone."""
    return run_gpu_script("step.py", folder, *SHAPE, "--steps", "1", *arguments, without=("pydantic", "ray", "trl"))


def profiled_calls(table: Path) -> list[dict[str, int]]:
    """How often each event ran, by case."""
    cases = table.read_text().split("hidden size 64, ")[1:]
    rows = [re.findall(r"^ *(\S.*?)  .* (\d+) *$", case, re.MULTILINE) for case in cases]
    return [{event: int(calls) for event, calls in found} for found in rows]


def test_the_step_of_ours_and_that_of_plain_hugging_face_have_the_same_gradients(tmp_path: Path) -> None:
    profile = tmp_path / "profile.txt"
    status, printed, _, record = run(tmp_path, "--systems", "slimefsdp", "hf", "trl", "--profile", str(profile))
    found = record["results"]
    rows = {(row["system"], row["checkpointing"]): row for row in found["cases"]}
    assert len(rows) == 6 and found["matrix_tflops"] > 0 and found["device"] == "cpu"
    for checkpointing in ("none", "full"):
        assert "absent" in rows["trl", checkpointing] and "seconds" not in rows["trl", checkpointing]
        for system in ("slimefsdp", "hf"):
            row = rows[system, checkpointing]
            assert row["grad_norm"] == pytest.approx(rows["hf", "none"]["grad_norm"], rel=1e-5)
            assert row["tokens_per_s"] == pytest.approx(96 / row["seconds"]) and row["mfu_of_measured"] > 0
    assert status == 0 and "\nPASS gradient_norms tiny/96=" in printed
    # of slimefsdp's two cases: the head takes the largest logits of its one tile, and then of all tiles
    for calls in profiled_calls(profile):
        assert calls["aten::amax"] == 2 and not any("Compiled" in event for event in calls)
