"""Whatever a caller gets wrong is a typed error that names the field, at once; the ranks go on as if it had not been.

Every case is met by one group of two ranks that trains a step after it; another group takes the same steps and meets
none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import ray
import yaml

from actors.cli.main import main
from actors.cluster.connect import check_machine, connect
from actors.rollout.filters import load_filter
from actors.rollout.prompts import read_jsonl
from actors.rollout.rewards import load_reward
from actors.workers.worker_group import WorkerGroup
from slimefsdp.batching.plan import Plan
from slimefsdp.checkpoint.manifest import MANIFEST
from slimefsdp.config import RunConfig, config_from_dict, load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelError,
    ResourceError,
    SlimeError,
    StateError,
    SyncError,
)
from slimefsdp.models.hf_folder import SINGLE_FILE
from slimefsdp.training.plan import plan_training
from slimefsdp.training.prepare import PreparedBatch, checked_advantages
from tests.support.waiting import PATIENCE_S

MOST_SECONDS = 2.0
KEPT_STEP = 7  # of a checkpoint that cases damage, each for itself
TIMES = ("seconds", "per_second", "tflops", "mfu")
ROOT = Path(__file__).parents[2]
# functions that a user could have written
FUNCTIONS = """
import asyncio
number = 3
def no_reward(record, response, finished): return {"score": 1.0}
def not_a_number(record, response, finished): return {"reward": float("nan")}
def words(record, response, finished): return {"reward": "1"}
def undecided(record, samples): return None
def tens(record, response, finished): return {"reward": 10**400}
def beyond(record, response, finished): return {"reward": 1e300}
def lines(record, response, finished): return {"reward": 1.0, "a\\nb": 1.0}
def cancelled(record, response, finished): raise asyncio.CancelledError
def generated(record, response, finished): yield {"reward": 1.0}
def __getattr__(name): raise ValueError(name)
def raises(inputs, options): raise KeyError("rewards")
def text(inputs, options): return "advantages"
def too_few(inputs, options): return [1.0]
def endless(inputs, options): return inputs.scores * float("inf")
"""


@dataclass
class World:
    """What a case may use; it leaves all of it as it was, but for `folder`."""

    group: Any
    batch: RolloutBatch
    example: Path
    clean: list[dict[str, str]]  # the steps of a group that never saw bad input
    pids: list[int]
    folder: Path = field(default_factory=Path)  # empty, of one test
    taken: int = 0

    @property
    def config(self) -> RunConfig:
        config: RunConfig = self.group.config
        return config

    @property
    def plan(self) -> Plan:
        return plan_training(self.config, self.batch)

    def tree(self, **sections: Any) -> dict[str, Any]:
        """Settings as a YAML file holds them, with sections laid over them."""
        tree: dict[str, Any] = {
            "run": {"dir": str(self.folder / "run"), "steps": 2},
            "model": {"path": str(self.example / "model")},
            "mesh": {"device": "cpu", "dp": 2},
            "optim": {"total_updates": 10},
            "data": {"train": str(self.example / "train.jsonl")},
            "rollout": {"reward": "actors.rollout.rewards:sorted_digits"},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
        return tree

    def file(self, **sections: Any) -> Path:
        path = self.folder / "c.yaml"
        path.write_text(yaml.safe_dump(self.tree(**sections)))
        return path

    def model(self, prepare: Callable[[Path], object]) -> RunConfig:
        """Settings with a changed copy of the model."""
        shutil.copytree(self.example / "model", self.folder / "model", dirs_exist_ok=True)
        prepare(self.folder / "model")
        return config_from_dict(self.tree(model={"path": str(self.folder / "model")}))

    def step(self) -> dict[str, str]:
        return bits(self.group.train_step(self.batch))


Act = Callable[[World], object]
Case = tuple[Act, type[SlimeError], str | None]


def bits(metrics: dict[str, float]) -> dict[str, str]:
    """Every metric that is not a time, to the last bit."""
    return {name: value.hex() for name, value in metrics.items() if not any(word in name for word in TIMES)}


# ---------------------------------------------------------------------- where bad input comes in


def settings(**sections: Any) -> Act:
    return lambda world: load_config(world.file(**sections))


def text(content: str | bytes) -> Act:
    def act(world: World) -> object:
        raw = content.encode() if isinstance(content, str) else content
        (world.folder / "c.yaml").write_bytes(raw)
        return load_config(world.folder / "c.yaml")

    return act


def override(*overrides: str) -> Act:
    return lambda world: load_config(world.file(), overrides)


def command(*arguments: str) -> Act:
    """CONFIG and FOLDER stand for a good YAML file and an empty folder; errors are raised, not printed."""

    def act(world: World) -> object:
        names = {"CONFIG": str(world.file()), "FOLDER": str(world.folder)}
        return main(["--debug", *(names.get(word, word.replace("FOLDER", names["FOLDER"])) for word in arguments)])

    return act


def made(**fields: Any) -> Act:
    """A batch of one sample, or of what is given instead."""
    sound: dict[str, Any] = {"tokens": [1, 2, 3], "lengths": [3], "response_lengths": [1]}
    return lambda world: world.group.train_step(RolloutBatch(**sound | fields))


def changed(call: str = "train_step", *rest: Any, **fields: Any) -> Act:
    return lambda world: getattr(world.group, call)(world.batch.replace(**fields), *rest)


def planned(change: Callable[[Plan], Any]) -> Act:
    return lambda world: world.group.train_step(world.batch, change(world.plan))


def packs(change: Callable[[list[np.ndarray]], list[np.ndarray]]) -> Act:
    """The packs of the first data rank in the first update are others."""

    def changed_plan(plan: Plan) -> Plan:
        (first, *ranks), *updates = plan.updates
        return replace(plan, updates=((tuple(change(list(first))), *ranks), *updates))

    return planned(changed_plan)


def launched(prepare: Callable[[Path], object]) -> Act:
    return lambda world: WorkerGroup.launch(world.model(prepare))


def config_json(**changes: Any) -> Act:
    def prepare(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return launched(prepare)


def damaged(name: str, damage: Callable[[Path], object]) -> Act:
    """A checkpoint of this run whose file is not what it was; it is put back afterwards."""

    def act(world: World) -> object:
        assert world.config.run.dir is not None
        step = world.config.run.dir / "checkpoints" / f"step_{KEPT_STEP:08d}"
        shutil.copytree(step, world.folder / "kept", dirs_exist_ok=True)
        damage(step / name)
        try:
            return world.group.load(KEPT_STEP)
        finally:
            shutil.rmtree(step)
            shutil.copytree(world.folder / "kept", step)

    return act


def taken_folder(world: World) -> object:
    (world.folder / "taken").mkdir(exist_ok=True)
    (world.folder / "taken" / "file").touch()
    return world.group.export_hf(world.folder / "taken")


def estimated(name: str) -> Act:
    """What the driver does with a batch before any rank sees it."""

    def act(world: World) -> object:
        config = config_from_dict(world.tree(advantage={"estimator": f"own_functions:{name}"}))
        return checked_advantages(config, world.batch, 320, loss="policy")

    return act


def rewarded(name: str) -> Act:
    return lambda world: load_reward(name)({"prompt": "sort 1", "answer": "1"}, "1", True)


def jsonl(line: str) -> Act:
    def act(world: World) -> object:
        (world.folder / "p.jsonl").write_text(line + "\n")
        return read_jsonl(world.folder / "p.jsonl", field="data.train")

    return act


def connect_elsewhere(world: World) -> object:
    with patch.dict(os.environ):
        os.environ.pop("RAY_AUTH_MODE", None)  # which the local cluster of this process has set
        return connect(config_from_dict(world.tree(cluster={"address": "10.0.0.1:6379"})))


def launch_too_many(world: World) -> object:
    """More ranks than the cluster has places, though the machine's own cap allows them."""
    ranks = int(ray.cluster_resources()["CPU"]) + 1
    return WorkerGroup.launch(
        config_from_dict(world.tree(mesh={"dp": ranks}, cluster={"max_ranks_per_core": 2 * ranks}))
    )


