"""The step of a GPU runs on a CPU without Ray and pydantic, and all that it times takes the same step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.gpu import step
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


def test_samples_of_uneven_lengths_have_the_same_gradients_at_every_level(tmp_path: Path) -> None:
    arguments = ["--systems", "slimefsdp", "hf", "--checkpointing", "none", "--lengths", "uneven"]
    for sharding in ("full", "optimizer"):
        status, printed, _, record = run(tmp_path, *arguments, "--sharding", sharding)
        rows = record["results"]["cases"]
        assert status == 0 and "PASS gradient_norms" in printed and len(rows) == 2
        assert rows[0]["grad_norm"] == pytest.approx(rows[1]["grad_norm"], rel=1e-5) and rows[0]["samples"] > 3


def test_uneven_samples_have_all_tokens_that_were_asked_for_and_equal_prompts() -> None:
    batch = step.recorded_batch((1000, 100, 20), vocab=50, is_uneven=True)
    assert batch.num_tokens == 1000 or 1000 - batch.num_tokens <= 20
    assert set(batch.lengths - batch.response_lengths) == {20} and len(set(batch.response_lengths)) > 5


def test_where_memory_runs_out_half_as_many_samples_are_taken_with_the_same_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, taken = [], []

    def build(work: step.Work) -> step.Step:
        built.append(work)

        def take(parts: Sequence[np.ndarray]) -> float:
            taken.append([len(part) for part in parts])
            if len(parts[0]) > room:
                raise torch.OutOfMemoryError("no memory")
            return 2.5

        return take

    monkeypatch.setitem(step.STEPS, "fits some", build)
    batch = step.recorded_batch((70, 10, 2), vocab=50)
    work = step.Work({}, batch, False, SimpleNamespace(device=torch.device("cpu")), torch.float32, step.OwnOptions())  # type: ignore[arg-type]
    room = 3
    at_once, seconds, norm = step.step_seconds("fits some", work, 2)
    assert (at_once, len(seconds), norm) == (2, 2, 2.5) and len(built) == 1
    assert taken == [[7], [4, 3], *[[2, 2, 2, 1]] * 3]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        step.step_seconds("fits some", work, 2)


def test_what_the_time_limit_leaves_is_reported_and_has_no_number(tmp_path: Path) -> None:
    status, *_, record = run(tmp_path, "--systems", "slimefsdp", "--time-limit-s", "0")
    rows = record["results"]["cases"]
    assert status == 1 and [row.keys() & {"seconds", "not_run"} for row in rows] == [{"not_run"}] * 2


def test_options_of_our_own_step_reach_it_and_its_profile_shows_them(tmp_path: Path) -> None:
    arguments = ["--tokens", "1024", "--systems", "slimefsdp", "--checkpointing", "none"]
    changes = ["--compile", "--head-chunk-mib", "1", "--profile", str(tmp_path / "profile.txt")]
    status, *_, record = run(tmp_path, *arguments, *changes)
    assert status == 0 and "seconds" in record["results"]["cases"][0]
    (calls,) = profiled_calls(tmp_path / "profile.txt")
    # of 768 rows of 512 float32 logits in tiles of half a MiB, and of all
    assert calls["aten::amax"] == 3 + 1 and any("Compiled" in event for event in calls)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "0"],
        ["--tokens", "1"],
        ["--prompt-tokens", "0"],
        ["--head-chunk-mib", "0"],
        ["--systems", "hf", "--compile"],
        ["--systems", "hf", "--head-chunk-mib", "1"],
        ["--systems", "hf", "--sharding", "full"],
    ],
)
def test_what_cannot_be_timed_and_options_that_would_do_nothing_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        step.main(["--device", "cpu", *SHAPE, *arguments])
    assert ended.value.code == 2 and arguments[-2] in capsys.readouterr().err


def test_gradient_norms_that_differ_or_are_missing_fail_the_script() -> None:
    case = {"model": "tiny", "tokens": 96}
    same, apart = [case | {"grad_norm": 1.0}, case | {"grad_norm": 1.001}], [case | {"grad_norm": 1.1}]
    assert step.verdict_on_norms([*same, case | {"absent": "trl"}], 1e-2)[0]
    assert not step.verdict_on_norms([*same, *apart], 1e-2)[0]
    assert not step.verdict_on_norms([case | {"failed": "out of memory"}], 1e-2)[0]
    assert not step.verdict_on_norms([*same, case | {"grad_norm": float("nan")}], 1e-2)[0]
