"""Several adapters beside one base: each trains to the bits that it has alone, whatever others do in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimefsdp.config import RunConfig
from slimefsdp.convert.convert import checkpoint_to_hugging_face
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.memory_manager import StorageOffloader
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError, StateError
from slimefsdp.models.build import build_for_sampling
from slimefsdp.models.lora import set_scale
from slimefsdp.results import AdapterInfo
from slimefsdp.rpc import CALLS, DEFAULT_ADAPTER, UpdateSettings
from slimefsdp.trainer import Trainer
from slimefsdp.training import step
from slimefsdp.training.build import compute_dtype, lora_of
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.peft_folders import adapters_in, opened_by_peft
from tests.support.plain_lora import Taker, adapters_of
from tests.support.plain_step import TEMPERATURE, make_batch
from tests.support.plain_step import settings as float64_settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import error_of, fresh_batch, settings

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case
LORA = {"rank": 4, "alpha": 8.0}
MADE: dict[str, dict[str, Any]] = {  # adapters by name, and how they are made
    "a": {"rank": 4, "alpha": 3.0, "seed": 1},
    "b": {"rank": 2, "alpha": 5.0, "seed": 2},
    "c": {"rank": 1, "seed": 3},
    "d": {"seed": 4},
    "e": {"alpha": 1.0},
    "f": {"rank": 3},
    "g": {"rank": 4, "alpha": 3.0, "seed": 1},
}


def adapter_settings(folder: Path, **sections: Any) -> RunConfig:
    lora = {**LORA, **sections.pop("lora", {})}
    optim = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1, "schedule": "linear", "total_updates": 9}
    return settings(folder, lora=lora, loss={"kl_coefficient": 0.1, "kl_target": 0.01}, optim=optim, **sections)


def life(trainer: Trainer, name: str, saves: bool) -> Iterator[Any]:
    """What one adapter is asked for, a call at a time, with batches of its own; what the calls say."""
    number = sum(name.encode())
    batches = [fresh_batch(number + seed) for seed in range(4)]
    yield trainer.train_step(batches[0])
    yield trainer.forward_backward(batches[1], settings={"clip_low": 0.1}, with_log_probs=True).log_probs.log_probs
    yield trainer.forward_backward(batches[2])  # gradients wait meanwhile
    if saves:
        yield error_of(lambda: trainer.load(name="none-yet")).__class__
    yield trainer.optimizer_step(UpdateSettings(lr=0.01 * (1 + number % 3), betas=(0.5, 0.6)))
    if saves:
        trainer.save(2, {"of": name})
        trainer.save(2, name="kept")
        yield None
    yield trainer.train_step(batches[3])
    yield trainer.compute_log_probs(batches[0]).log_probs
    yield trainer.compute_log_probs(batches[0], "ref").log_probs
    if saves:
        yield trainer.load()
        yield trainer.train_step(batches[3])
        yield trainer.load(name="kept")
        yield trainer.train_step(batches[1])
    yield trainer.gradient_health().norm
    yield (trainer.updates_taken, trainer.updater.next_lr, trainer._state.kl_coefficient)


def seen(value: Any) -> Any:
    """Of what a call says, all that its adapter decides, in a form that `==` compares to the bit."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        measured = ("second", "tflops", "mfu")
        return {key: one for key, one in value.items() if not any(word in key for word in measured)}
    return value


def in_turns(rank: int, config: RunConfig, names: list[str], saves: bool) -> dict[str, Any]:
    """Adapters that take a call each, by turns; what each was told, and its bits at the end."""
    trainer = Trainer(config, device=CPU)
    for name in names:
        if name != DEFAULT_ADAPTER:
            trainer.create_adapter(name, **MADE[name])
    lives = {name: life(trainer, name, saves) for name in names}
    said: dict[str, list[Any]] = {name: [] for name in names}
    turn = 0
    while lives:
        for name in list(lives):
            trainer.use_adapter(name)
            turn += 1
            if turn % 7 == 0:
                trainer.sleep()
            try:
                said[name].append(seen(next(lives[name])))
            except StopIteration:
                del lives[name]
    found: dict[str, Any] = {}
    for name in names:
        trainer.use_adapter(name)
        trainer.wake_up()
        found[name] = said[name], {key: value.numpy().tobytes() for key, value in adapters_of(trainer).items()}
    assert trainer.check_sync().is_in_sync
    return {"found": found, "listed": trainer.adapters(), "memory": trainer.memory()}


