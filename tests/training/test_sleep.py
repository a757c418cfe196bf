"""Sleep and wake change nothing about training: the same bits with and without them, and nothing left behind."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.memory_manager import TAGS, Tag
from slimefsdp.errors import ConfigError
from slimefsdp.trainer import Trainer
from slimefsdp.weight_sync.receive import WeightReceiver
from tests.support import tiers
from tests.support.process_resources import held_by_the_process
from tests.support.rank_pool import RankPool
from tests.support.trainers import (
    CPU,
    SPREADS,
    error_of,
    fingerprint,
    fresh_batch,
    hex_losses,
    settings,
    steps_then_weights,
)

SUBSETS = [subset for size in range(3) for subset in itertools.combinations(TAGS, size)]  # all but all of them


def tensors_of(trainer: Trainer, tag: str) -> list[torch.Tensor]:
    model = {"parameters": trainer.policy, "reference": trainer.reference}
    if tag in model:
        found = model[tag]
        return [] if found is None else [*found.parameters(), *found.buffers()]
    return [value for state in trainer.updater.optimizer.state.values() for value in state.values() if value.ndim > 0]


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of the distinct storages: gradients of one unit are parts of one."""
    locals_ = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in locals_}.values())


SITUATIONS: dict[str, dict[str, Any]] = {
    **SPREADS,
    "context shards": {"mesh": {"cp": 2}},
    "reference gathered from the host, recomputed layers": {
        "mesh": {"dp": 2},
        "reference": {"offload": "fsdp"},
        "model": {"activation_checkpointing": "full"},
    },
    "reference on the device, bfloat16": {
        "mesh": {"dp": 2},
        "reference": {"offload": "none"},
        "precision": {"compute_dtype": "bfloat16"},
    },
    "adapters in float16": {"lora": {"rank": 4}, "precision": {"compute_dtype": "float16", "loss_scale_init": 256}},
    "float16": {"precision": {"compute_dtype": "float16", "loss_scale_init": 256}},
    "muon": {"mesh": {"dp": 2}, "optim": {"name": "muon"}},
}


def a_cycle_for_every_subset(
    rank: int, config: RunConfig, batches: list[RolloutBatch], subsets: list[tuple[Tag, ...]]
) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.wake_up()
    parameters = list(trainer.policy.parameters())
    awake = {tag: storage_bytes(tensors_of(trainer, tag)) for tag in TAGS}
    metrics, freed, idempotent, restored, host = [], [], [], [], []
    for cycle, tags in enumerate([*subsets, TAGS, TAGS]):
        trainer.wake_up()
        report = trainer.sleep(tags)
        expected = {tag: 0 if tag in tags else awake[tag] for tag in TAGS}
        memory = trainer.memory()
        freed.append(
            {tag: storage_bytes(tensors_of(trainer, tag)) for tag in TAGS} == expected
            and memory.asleep == tuple(tag for tag in tags if awake[tag])  # under adapters there is no reference
            and (memory.parameters, memory.optimizer, memory.reference) == tuple(expected.values())
            and report.device_bytes_before == sum(awake[tag] for tag in tags)
            and report.device_bytes_after == 0
        )
        idempotent.append(trainer.sleep(tags).device_bytes_before == 0 and trainer.memory() == memory)
        if cycle % 2:
            trainer.wake_up()
            idempotent.append(trainer.wake_up().device_bytes_after == 0)
            restored.append({tag: storage_bytes(tensors_of(trainer, tag)) for tag in TAGS} == awake)
        host.append(memory.host_buffers)
        metrics.append(trainer.train_step(batches[cycle % len(batches)]))  # wakes what it needs
    same_objects = all(a is b for a, b in zip(parameters, trainer.policy.parameters(), strict=True))
    trainer.wake_up()
    return {"losses": hex_losses(metrics), "weights": fingerprint(trainer.policy), "freed": all(freed),
            "idempotent": all(idempotent), "restored": all(restored), "same_objects": same_objects,
            "host": host[-2:]}  # fmt: skip


