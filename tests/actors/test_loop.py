"""The loop leaves a whole record, resumes without a trace, and learns from rewards: from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray.util import placement_group_table
from transformers import AutoModelForCausalLM

from actors.loop import train
from slimefsdp.config import RunConfig, load_config
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.monitoring.progress import GRPO_COLUMNS
from tests.support import runs
from tests.support.runs import bits, rows_of
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def make_run(make_config: Any, example: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "heldout.jsonl").write_text("\n".join((example / "heldout.jsonl").read_text().splitlines()[:8]))

    def make(name: str, **sections: Any) -> RunConfig:
        return make_config(
            **{
                "run": {"dir": str(folder / name), "steps": 4, "seed": 5},
                "mesh": {"dp": 1},
                "batch": {"samples_per_update": 8},
                "data": {"train": str(example / "train.jsonl"), "heldout": str(folder / "heldout.jsonl")},
                "rollout": {
                    "prompts_per_step": 4,
                    "samples_per_prompt": 4,
                    "max_new_tokens": 6,
                    "engines": 1,
                    "reward": "tests.support.runs:variety",
                },
                "evaluation": {"interval_steps": 2},
                "checkpoint": {"interval_steps": 2},
                **sections,
            }
        )

    return make


@pytest.fixture(scope="module")
def whole_run(cluster: None, make_run: Any) -> tuple[RunConfig, str]:
    """A run of four steps, with its closing line."""
    config = make_run("whole")
    return config, train(config)


def test_a_run_leaves_metrics_curves_events_and_checkpoints(whole_run: tuple[RunConfig, str]) -> None:
    config, closing = whole_run
    rows = rows_of(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    always = {column.metric for column in GRPO_COLUMNS} - {"eval/exact"}
    always |= {"updates", "ratio", "lr", "weight_version", "time"}
    always |= {"rollout/response_length", "rollout/response_length_max", "rollout/truncated"}
    always |= {f"seconds/{activity}" for activity in ("generate", "reward", "train", "sync")}
    for row in rows[1:]:
        assert always <= row.keys()
        assert row["updates"] == 2 and row["loss"] != 0 and row["rollout_mismatch_max"] < 1e-4
        assert row["weight_version"] == 2 * row["step"]
    assert [("eval/exact" in row, "eval/reward" in row) for row in rows] == [(step % 2 == 0,) * 2 for step in range(5)]
    folder = config.run.dir
    assert folder is not None
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any(file.stat().st_size > 1000 for file in (folder / "tensorboard").glob("events*"))
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == ["step_00000002", "step_00000004"]
    assert closing.startswith("GRPO on 1 FSDP2 rank: held-out sampled exact 0.000 -> ") and "4 steps" in closing


def living_placement_groups() -> set[str]:
    return {name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"}


def test_a_broken_run_ends_its_processes_and_resumes_without_a_trace(
    whole_run: tuple[RunConfig, str], make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [bits(row) for row in rows_of(whole_run[0])]
    groups = living_placement_groups()
    monkeypatch.setattr(runs, "calls_left", 8 + 3 * 16 + 8)  # enough for three steps and two evaluations
    broken = make_run("broken")
    # in this process, which counts the calls; the whole run had them in another
    broken = broken.model_copy(update={"rollout": broken.rollout.model_copy(update={"reward_workers": 0})})
    with pytest.raises(BatchError, match="disk is full"):
        train(broken)
    assert wait_until(lambda: living_placement_groups() <= groups), "its processes are gone with their places"
    assert [bits(row) for row in rows_of(broken)] == expected[:4], "equal seeds, equal runs"
    monkeypatch.undo()
    train(make_run("broken", checkpoint={"interval_steps": 2, "resume": True}))
    assert [bits(row) for row in rows_of(broken)] == expected


def test_a_supervised_run_is_extended_as_if_it_had_been_longer(
    cluster: None, example: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, steps: int, *more: str) -> RunConfig:
        folder = tmp_path / name
        overrides = [f"model.path={example / 'model'}", f"data.train={example / 'sft.jsonl'}", "mesh.dp=1", *more]
        overrides += [f"run.dir={folder}", f"run.export_dir={folder / f'model_{steps}'}"]
        overrides += [f"run.steps={steps}", "batch.samples_per_update=4", "checkpoint.interval_steps=2"]
        return load_config(ROOT / "configs" / "sort_digits_sft.yaml", [*overrides])

    configs = (
        run("straight", 5, "profile.updates=[2]"),
        run("extended", 3),
        run("extended", 5, "checkpoint.resume=true"),
    )
    for config in configs:
        train(config)
    straight, *_, extended = ([bits(row) for row in rows_of(config)] for config in configs)
    assert extended == straight and len(straight) == 5
    profiled = (tmp_path / "straight" / "profile" / "update_000002.txt").read_text()
    assert profiled.startswith("update 2\n") and capsys.readouterr().err.count(profiled) == 1, "printed once"
    folder = tmp_path / "extended"
    assert sorted(path.name for path in (folder / "checkpoints").glob("step_*")) == ["step_00000004", "step_00000005"]
    assert not (folder / "batches").exists(), "its data are batches already"
    exported = [AutoModelForCausalLM.from_pretrained(config.run.export_dir, dtype="auto") for config in configs]
    assert {parameter.dtype for model in exported for parameter in model.parameters()} == {torch.float32}
    assert load_config(folder / "settings.yaml").run.steps == 5
    assert load_config(folder / "settings.1.yaml").run.steps == 3


def test_a_run_that_lacks_a_setting_starts_nothing(make_run: Any) -> None:
    with pytest.raises(ConfigError) as lacking:
        train(make_run("lacking", data={}))
    assert lacking.value.field == "data.train"


# ------------------------------------------------------------------ learning
