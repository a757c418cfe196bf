"""The loop around a Trainer in its own process, without Ray: what a run leaves, and how it ends and goes on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from actors import loop
from actors.run_dir import SKIPPED, STARTS, RunFolder
from actors.signals import Interrupts
from slimefsdp.config import RunConfig, load_config
from slimefsdp.errors import CheckpointError, ConfigError, Interrupted
from slimefsdp.trainer import Trainer
from tests.support.runs import bits, rows_of

ROOT = Path(__file__).parents[2]
STEPS = 5


class GroupOfOne:
    """What the loop asks of a worker group, from a Trainer of the same process."""

    critic = None
    reference_group = None

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._trainer = Trainer(config, device=torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def health(self) -> list[Any]:
        """Of its only rank."""
        return [self._trainer.health()]

    def shutdown(self) -> None:
        """Its process goes on."""


class AskedAfter(Interrupts):
    """Somebody asks for an end while the given step is made."""

    def __init__(self, metrics: Path, asked_in: int) -> None:
        super().__init__()
        self._metrics, self._asked_in = metrics, asked_in

    def step_done(self, step: int) -> bool:
        return len(self._metrics.read_text().splitlines()) >= self._asked_in


def run_alone(rank: int, config: RunConfig, asked_in: int | None = None) -> tuple[str | None, int]:
    """The closing line and 0, or None and the exit status of a run that was asked to end."""
    assert config.run.dir is not None
    interrupts = None if asked_in is None else AskedAfter(config.run.dir / "metrics.jsonl", asked_in)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop.SupervisedGroup, "launch", GroupOfOne)
        # demonstrations are encoded by a task of Ray, which would else join whatever cluster is on the machine
        patched.setenv("RAY_ADDRESS", "local")
        try:
            return loop.train(config, interrupts), 0
        except Interrupted as error:
            return None, error.exit_code


@pytest.fixture(scope="module")
def make(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    def config(name: str, *more: str) -> RunConfig:
        folder = runs / name
        overrides = [f"model.path={example / 'model'}", f"data.train={example / 'sft.jsonl'}", "mesh.dp=1"]
        overrides += [f"run.dir={folder}", f"run.export_dir={folder / 'model'}", f"run.steps={STEPS}"]
        overrides += ["batch.samples_per_update=4", "checkpoint.interval_steps=2", *more]
        return load_config(ROOT / "configs" / "sort_digits_sft.yaml", overrides)

    runs = tmp_path_factory.mktemp("runs")
    return config


@pytest.fixture(scope="module")
def straight(make: Any, ranks: Any) -> tuple[RunConfig, str, int]:
    """A whole run, its closing line and status."""
    config = make("straight")
    ((closing, status),) = ranks.run(1, run_alone, config)
    return config, closing, status


def exported(config: RunConfig) -> str:
    assert config.run.export_dir is not None
    return hashlib.sha256((config.run.export_dir / "model.safetensors").read_bytes()).hexdigest()


def test_a_run_leaves_metrics_curves_events_settings_checkpoints_and_a_model(
    straight: tuple[RunConfig, str, int],
) -> None:
    config, closing, status = straight
    assert status == 0 and str(STEPS) in closing
    folder = config.run.dir
    assert folder is not None and config.run.export_dir is not None
    assert [row["step"] for row in rows_of(config)] == [1, 2, 3, 4, 5]
    assert all(row["memory/peak_bytes"] >= row["memory/allocated_bytes"] > 1e7 for row in rows_of(config))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert any(file.stat().st_size > 1000 for file in (folder / "tensorboard").glob("events*"))
    assert RunFolder(folder).checkpoint_steps == [4, 5]  # the last two: after every second step, and after the last
    assert load_config(folder / "settings.yaml") == config
    assert (config.run.export_dir / "config.json").is_file() and exported(config)


def test_a_run_that_was_asked_to_end_leaves_a_checkpoint_and_goes_on_to_the_same_bits(
    make: Any, ranks: Any, straight: tuple[RunConfig, str, int]
) -> None:
    name, asked_in = "asked in 3", 3  # a step after which none would be saved
    halted = make(name)
    assert ranks.run(1, run_alone, halted, asked_in) == [(None, 75)]
    assert len(rows_of(halted)) == asked_in == RunFolder(halted.run.dir).checkpoint_steps[-1]
    assert not halted.run.export_dir.exists()
    assert (halted.run.dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    resumed = make(name, "checkpoint.resume=true")
    ((_, status),) = ranks.run(1, run_alone, resumed)
    found, expected = ([bits(row) for row in rows_of(config)] for config in (resumed, straight[0]))
    assert status == 0 and found == expected and len(found) == STEPS
    starts = [json.loads(line) for line in (halted.run.dir / STARTS).read_text().splitlines()]
    assert [start["step"] for start in starts] == [0, asked_in] and starts[0]["time"] < starts[1]["time"]
    assert starts[0]["versions"].keys() >= {"slimefsdp", "torch", "transformers", "python"} and starts[0]["machine"]
    assert exported(resumed) == exported(straight[0])


def refused_alone(rank: int, config: RunConfig) -> tuple[str | None, str | None]:
    """Field and hint of the error with which a run ends before it trains."""
    with pytest.raises(CheckpointError) as caught:
        run_alone(rank, config)
    return caught.value.field, caught.value.hint


@pytest.mark.slow  # three runs
def test_a_resumed_run_takes_other_prompts_only_if_it_is_told_to(
    make: Any, ranks: Any, example: Path, tmp_path: Path
) -> None:
    train = tmp_path / "train.jsonl"
    lines = (example / "sft.jsonl").read_text().splitlines()[:20]
    train.write_text("\n".join(lines))
    began = make("other prompts", f"data.train={train}")
    assert ranks.run(1, run_alone, began, 2) == [(None, 75)]
    train.write_text("\n".join(lines[::-1]))  # as many records
    resumed = make("other prompts", f"data.train={train}", "checkpoint.resume=true")
    ((field, hint),) = ranks.run(1, refused_alone, resumed)
    assert field == "data.train" and hint is not None and "data.allow_changed=true" in hint
    assert len(rows_of(began)) == 2, "nothing was trained"
    allowed = make("other prompts", f"data.train={train}", "checkpoint.resume=true", "data.allow_changed=true")
    ((_, status),) = ranks.run(1, run_alone, allowed)
    assert status == 0 and [row["step"] for row in rows_of(began)] == [1, 2, 3, 4, 5]


def test_prompts_that_are_too_long_are_refused_before_a_group_is_launched_or_left_out(
    make: Any, ranks: Any, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = tmp_path / "train.jsonl"
    lines = (example / "sft.jsonl").read_text().splitlines()[:6]
    train.write_text("\n".join([*lines, json.dumps({"prompt": "sort " + "7" * 300, "answer": "7"})]))
    config = make("too long", f"data.train={train}", "data.max_prompt_tokens=100")
    monkeypatch.setattr(loop.SupervisedGroup, "launch", lambda config: pytest.fail("a group was launched"))
    with pytest.raises(ConfigError) as caught:
        loop.train(config)
    assert caught.value.field == "data.train" and f"{train}:7" in caught.value.message
    skipping = make("too long", f"data.train={train}", "data.max_prompt_tokens=100", "data.overlong_prompts=skip")
    ((_, status),) = ranks.run(1, run_alone, skipping)
    (skipped,) = map(json.loads, (config.run.dir / SKIPPED).read_text().splitlines())
    assert status == 0 and skipped["place"] == f"{train}:7" and len(rows_of(config)) == STEPS