@pytest.mark.parametrize(("number", "situation"), list(enumerate(SITUATIONS)), ids=SITUATIONS)
def test_training_is_bit_identical_with_sleeps_in_between(
    tied_folder: Path, ranks: RankPool, number: int, situation: str
) -> None:
    config = settings(tied_folder, **SITUATIONS[situation], loss={"kl_coefficient": 0.1})
    batches = [fresh_batch(seed) for seed in range(2)]
    # every subset where shards differ most; two of them wherever else
    subsets = SUBSETS if situation in ("two shards", "float16") else SUBSETS[number % 3 :: 3]
    order = [batches[cycle % 2] for cycle in range(len(subsets) + 2)]
    metrics, weights = ranks.run(config.ranks, steps_then_weights, config, order)[0]
    for result in ranks.run(config.ranks, a_cycle_for_every_subset, config, batches, subsets):
        assert result["losses"] == hex_losses(metrics) and result["weights"] == weights
        assert result["freed"] and result["idempotent"] and result["restored"] and result["same_objects"]
        assert len(set(result["host"])) == 1  # host memory is taken once and used again


# ---------------------------------------------------------------------- many cycles


def local_digest(trainer: Trainer) -> str:
    """sha256 of this rank's rows of all weights and moments."""
    digest = hashlib.sha256()
    for tag in TAGS:
        for tensor in tensors_of(trainer, tag):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            digest.update(local.detach().clone().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def many_cycles(rank: int, config: RunConfig, batches: list[RolloutBatch], cycles_a_step: int) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    losses, changed, left_over, held = [], 0, 0, {}
    trainer.wake_up()
    before = local_digest(trainer)
    for cycle in range(len(batches) * cycles_a_step):
        if cycle == 2 * cycles_a_step:  # by now whatever is made once is there
            held = held_by_the_process()
        trainer.sleep()
        left_over += sum(storage_bytes(tensors_of(trainer, tag)) for tag in TAGS)
        trainer.wake_up()
        changed += local_digest(trainer) != before
        if cycle % cycles_a_step == 0:
            losses.append(trainer.train_step(batches[len(losses)])["loss"].hex())
            trainer.wake_up()
            before = local_digest(trainer)
    after = held_by_the_process()
    return {"losses": losses, "changed": changed, "left_over": left_over, "rss": after["bytes"] / held["bytes"],
            "opened": [after[name] - held[name] for name in ("files", "threads")],
            "weights": fingerprint(trainer.policy)}  # fmt: skip


@pytest.fixture
def new_ranks() -> Iterator[RankPool]:
    """Processes that ran nothing before: what earlier tests left in shared ones would go away while one counts."""
    pool = RankPool()
    yield pool
    pool.close()


def test_many_cycles_change_no_bit_and_leave_nothing_behind(
    tied_folder: Path, ranks: RankPool, new_ranks: RankPool
) -> None:
    config = settings(tied_folder, mesh={"dp": 2}, loss={"kl_coefficient": 0.1})
    batches = [fresh_batch(seed) for seed in range(10 if tiers.is_whole else 4)]
    metrics, weights = ranks.run(2, steps_then_weights, config, batches)[0]
    for result in new_ranks.run(2, many_cycles, config, batches, tiers.often(20)):
        assert result["changed"] == result["left_over"] == 0
        assert result["losses"] == hex_losses(metrics) and result["weights"] == weights
        assert result["rss"] <= 1.01 and result["opened"] == [0, 0]


# ---------------------------------------------------------------------- gradients that wait


def update_in_halves(rank: int, config: RunConfig, halves: list[RolloutBatch], sleeps: bool) -> dict[str, Any]:
    """Two updates of two halves each, with or without a sleep after every call."""
    trainer = Trainer(config, device=CPU)
    trace, freed = [], []

    def rest() -> None:
        if not sleeps:
            return
        gradients = [p.grad for p in trainer.policy.parameters() if p.grad is not None]
        held = storage_bytes(gradients)
        report = trainer.sleep(("parameters",)) if len(freed) % 2 else trainer.sleep()
        freed.append((held > 0, storage_bytes(gradients), report.device_bytes_before > held))

    for _ in range(2):
        for half in halves:
            trace.append(trainer.forward_backward(half, denominator=60.0)["loss"].hex())
            rest()
        metrics = trainer.optimizer_step()
        rest()
        trace += [metrics["grad_norm"].hex(), metrics["lr"].hex()]
    trainer.wake_up()
    return {"trace": trace, "weights": fingerprint(trainer.policy), "freed": freed}


# gradients differ in where they wait: in shards, whole, on the host, scaled
@pytest.mark.parametrize("situation", ["context shards", "summed once", "on the host", "float16"])
def test_gradients_that_wait_for_their_update_sleep_and_wake_too(
    tied_folder: Path, ranks: RankPool, situation: str
) -> None:
    config, batch = settings(tied_folder, **SITUATIONS[situation]), fresh_batch()
    halves = [batch.select(np.arange(start, batch.num_samples, 2)) for start in range(2)]
    halves = [
        half.replace(advantages=np.linspace(-1, 1, half.num_response_tokens, dtype=np.float32)) for half in halves
    ]
    awake = ranks.run(config.ranks, update_in_halves, config, halves, False)[0]
    for result in ranks.run(config.ranks, update_in_halves, config, halves, True):
        assert result["trace"] == awake["trace"] and result["weights"] == awake["weights"]
        assert result["freed"] == [(True, 0, True), (True, 0, True), (False, 0, True)] * 2


# ---------------------------------------------------------------------- calls on a sleeping trainer


def calls_on_a_sleeping_trainer(rank: int, config: RunConfig, batch: RolloutBatch, export: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    receiver = WeightReceiver(list(model.named_parameters()))
    awake = trainer.compute_log_probs(batch).log_probs
    asleep_after = {}

    def asleep(name: str, call: Any) -> Any:
        trainer.sleep()
        result = call()
        asleep_after[name] = trainer.memory().asleep
        return result

    same = [np.array_equal(asleep("log_probs", lambda: trainer.compute_log_probs(batch)).log_probs, awake)]
    asleep("forward_backward", lambda: trainer.forward_backward(batch))
    asleep("optimizer_step", trainer.optimizer_step)
    now = trainer.compute_log_probs(batch).log_probs
    asleep("save", lambda: trainer.save(1))
    asleep("load", trainer.load)
    asleep("update_weights", lambda: trainer.update_weights([receiver]))
    full = {name: p.full_tensor() for name, p in trainer.policy.named_weights()}
    received = dict(model.named_parameters())
    same_weights = all(torch.equal(received[name], weight) for name, weight in full.items())
    asleep("update_ref", trainer.update_ref)
    asleep("export_hf", lambda: trainer.export_hf(export))
    same += [np.array_equal(trainer.compute_log_probs(batch, model).log_probs, now) for model in ("actor", "ref")]
    same.append(same_weights == (torch.distributed.get_rank() == 0))  # rank 0 alone talks to receivers
    unknown = [error_of(lambda call=call: call(("weights",))) for call in (trainer.sleep, trainer.wake_up)]
    return {"asleep_after": asleep_after, "same": same, "unknown": unknown, "asleep": trainer.memory().asleep}


@pytest.mark.parametrize("spread", SPREADS)
def test_calls_wake_what_they_need_and_no_more(folder: Path, ranks: RankPool, tmp_path: Path, spread: str) -> None:
    config = settings(folder, **SPREADS[spread], run={"dir": str(tmp_path)}, loss={"kl_coefficient": 0.1})
    for result in ranks.run(config.ranks, calls_on_a_sleeping_trainer, config, fresh_batch(), tmp_path / "exported"):
        reference, moments = ("reference",), ("optimizer", "reference")
        assert result["asleep_after"] == {
            "log_probs": moments, "forward_backward": moments, "optimizer_step": reference, "save": reference,
            "load": reference, "update_weights": moments, "update_ref": moments, "export_hf": moments,
        }  # fmt: skip
        assert all(result["same"])
        assert [type(error) for error in result["unknown"]] == [ConfigError, ConfigError]