MESHES: dict[str, dict[str, Any]] = {
    "one rank": {"optim": {"name": "sgd"}, "model": {"activation_checkpointing": "full"}},
    "dp 2, moments in bfloat16": {
        "mesh": {"dp": 2},
        "lora": {"targets": ["attention", "head"]},
        "optim": {"state_dtype": "bfloat16"},
    },
    "cp 2, moments in 8 bits": {"mesh": {"cp": 2}, "optim": {"state_dtype": "8bit"}},
    "two copies, muon": {
        "mesh": {"dp_replicate": 2},
        "fsdp": {"sharding": "keep_parameters"},
        "optim": {"name": "muon"},
    },
    "optimizer": {"mesh": {"dp": 2}, "fsdp": {"sharding": "optimizer"}},
}


def each_alone(rank: int, configs: dict[str, RunConfig], saves: bool) -> dict[str, Any]:
    """Of each adapter what `in_turns` says where no other one is."""
    found = {name: in_turns(rank, config, [name], saves)["found"] for name, config in configs.items()}
    return {name: one[name] for name, one in found.items()}


def compare_with_alone(ranks: RankPool, config: RunConfig, folder: Path, names: list[str], saves: bool) -> None:
    def run_in(place: str) -> RunConfig:
        run = config.run.model_copy(update={"dir": folder / place})
        return config.model_copy(update={"run": run})

    together = ranks.run(config.ranks, in_turns, run_in("together"), names, saves)
    alone = ranks.run(config.ranks, each_alone, {name: run_in(f"alone {name}") for name in names}, saves)
    for here, there in zip(together, alone, strict=True):
        for name in names:
            (said, bits), (said_alone, bits_alone) = here["found"][name], there[name]
            assert said == said_alone, name
            assert bits == bits_alone, name
    ends = [together[0]["found"][name][1] for name in names]
    assert all(one != other for index, one in enumerate(ends) for other in ends[index + 1 :])


@pytest.mark.parametrize("mesh", MESHES)
def test_two_adapters_in_turn_have_the_bits_that_each_has_alone(
    folder: Path, ranks: RankPool, tmp_path: Path, mesh: str
) -> None:
    sections = dict(MESHES[mesh])
    optim = sections.pop("optim", {})
    config = adapter_settings(folder, **sections)
    config = config.model_copy(update={"optim": config.optim.model_copy(update=optim)})
    compare_with_alone(ranks, config, tmp_path, ["a", "b"], saves=True)


def test_adapters_that_wait_are_on_the_host(folder: Path, ranks: RankPool) -> None:
    config = adapter_settings(folder)
    found = ranks.run(1, places_of_adapters, config)[0]
    assert [one.name for one in found["made"]] == [DEFAULT_ADAPTER, "a", "b", "c", "d"]
    assert {one.name for one in found["made"] if one.is_on_device} == {"d"}
    assert {one.name for one in found["used"] if one.is_on_device} == {"a"}
    assert found["made"][2] == AdapterInfo("b", 2, 5.0, 0, False, False)
    assert found["host"] > 0


def places_of_adapters(rank: int, config: RunConfig) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    for name in ("a", "b", "c", "d"):
        trainer.create_adapter(name, **MADE[name])
    made = trainer.adapters()
    trainer.use_adapter("a")
    return {"made": made, "used": trainer.adapters(), "host": trainer.memory().host_buffers}