def flip(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


SETTINGS: dict[str, Case] = {
    "a file that is not there": (lambda w: load_config(w.folder / "no.yaml"), ConfigError, None),
    "a file that is no text": (text(b"\xff\xfe\0"), ConfigError, None),
    "a file that is no YAML": (text("a: [1"), ConfigError, None),
    "a file without sections": (text("- 1"), ConfigError, None),
    "a setting twice": (text("run: {}\nrun: {}"), ConfigError, None),
    "an unknown section": (settings(meshes={"dp": 2}), ConfigError, "meshes"),
    "an unknown setting": (settings(mesh={"pd": 2}), ConfigError, "mesh.pd"),
    "a word for a number": (settings(optim={"lr": "fast"}), ConfigError, "optim.lr"),
    "a fraction for a count": (settings(rollout={"max_new_tokens": 1.5}), ConfigError, "rollout.max_new_tokens"),
    "a number for a switch": (settings(model={"compile": 1}), ConfigError, "model.compile"),
    "a list for a section": (settings(optim=[1]), ConfigError, "optim"),
    "a negative rate": (settings(optim={"lr": -1.0}), ConfigError, "optim.lr"),
    "a rate that is no number": (settings(optim={"lr": float("nan")}), ConfigError, "optim.lr"),
    "betas over one": (settings(optim={"betas": [0.9, 1.5]}), ConfigError, "optim.betas"),
    "no end of the schedule": (
        settings(run={"steps": None}, optim={"total_updates": None, "schedule": "linear"}),
        ConfigError,
        "optim.schedule",
    ),
    "warm-up to the end": (settings(optim={"warmup_updates": 10}), ConfigError, "optim.warmup_updates"),
    "a warm-up that is given twice": (
        settings(optim={"warmup_updates": 1, "warmup_ratio": 0.1}), ConfigError, "optim.warmup_ratio"
    ),
    "an unknown algorithm": (settings(algorithm="dqn"), ConfigError, "algorithm"),
    "an unknown device": (settings(mesh={"device": "tpu"}), ConfigError, "mesh.device"),
    "a path of nothing": (settings(model={"path": ""}), ConfigError, "model.path"),
    "settings from nothing": (lambda w: load_config(None), ConfigError, "path"),  # type: ignore[arg-type]
    "one override for a list of them": (lambda w: load_config(w.file(), "optim.lr=1"), ConfigError, "overrides"),
    "overrides that are no texts": (
        lambda w: load_config(w.file(), [None]), ConfigError, "overrides"  # type: ignore[list-item]
    ),
    "a path with half a character": (
        lambda w: config_from_dict(w.tree(run={"dir": "\udbff"})), ConfigError, "run.dir"
    ),
    "an override without a value": (override("optim.lr"), ConfigError, None),
    "an override like an option": (override("--optim.lr=1"), ConfigError, None),
    "an override of a section's name": (override("mesh=2"), ConfigError, "mesh"),
    "an override inside of a value": (override("run.steps.first=1"), ConfigError, "run.steps.first"),
    "an override that is no YAML": (override("optim.lr=["), ConfigError, None),
}  # fmt: skip
COMMANDS: dict[str, Case] = {
    "train without a file": (command("train", "FOLDER/no.yaml"), ConfigError, None),
    "train into a file": (command("train", "CONFIG", "run.dir=FOLDER/c.yaml"), ConfigError, "run.dir"),
    "train without data": (command("train", "CONFIG", "data.train=FOLDER/no.jsonl"), ConfigError, "data.train"),
    "train from no checkpoint": (command("train", "CONFIG", "checkpoint.resume=true"), ConfigError, "run.dir"),
    "train with too many ranks": (command("train", "CONFIG", "mesh.dp=100000"), ResourceError, "mesh.dp"),
    "train responses longer than a pack": (
        command("train", "CONFIG", "rollout.max_new_tokens=9000"), ConfigError, "rollout.max_new_tokens"
    ),
    "replay without a batch": (command("replay", "CONFIG", "--batch", "FOLDER/no"), BatchError, "--batch"),
    "plan with 10^300 GB": (command("plan", "CONFIG", "--memory-gb", "1e300"), ConfigError, "--memory-gb"),
    "plan with no number of GB": (command("plan", "CONFIG", "--memory-gb", "nan"), ConfigError, "--memory-gb"),
    "plan with a rate of 10^-300": (command("plan", "CONFIG", "--tflops", "1e-300"), ConfigError, "--tflops"),
    "plan with a share over one": (command("plan", "CONFIG", "--counted", "2"), ConfigError, "--counted"),
    "plan of 10^400 ranks": (
        command("plan", "CONFIG", "mesh.dp=auto", "--ranks", "1" + "0" * 400), ConfigError, "--ranks"
    ),
    "plan of 10^30 samples": (
        command("plan", "CONFIG", "rollout.prompts_per_step=" + "1" + "0" * 30), ConfigError, "rollout.prompts_per_step"
    ),
    "plan with a strange distribution": (command("plan", "CONFIG", "--lengths", "gamma(2)"), ConfigError, "--lengths"),
    "plan without a calibration": (
        command("plan", "CONFIG", "--calibration", "FOLDER/no.json"), ConfigError, "--calibration"
    ),
    "plan balanced by nothing": (
        command("plan", "CONFIG", "batch.cost_model=FOLDER/no.json"), ConfigError, "batch.cost_model"
    ),
    "calibrate into a folder": (command("plan", "CONFIG", "--calibrate", "FOLDER"), ConfigError, "--calibrate"),
    "convert nothing": (command("convert", "hf-to-dcp", "FOLDER/no", "FOLDER/out"), CheckpointError, "SRC"),
}  # fmt: skip
BATCHES: dict[str, Case] = {
    "no batch": (lambda w: w.group.train_step(None), BatchError, "batch"),
    "a dictionary": (lambda w: w.group.train_step({"tokens": [1]}), BatchError, "batch"),
    "no sample": (made(tokens=[], lengths=[], response_lengths=[]), BatchError, "lengths"),
    "fewer tokens than lengths say": (made(lengths=[4]), BatchError, "tokens"),
    "a negative token": (made(tokens=[1, -1, 3]), BatchError, "tokens"),
    "half a token": (made(tokens=[1, 2.5, 3]), BatchError, "tokens"),
    "a token over the vocabulary": (made(tokens=[1, 2, 320], rewards=[1.0], group_ids=[0]), BatchError, "tokens"),
    "no prompt": (made(response_lengths=[3]), BatchError, "response_lengths"),
    "a sample over the budget": (
        made(tokens=np.arange(65), lengths=[65], rewards=[1.0], group_ids=[0]), BatchError, "lengths"
    ),
    "a reward that is no number": (changed(rewards=[float("nan")] * 4), BatchError, "rewards"),
    "rewards of other samples": (changed(rewards=[1.0] * 3), BatchError, "rewards"),
    "no rewards": (changed(rewards=None), BatchError, "rewards"),
    "no groups": (changed(group_ids=None), BatchError, "group_ids"),
    "groups of one": (changed(group_ids=np.arange(4)), BatchError, "group_ids"),
    "nothing to train": (lambda w: w.group.train_step(
        w.batch.replace(loss_mask=np.zeros(w.batch.num_response_tokens, bool))), BatchError, "loss_mask"),
    "probabilities for log-probs": (lambda w: w.group.train_step(
        w.batch.replace(rollout_log_probs=np.full(w.batch.num_response_tokens, 0.5))), BatchError, "rollout_log_probs"),
    "an unknown field": (changed(reward=[1.0] * 4), BatchError, "reward"),
    "another temperature": (changed(temperature=0.1), BatchError, "temperature"),
    "a temperature of zero": (changed(temperature=0.0), BatchError, "temperature"),
    "a batch into nothing": (lambda w: w.batch.save(None), BatchError, "path"),  # type: ignore[arg-type]
    "a batch from nothing": (lambda w: RolloutBatch.load(3), BatchError, "path"),  # type: ignore[arg-type]
    "samples that are none": (
        lambda w: RolloutBatch.from_samples(None), BatchError, "samples"  # type: ignore[arg-type]
    ),
    "slime's dict that is none": (
        lambda w: RolloutBatch.from_slime([]), BatchError, "data"  # type: ignore[arg-type]
    ),
    "half a group of slime's": (
        lambda w: RolloutBatch.from_slime(
            {"tokens": [[1, 2]], "response_lengths": [1]}, samples_per_group=0.5  # type: ignore[arg-type]
        ),
        BatchError, "group_ids",
    ),
    "tokens that are masked": (made(tokens=np.ma.masked_equal([1, 2, 3], 2)), BatchError, "tokens"),
    "a field of a thousand letters": (made(**{"x" * 1000: [1]}), BatchError, "x" * 60),
    "samples in lists of lists": (lambda w: w.batch.select([[0], [0, 1]]), BatchError, "indices"),
    "a sample that is not there": (lambda w: w.batch.select([9]), BatchError, "indices"),
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
MODELS: dict[str, Case] = {
    "a model that is not there": (
        lambda w: WorkerGroup.launch(config_from_dict(w.tree(model={"path": str(w.folder / "no")}))),
        ModelError, "model.path",
    ),
    "a model without config.json": (launched(lambda path: (path / "config.json").unlink()), ModelError, "model.path"),
    "a model without weights": (launched(lambda path: (path / SINGLE_FILE).unlink()), ModelError, "model.path"),
    "weights that were cut": (launched(lambda path: cut(path / SINGLE_FILE)), ModelError, "model.path"),
    "an unknown architecture": (config_json(model_type="mamba"), ModelError, "model.path"),
    "quantised weights": (config_json(quantization_config={"quant_method": "fp8"}), ModelError, "model.path"),
    "a vocabulary in words": (config_json(vocab_size="many"), ModelError, "model.path"),
    "heads that do not divide": (config_json(num_key_value_heads=3), ModelError, "model.path"),
    "a reference that is not there": (
        lambda w: WorkerGroup.launch(config_from_dict(w.tree(reference={"path": str(w.folder / "no")})), "ref"),
        ModelError, "reference.path",
    ),
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
    "an export over a folder": (taken_folder, CheckpointError, "path"),
    "an export in an unknown dtype": (lambda w: w.group.export_hf(w.folder / "x", "int3"), ConfigError, "dtype"),
}  # fmt: skip
FUNCTION_CASES: dict[str, Case] = {
    "a reward that is no name": (settings(rollout={"reward": "exact"}), ConfigError, "rollout.reward"),
    "a reward in no module": (rewarded("no_such_module:f"), ConfigError, "rollout.reward"),
    "a reward that is not there": (rewarded("own_functions:f"), ConfigError, "rollout.reward"),
    "a reward that cannot be called": (rewarded("own_functions:number"), ConfigError, "rollout.reward"),
    "scores without a reward": (rewarded("own_functions:no_reward"), BatchError, "rollout.reward"),
    "a reward of NaN": (rewarded("own_functions:not_a_number"), BatchError, "rollout.reward"),
    "a reward of 400 digits": (rewarded("own_functions:tens"), BatchError, "rollout.reward"),
    "a reward beyond float32": (rewarded("own_functions:beyond"), BatchError, "rollout.reward"),
    "a score whose name has lines": (rewarded("own_functions:lines"), BatchError, "rollout.reward"),
    "a reward that was cancelled": (rewarded("own_functions:cancelled"), BatchError, "rollout.reward"),
    "a reward that yields": (rewarded("own_functions:generated"), ConfigError, "rollout.reward"),
    "a reward in words": (rewarded("own_functions:words"), BatchError, "rollout.reward"),
    "a filter that returns nothing": (
        lambda w: load_filter("own_functions:undecided")({"prompt": "a"}, []), BatchError, "rollout.filter"
    ),
    "an estimator that raises": (estimated("raises"), BatchError, "advantages"),
    "an estimator of words": (estimated("text"), BatchError, "advantages"),
    "an estimator of too few": (estimated("too_few"), BatchError, "advantages"),
    "an estimator of infinities": (estimated("endless"), BatchError, "advantages"),
    "a prompt without text": (jsonl('{"prompt": ""}'), ConfigError, "data.train"),
    "a prompt twice": (jsonl('{"prompt": "a", "prompt": "b"}'), ConfigError, "data.train"),
    "a message of numbers": (jsonl('{"prompt": [{"role": "user", "content": 3}]}'), ConfigError, "data.train"),
}  # fmt: skip
CLUSTER: dict[str, Case] = {
    "more ranks than the machine takes": (
        lambda w: check_machine(config_from_dict(w.tree(mesh={"dp": 100_000}))), ResourceError, "mesh.dp"
    ),
    "more ranks than the cluster has": (launch_too_many, ResourceError, "mesh.dp"),
    "a cluster of Ray's own making": (
        lambda w: connect(config_from_dict(w.tree(cluster={"address": "local"}))), ResourceError, "cluster.address"
    ),
    "a cluster elsewhere without a token": (connect_elsewhere, ResourceError, "cluster.address"),
    "no address": (settings(cluster={"address": ""}), ConfigError, "cluster.address"),
    "no time for a call": (settings(cluster={"call_timeout_s": 0}), ConfigError, "cluster.call_timeout_s"),
    "fewer restarts than none": (settings(cluster={"max_restarts": -1}), ConfigError, "cluster.max_restarts"),
    "a group of no such role": (
        lambda w: WorkerGroup.launch(w.config, "critic", beside=replace_role(w.group)), StateError, "beside"
    ),
}  # fmt: skip
AREAS = {
    "settings": SETTINGS, "commands": COMMANDS, "batches": BATCHES, "plans": PLANS, "models": MODELS,
    "checkpoints": CHECKPOINTS, "functions": FUNCTION_CASES, "cluster": CLUSTER,
}  # fmt: skip
CASES = {name: case for area in AREAS.values() for name, case in area.items()}


def replace_role(group: Any) -> Any:
    """Stands for a reference group."""

    class Reference:
        role, config = "ref", group.config

    return Reference()


@pytest.fixture(scope="module")
def small(batch: RolloutBatch) -> RolloutBatch:
    """Of one update."""
    return batch.select([4, 5, 6, 7])


@pytest.fixture(scope="module")
def world(
    cluster: None, make_config: Any, example: Path, small: RolloutBatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "own_functions.py").write_text(FUNCTIONS)
    sys.path.insert(0, str(folder))
    config = make_config(run={"dir": str(folder / "clean")})
    undisturbed = WorkerGroup.launch(config)
    clean = [bits(undisturbed.train_step(small)) for _ in CASES]
    undisturbed.shutdown()
    group = WorkerGroup.launch(make_config(run={"dir": str(folder / "run")}))
    group.save(KEPT_STEP)
    yield World(group, small, example, clean, [health.pid for health in group.health()])
    group.shutdown()
    sys.path.remove(str(folder))


def test_every_area_has_cases_and_every_error_occurs() -> None:
    assert len(CASES) == sum(map(len, AREAS.values()))  # no name twice
    assert min(map(len, AREAS.values())) >= 5
    assert Counter(error for _, error, _ in CASES.values()).keys() == {
        *(ConfigError, BatchError, ModelError, CheckpointError, ResourceError, StateError, SyncError)
    }


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_a_typed_error_at_once_and_the_next_step_has_the_same_bits(
    name: str, world: World, tmp_path: Path
) -> None:
    act, kind, named = CASES[name]
    world.folder = tmp_path
    seconds = []
    for _ in range(3):  # a machine that stalls must not look like a call that does
        began = time.perf_counter()
        with pytest.raises(kind) as caught:
            act(world)
        seconds.append(time.perf_counter() - began)
        error = caught.value
        assert type(error) is kind and error.field == named and error.hint, repr(error)
        if seconds[-1] < MOST_SECONDS:
            break
    assert min(seconds) < MOST_SECONDS, seconds
    assert [health.pid for health in world.group.health()] == world.pids
    world.taken += 1
    assert world.step() == world.clean[world.taken - 1]


def test_after_all_of_it_the_ranks_hold_the_same_bits_and_have_learned(world: World) -> None:
    assert world.taken == 0 or world.group.health()[0].updates_taken == world.taken
    assert world.group.check_sync().is_in_sync
    norms = {step["grad_norm"] for step in world.clean}
    assert len(norms) > len(world.clean) // 2, "the control: a step changes what the next one finds"


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["train", "CONFIG", "optim.lr=fast"], 2, "optim.lr"),
        (["plan", "CONFIG", "--memory-gb", "1e300"], 2, "--memory-gb"),
        (["plan", "CONFIG", "model.path=nowhere"], 4, "model.path"),
        (["plan", "CONFIG", "--calibrate", ""], 2, "--calibrate"),
    ],
)
def test_the_command_line_prints_three_lines_within_two_seconds_of_the_processor(
    arguments: list[str], status: int, named: str, world: World, tmp_path: Path
) -> None:
    world.folder = tmp_path
    words = [str(world.file()) if word == "CONFIG" else word for word in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "actors.cli", *words],
        capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    ended = os.times()
    lines = done.stderr.splitlines()
    assert done.returncode == status and len(lines) == 3, done.stderr
    assert lines[0].startswith("error [") and lines[1] == f"  field: {named}" and lines[2].startswith("  hint:  ")
    assert ended.children_user + ended.children_system - began.children_user - began.children_system < MOST_SECONDS
