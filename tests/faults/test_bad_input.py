"""A wrong argument of a call is a typed error that names the field, and the group trains on as if it had not been made.

One group of two ranks meets every case and takes a step after each kind; another group takes the same steps and meets
none of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.workers.worker_group import WorkerGroup
from slimefsdp.batching.plan import Plan
from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError, ConfigError, SlimeError, StateError, SyncError
from slimefsdp.training.plan import plan_training
from slimefsdp.training.prepare import PreparedBatch

SAVED_STEP = 7  # of the checkpoint that cases damage; each puts it back
TIMES = ("seconds", "per_second", "tflops", "mfu")


@dataclass
class World:
    """What a case may use. It leaves all of it as it was, but for `folder`."""

    group: Any
    batch: RolloutBatch
    folder: Path

    @property
    def plan(self) -> Plan:
        return plan_training(self.group.config, self.batch)


Act = Callable[[World], object]
Case = tuple[Act, type[SlimeError], str | None]


def bits(metrics: dict[str, float]) -> dict[str, str]:
    """Returns every metric that is not a time, to the last bit."""
    return {name: value.hex() for name, value in metrics.items() if not any(word in name for word in TIMES)}


def made(**fields: Any) -> Act:
    """Trains on a batch of one sample, some of whose fields are replaced."""
    sound: dict[str, Any] = {"tokens": [1, 2, 3], "lengths": [3], "response_lengths": [1]}
    return lambda world: world.group.train_step(RolloutBatch(**sound | fields))


def changed(call: str = "train_step", *rest: Any, **fields: Any) -> Act:
    return lambda world: getattr(world.group, call)(world.batch.replace(**fields), *rest)


def planned(change: Callable[[Plan], Any]) -> Act:
    return lambda world: world.group.train_step(world.batch, change(world.plan))


def packs(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Act:
    """Changes the packs of the first data rank in the first update."""

    def changed_plan(plan: Plan) -> Plan:
        (first, *ranks), *updates = plan.updates
        return replace(plan, updates=((tuple(change(list(first))), *ranks), *updates))

    return planned(changed_plan)


def damaged(name: str, damage: Callable[[Path], object]) -> Act:
    """Loads a checkpoint of this run, one file of which was damaged, and puts the file back."""

    def act(world: World) -> object:
        step = world.group.config.run.dir / "checkpoints" / f"step_{SAVED_STEP:08d}"
        copy = world.folder / "copy"
        shutil.copytree(step, copy)
        damage(step / name)
        try:
            return world.group.load(SAVED_STEP)
        finally:
            shutil.rmtree(step)
            shutil.move(copy, step)

    return act


def existing_folder(world: World) -> object:
    (world.folder / "taken").mkdir()
    (world.folder / "taken" / "file").touch()
    return world.group.export_hf(world.folder / "taken")


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


BATCHES: dict[str, Case] = {
    "no batch": (lambda w: w.group.train_step(None), BatchError, "batch"),
    "no sample": (made(tokens=[], lengths=[], response_lengths=[]), BatchError, "lengths"),
    "fewer tokens than lengths say": (made(lengths=[4]), BatchError, "tokens"),
    "a negative token": (made(tokens=[1, -1, 3]), BatchError, "tokens"),
    "a token over the vocabulary": (made(tokens=[1, 2, 320], rewards=[1.0], group_ids=[0]), BatchError, "tokens"),
    "no prompt": (made(response_lengths=[3]), BatchError, "response_lengths"),
    "a sample over the budget": (
        made(tokens=np.arange(65), lengths=[65], rewards=[1.0], group_ids=[0]), BatchError, "lengths"
    ),
    "a reward that is no number": (changed(rewards=[float("nan")] * 4), BatchError, "rewards"),
    "no rewards": (changed(rewards=None), BatchError, "rewards"),
    "no groups": (changed(group_ids=None), BatchError, "group_ids"),
    "groups of one": (changed(group_ids=np.arange(4)), BatchError, "group_ids"),
    "nothing to train": (lambda w: w.group.train_step(
        w.batch.replace(loss_mask=np.zeros(w.batch.num_response_tokens, bool))), BatchError, "loss_mask"),
    "probabilities for log-probs": (lambda w: w.group.train_step(
        w.batch.replace(rollout_log_probs=np.full(w.batch.num_response_tokens, 0.5))), BatchError, "rollout_log_probs"),
    "an unknown field": (changed(reward=[1.0] * 4), BatchError, "reward"),
    "another temperature": (changed(temperature=0.1), BatchError, "temperature"),
    "tokens that are masked": (made(tokens=np.ma.masked_equal([1, 2, 3], 2)), BatchError, "tokens"),
    "an unknown loss": (changed("forward_backward", "ppo"), ConfigError, "loss"),
    "an unknown model": (changed("compute_log_probs", "critic"), ConfigError, "model"),
    "a denominator of zero": (
        lambda w: w.group.forward_backward(w.batch, denominator=0.0), BatchError, "denominator"
    ),
    "a batch that was prepared": (
        lambda w: w.group.train_step(PreparedBatch(w.batch, w.plan)), BatchError, "batch"
    ),
    "a step without gradients": (lambda w: w.group.optimizer_step(), StateError, "optimizer_step"),
    "values of a policy": (changed("compute_values"), StateError, "compute_values"),
    "an unknown tag": (lambda w: w.group.sleep(("weights",)), ConfigError, "tags"),
    "an engine that is none": (lambda w: w.group.update_weights([object()]), SyncError, "receivers"),
}  # fmt: skip
PLANS: dict[str, Case] = {
    "a list for a plan": (planned(lambda plan: [[0, 1]]), BatchError, "plan"),
    "a plan for one data rank": (
        planned(lambda plan: replace(plan, updates=tuple(update[:1] for update in plan.updates))), BatchError, "plan"
    ),
    "a plan of samples that are not there": (packs(lambda found: [pack + 100 for pack in found]), BatchError, "plan"),
    "a plan of negative samples": (packs(lambda found: [pack - 100 for pack in found]), BatchError, "plan"),
    "a plan with a sample twice": (
        packs(lambda found: [np.concatenate([pack, pack]) for pack in found]), BatchError, "plan"
    ),
    "a plan of fractions": (packs(lambda found: [pack + 0.5 for pack in found]), BatchError, "plan"),
    "a plan with a pack too many": (packs(lambda found: [*found, found[0]]), BatchError, "plan"),
}  # fmt: skip
CHECKPOINTS: dict[str, Case] = {
    "a step that was not saved": (lambda w: w.group.load(99), CheckpointError, "step"),
    "a step in words": (lambda w: w.group.load("newest"), CheckpointError, "step"),
    "a negative step": (lambda w: w.group.save(-1), CheckpointError, "step"),
    "a state of the loop that is no JSON": (lambda w: w.group.save(9, {"a": object()}), CheckpointError, "loop_state"),
    "a flipped bit": (damaged("rank_00001.safetensors", flip), CheckpointError, "rank_00001.safetensors"),
    "a rank's file that was cut": (damaged("rank_00000.json", cut), CheckpointError, "rank_00000.json"),
    "a rank's file that is gone": (
        damaged("rank_00001.safetensors", Path.unlink), CheckpointError, "rank_00001.safetensors"
    ),
    "a manifest that was altered": (damaged(MANIFEST, flip), CheckpointError, MANIFEST),
    "a file too many": (damaged("rank_00002.json", Path.touch), CheckpointError, "rank_00002.json"),
    "an export over a folder": (existing_folder, CheckpointError, "path"),
    "an export in an unknown dtype": (lambda w: w.group.export_hf(w.folder / "x", "int3"), ConfigError, "dtype"),
}  # fmt: skip
AREAS = {"batches": BATCHES, "plans": PLANS, "checkpoints": CHECKPOINTS}


@pytest.fixture(scope="module")
def world(
    cluster: None, make_config: Any, batch: RolloutBatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("bad_input")
    group = WorkerGroup.launch(make_config(run={"dir": str(folder / "run")}))
    group.save(SAVED_STEP)
    yield World(group, batch.select([4, 5, 6, 7]), folder)
    group.shutdown()


@pytest.fixture(scope="module")
def undisturbed(
    cluster: None, make_config: Any, world: World, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """The steps of a group that never saw bad input."""
    group = WorkerGroup.launch(make_config(run={"dir": str(tmp_path_factory.mktemp("clean"))}))
    steps = [bits(group.train_step(world.batch)) for _ in AREAS]
    group.shutdown()
    assert len({step["grad_norm"] for step in steps}) == len(AREAS), "a step has to change what the next one computes"
    return steps


@pytest.mark.parametrize("area", AREAS)
def test_bad_input_is_a_typed_error_and_the_next_step_has_the_same_bits(
    area: str, world: World, undisturbed: list[dict[str, str]]
) -> None:
    pids = [health.pid for health in world.group.health()]
    wrong = {}
    for name, (act, kind, field) in AREAS[area].items():
        with pytest.raises(SlimeError) as caught:
            act(world)
        error = caught.value
        if type(error) is not kind or error.field != field or not error.hint:
            wrong[name] = repr(error)
    assert not wrong
    assert [health.pid for health in world.group.health()] == pids
    assert bits(world.group.train_step(world.batch)) == undisturbed[list(AREAS).index(area)]
    assert world.group.check_sync().is_in_sync