def without_host_memory(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    def full(*_: Any) -> None:
        raise ResourceError("the host is full", field="tags", hint="none")

    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    trainer.forward_backward(batch)
    before = adapters_of(trainer)
    with pytest.MonkeyPatch.context() as patched:
        if rank == dist.get_world_size() - 1:  # on one rank alone, after others have made room
            patched.setattr(StorageOffloader, "sleep", full)
        refused = error_of(lambda: trainer.create_adapter("a", **MADE["a"]))
    same = largest_difference(before, adapters_of(trainer)) == 0
    found = {"refused": refused, "same": same, "listed": [one.name for one in trainer.adapters()]}
    norm = trainer.optimizer_step()["grad_norm"]
    trainer.create_adapter("a", **MADE["a"])
    return {**found, "norm": norm, "after": [one.name for one in trainer.adapters()]}


def test_an_adapter_for_which_there_is_no_memory_changes_nothing(folder: Path, ranks: RankPool) -> None:
    config = adapter_settings(folder, mesh={"dp": 2})
    for found in ranks.run(2, without_host_memory, config, fresh_batch()):
        assert isinstance(found["refused"], ResourceError) and found["same"]
        assert found["listed"] == [DEFAULT_ADAPTER] and found["norm"] > 0
        assert found["after"] == [DEFAULT_ADAPTER, "a"]


def trained_as(rank: int, config: RunConfig, batch: RolloutBatch, made: dict[str, Any] | None) -> dict[str, Any]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        if made is not None:
            trainer.train_step(batch)  # of the run's own, which leaves nothing behind
            trainer.create_adapter("own", **made)
        start = adapters_of(trainer)
        for _ in range(2):
            trainer.train_step(batch)
    return {"start": start, "end": adapters_of(trainer)}


@pytest.mark.parametrize(
    ("kind", "targets", "dp", "optimizer"),
    [
        ("qwen3", ["attention", "mlp"], 1, "adamw"),
        ("qwen3_moe", ["experts", "head"], 2, "adamw"),
        ("qwen3_moe", ["attention", "experts"], 2, "muon"),
    ],
)
def test_an_adapter_of_a_smaller_rank_trains_as_in_a_run_of_that_rank(
    tiny_folder: TinyFolder, ranks: RankPool, dp: int, kind: str, targets: list[str], optimizer: str
) -> None:
    folder = tiny_folder(kind)
    batch, optim = make_batch(folder), {"name": optimizer, "lr": 0.01, "eps": 1e-4}
    common: dict[str, Any] = {"mesh": {"dp": dp}, "optim": optim}
    roomy = float64_settings(folder, lora={"rank": 5, "alpha": 2.0, "targets": targets}, run={"seed": 7}, **common)
    exact = float64_settings(folder, lora={"rank": 2, "alpha": 6.0, "targets": targets}, run={"seed": 7}, **common)
    ours = ranks.run(dp, trained_as, roomy, batch, {"rank": 2, "alpha": 6.0, "seed": 7})[0]
    theirs = ranks.run(dp, trained_as, exact, batch, None)[0]
    for moment in ("start", "end"):
        cut = {
            name: value[..., :2, :] if name.endswith("lora_A") else value[..., :2]
            for name, value in ours[moment].items()
        }
        assert largest_difference(cut, theirs[moment]) <= 1e-12
        rest = {
            name: value[..., 2:, :] if name.endswith("lora_A") else value[..., 2:]
            for name, value in ours[moment].items()
        }
        assert all(value.numel() and not value.any() for value in rest.values())
    assert largest_difference(theirs["start"], theirs["end"]) > 1e-3


def exported(rank: int, config: RunConfig, batch: RolloutBatch, target: Path) -> np.ndarray:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        trainer.create_adapter("small", rank=2, alpha=6.0, seed=3)
        trainer.train_step(batch)
        trainer.export_adapter(target / "exported")
        trainer.save(1)
        return trainer.compute_log_probs(batch).log_probs


@pytest.mark.parametrize(
    ("kind", "targets", "dp"), [("qwen3", ["attention", "mlp"], 1), ("qwen3_moe", ["experts", "head"], 2)]
)
def test_an_adapter_of_a_smaller_rank_leaves_as_one_of_that_rank_for_peft(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, dp: int, kind: str, targets: list[str]
) -> None:
    folder = tiny_folder(kind)
    batch = make_batch(folder)
    config = float64_settings(
        folder, lora={"rank": 5, "alpha": 2.0, "targets": targets}, mesh={"dp": dp}, run={"dir": str(tmp_path / "run")}
    )
    ours = ranks.run(dp, exported, config, batch, tmp_path)[0]
    opened = opened_by_peft(folder, tmp_path / "exported", batch)
    theirs = torch.cat(
        [
            (logits[-sample["response_length"] - 1 : -1] / TEMPERATURE)
            .log_softmax(-1)
            .gather(-1, torch.tensor(sample["tokens"][-sample["response_length"] :])[:, None])[:, 0]
            for logits, sample in zip(opened, batch.to_samples(), strict=True)
        ]
    )
    assert np.abs(ours - theirs.detach().numpy()).max() <= 1e-6  # which are float32
    found = adapters_in(tmp_path / "exported")
    assert {min(value.shape) for value in found.values()} == {2}
    checkpoint = tmp_path / "run/adapters/small/checkpoints/step_00000001"
    checkpoint_to_hugging_face(checkpoint, tmp_path / "converted", None, dtype=None, note=print)
    assert largest_difference(adapters_in(tmp_path / "converted"), found) == 0


class TakesAdapters(Taker):
    """A model with adapters of its own, as an embedded engine has it under lora.sync=adapters."""

    takes_adapters = True

    def __init__(self, config: RunConfig) -> None:
        self.policy = build_for_sampling(config.model.path, compute_dtype(config), CPU, lora_of(config))
        super().__init__(self.policy.hf)
        self._parameters = dict(self.policy.all_parameters())

    def begin(self, version: int, manifest: Any, kept: Any = (), adapter_scale: float | None = None) -> None:
        super().begin(version, manifest, kept)
        assert adapter_scale is not None
        set_scale(self.policy, adapter_scale)


def sent_alone(rank: int, config: RunConfig, batch: RolloutBatch) -> list[dict[str, Any]]:
    """Of one rank: of each adapter what an engine was sent, and what both say of a batch."""
    trainer, engine = Trainer(config, device=CPU), TakesAdapters(config)
    trainer.create_adapter("small", rank=1, alpha=5.0, seed=3)
    found = []
    for name in (DEFAULT_ADAPTER, "small", DEFAULT_ADAPTER):
        trainer.use_adapter(name)
        trainer.train_step(batch)
        report = trainer.update_weights([engine])
        for parameter in engine.policy.parameters():  # rank 0's, to every rank that has packs of its own
            dist.broadcast(parameter.detach(), 0)
        if rank > 0:
            set_scale(engine.policy, 5.0 if name == "small" else 2.0)
        ours = trainer.compute_log_probs(batch).log_probs
        theirs = step.token_outputs(trainer._state, engine.policy, planned(trainer, batch), trained_only=False)
        found.append(
            {"came": list(engine.came), "bytes": report.bytes, "ours": ours, "theirs": theirs[0].float().numpy()}
        )
    return found


def planned(trainer: Trainer, batch: RolloutBatch) -> Any:
    return trainer._prepared(CALLS["compute_log_probs"], {"batch": batch, "model": "actor"})


@pytest.mark.parametrize(("dp", "dtype"), [(1, "float32"), (2, "bfloat16")])
def test_an_engine_that_is_sent_adapters_alone_computes_the_trainers_bits(
    folder: Path, ranks: RankPool, dp: int, dtype: str
) -> None:
    lora = {"sync": "adapters", "targets": ["attention", "mlp"]}
    config = adapter_settings(folder, mesh={"dp": dp}, lora=lora, precision={"compute_dtype": dtype})
    batch = fresh_batch()
    for first, *later in ranks.run(dp, sent_alone, config, batch)[:1]:
        adapters = {name for name in first["came"] if ".lora_" in name}
        assert len(first["came"]) > len(adapters) > 0
        for update in (first, *later):
            assert update["ours"].tobytes() == update["theirs"].tobytes()
        for update in later:
            assert set(update["came"]) == adapters
            assert update["bytes"] < first["bytes"] / 3
        assert len({update["ours"].tobytes() for update in (first, *later)}) == 3


def refusals(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.create_adapter("a", rank=2)
    trainer.forward_backward(batch)
    before = adapters_of(trainer)
    bad: dict[str, dict[str, Any]] = {
        "name": {"name": "a/b"},
        "no name": {"name": 7},
        "rank": {"name": "x", "rank": 5},
        "no rank": {"name": "x", "rank": 0},
        "alpha": {"name": "x", "alpha": float("nan")},
        "seed": {"name": "x", "seed": -1},
    }
    found: dict[str, Any] = {
        key: error_of(lambda given=given: trainer.create_adapter(**given)) for key, given in bad.items()
    }
    found["taken"] = error_of(lambda: trainer.create_adapter("a"))
    found["unknown"] = error_of(lambda: trainer.use_adapter("nobody"))
    found["own"] = error_of(lambda: trainer.delete_adapter(DEFAULT_ADAPTER))
    found["gone"] = error_of(lambda: trainer.delete_adapter("nobody"))
    found["no name to use"] = error_of(lambda: trainer.use_adapter(["a"]))
    found["no name to delete"] = error_of(lambda: trainer.delete_adapter(["a"]))
    found["same"] = trainer.updater.has_gradients and largest_difference(before, adapters_of(trainer)) == 0
    trainer.save(1, name="of-a")
    trainer.create_adapter("b", rank=3)
    found["of another"] = error_of(lambda: trainer.load(name="of-a"))
    trainer.delete_adapter("b")
    found["left"] = [one.name for one in trainer.adapters()], trainer._adapters.current.name  # type: ignore[union-attr]
    trainer.create_adapter("b", rank=3)
    trainer.delete_adapter("a")
    found["again"] = [one.name for one in trainer.adapters()], trainer._adapters.current.name  # type: ignore[union-attr]
    return found


def test_adapters_that_cannot_be_are_refused_and_the_one_in_the_model_stays(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = adapter_settings(folder, run={"dir": str(tmp_path)})
    found = ranks.run(1, refusals, config, fresh_batch())[0]
    for key, field in (("name", "name"), ("no name", "name"), ("rank", "rank"), ("no rank", "rank")):
        assert isinstance(found[key], ConfigError) and found[key].field == field
    for key in ("no name to use", "no name to delete"):
        assert isinstance(found[key], ConfigError) and found[key].field == "name", key
    assert found["alpha"].field == "alpha" and found["seed"].field == "seed"
    for key in ("taken", "unknown", "own", "gone"):
        assert isinstance(found[key], StateError) and found[key].hint, key
    assert found["same"]
    assert isinstance(found["of another"], CheckpointError)  # each has a folder of its own
    assert found["left"] == ([DEFAULT_ADAPTER, "a"], DEFAULT_ADAPTER)
    assert found["again"] == ([DEFAULT_ADAPTER, "b"], "b")


def saved_with_infinity(rank: int, config: RunConfig, target: Path) -> list[Any]:
    trainer = Trainer(config, device=CPU)
    _, parameter = trainer.policy.trained_weights()[-1]
    if rank == dist.get_world_size() - 1:  # of one rank's share alone
        local_shard(parameter.data).view(-1)[-1:] = -torch.inf
    calls = [
        lambda: trainer.save(0, name="infinite"),
        lambda: trainer.export_adapter(target / "adapter"),
        lambda: trainer.export_hf(target / "whole"),
    ]
    return [error_of(call) for call in calls]


def test_weights_that_are_not_finite_leave_by_no_name_and_no_export(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    config = adapter_settings(folder, run={"dir": str(tmp_path / "run")}, mesh={"dp": 2})
    for found in ranks.run(2, saved_with_infinity, config, tmp_path):
        assert [(type(error), error.field) for error in found] == [(CheckpointError, "weights")] * 3, found
    assert not [*tmp_path.glob("run/**/step_*"), *tmp_path.glob("adapter*"), *tmp_path.glob("whole*")]
