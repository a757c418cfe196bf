"""The GPU script runs without Ray and pydantic, and all that it times takes the same step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_step

ROOT = Path(__file__).resolve().parents[2]
# what a machine with torch and transformers alone may lack
WITHOUT = """
import runpy, sys

sys.modules.update(dict.fromkeys(["pydantic", "ray", "trl"]))  # as if they were not installed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHAPE = ["--device", "cpu", "--models", "tiny", "--tokens", "96", "--sample-tokens", "32", "--prompt-tokens", "8"]


def results(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    record = tmp_path / "record.json"
    command = [sys.executable, "-c", WITHOUT, str(ROOT / "benchmarks" / "gpu_step.py"), *SHAPE, "--steps", "1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--json", str(record), *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(record.read_text()))


def test_the_step_of_ours_and_that_of_plain_hugging_face_have_the_same_gradients(tmp_path: Path) -> None:
    record = results(tmp_path, "--systems", "slimefsdp", "hf", "trl")
    rows = {(row["system"], row["checkpointing"]): row for row in record["results"]}
    assert len(rows) == 6 and record["matrix_tflops"] > 0
    for checkpointing in ("none", "full"):
        assert "absent" in rows["trl", checkpointing] and "seconds" not in rows["trl", checkpointing]
        for system in ("slimefsdp", "hf"):
            row = rows[system, checkpointing]
            assert row["grad_norm"] == pytest.approx(rows["hf", "none"]["grad_norm"], rel=1e-5)
            assert row["tokens_per_s"] == pytest.approx(96 / row["seconds"]) and row["mfu_of_measured"] > 0


def test_what_the_time_limit_leaves_is_reported_and_has_no_number(tmp_path: Path) -> None:
    record = results(tmp_path, "--systems", "slimefsdp", "--time-limit-s", "0")
    assert [row.keys() & {"seconds", "not_run"} for row in record["results"]] == [{"not_run"}] * 2


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--tokens", "1"], ["--prompt-tokens", "0"]])
def test_sizes_with_which_nothing_can_be_timed_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", *SHAPE, *arguments])
    with pytest.raises(SystemExit) as ended:
        gpu_step.main()
    assert ended.value.code == 2 and "at least" in capsys.readouterr().err
