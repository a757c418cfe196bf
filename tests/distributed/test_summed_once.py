"""fsdp.sharding=optimizer: parameters whole and gradients unsharded over an update, and the same training as ever."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import parameter_groups
from slimefsdp.errors import StateError
from slimefsdp.trainer import Trainer
from slimefsdp.training import packs
from slimefsdp.training.plan import plan_everything
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
SMALL_PACKS = {"max_tokens_per_rank": 40, "samples_per_update": 8}


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(vocab_size=97, intermediate_size=55, num_hidden_layers=3)


def level(path: Path, sharding: str, **sections: Any) -> RunConfig:
    return settings(path, fsdp={"sharding": sharding}, mesh={"dp": 2}, batch=SMALL_PACKS, **sections)


def calls_of_an_update(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, int]:
    """How often units are gathered and their gradients summed in one update."""
    trainer, calls = Trainer(config, device=CPU), {"foreach_all_gather": 0, "foreach_reduce": 0}

    def counted(name: str) -> Any:
        original = getattr(_fsdp_param_group, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return original, count

    replaced = {name: counted(name) for name in calls}
    try:
        for name, (_, count) in replaced.items():
            setattr(_fsdp_param_group, name, count)
        trainer.forward_backward(batch)
    finally:
        for name, (original, _) in replaced.items():
            setattr(_fsdp_param_group, name, original)
    return calls


def test_units_are_gathered_and_summed_once_an_update_where_they_were_once_a_micro_batch(
    folder: Path, ranks: RankPool
) -> None:
    batch = make_batch(folder)
    (everything,) = plan_everything(level(folder, "full"), batch, data_ranks=2).updates
    micro_batches = len(everything[0])
    assert micro_batches >= 2
    units = 5  # the root, the embedding, three layers
    once, always, kept = (
        ranks.run(2, calls_of_an_update, level(folder, sharding), batch)[0]
        for sharding in ("optimizer", "full", "keep_parameters")
    )
    assert once == {"foreach_all_gather": units, "foreach_reduce": units}
    assert always["foreach_reduce"] == kept["foreach_reduce"] == micro_batches * units
    assert kept["foreach_all_gather"] == micro_batches * units < always["foreach_all_gather"]


def life(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], bool]:
    """Weights after halves, sleep, a skipped update, an abandoned one, a checkpoint; and whether ranks agree."""
    trainer = Trainer(config, device=CPU)
    halves = [batch.select(np.array(samples)) for samples in ([0, 1, 4, 5], [2, 3, 6, 7])]
    with KeepFloat64():
        for half in halves:
            trainer.forward_backward(half, denominator=40.0)
        trainer.sleep()
        trainer.optimizer_step()
        trainer.forward_backward(batch)
        for _, parameter in trainer.policy.named_weights():
            parameter.grad.to_local().fill_(float("inf"))
        with warnings.catch_warnings(action="ignore"):
            assert trainer.optimizer_step()["skipped_update"] == 1.0
        abandon(trainer, batch)
        trainer.train_step(batch)
        is_equal = trainer.check_sync().is_in_sync
        trainer.save(1)
        trainer.train_step(batch)
        trainer.compute_log_probs(batch)
        trainer.load(1)
        trainer.train_step(batch)
    return {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}, is_equal


def abandon(trainer: Trainer, batch: RolloutBatch) -> None:
    """Fails in the second micro-batch of an update, on all ranks alike; nothing of it is left."""
    original, calls = packs.evaluate, []

    def evaluate(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError
        return original(*args, **kwargs)

    packs.evaluate = evaluate
    try:
        with suppress(ZeroDivisionError):
            trainer.forward_backward(batch)
    finally:
        packs.evaluate = original
    assert len(calls) == 2
    if trainer.config.fsdp.sharding == "optimizer":
        modules = [module for module in trainer.policy.modules() if isinstance(module, FSDPModule)]
        groups = [group for module in modules for group in parameter_groups(module)]
        assert not any(group.is_unsharded for group in groups)
        assert all(p.unsharded_accumulated_grad is None for group in groups for p in group.fsdp_params)


def test_halves_sleep_skipped_and_abandoned_updates_and_checkpoints_train_as_under_full_sharding(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    batch = make_batch(folder)
    ends = {}
    for sharding in ("full", "optimizer"):
        config = level(folder, sharding, run={"dir": str(tmp_path / sharding)})
        found = ranks.run(2, life, config, batch)
        assert all(is_equal for _, is_equal in found)
        ends[sharding] = found[0][0]
    assert largest_difference(ends["optimizer"], ends["full"]) <= 1e-12


def after_a_failure(rank: int, config: RunConfig, batch: RolloutBatch, failing: str) -> dict[str, torch.Tensor]:
    """Gradients of a call after one that failed; without `failing` of that call alone."""
    trainer = Trainer(config, device=CPU)
    first, second = (batch.select(np.array(samples)) for samples in ([0, 1, 4, 5], [2, 3, 6, 7]))
    with KeepFloat64():
        if failing:
            trainer.forward_backward(first, denominator=40.0)
            fail(trainer, batch, failing)
            with refused(StateError, "optimizer_step"):
                trainer.optimizer_step()
        trainer.forward_backward(second, denominator=40.0)
        return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}


def fail(trainer: Trainer, batch: RolloutBatch, where: str) -> None:
    """An error in the second micro-batch of a call, on all ranks alike."""
    layer, calls = trainer.policy.decoder_layers()[1], []

    def raise_at_the_second(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError

    register = layer.register_forward_hook if where == "forward" else layer.register_full_backward_hook
    handle = register(raise_at_the_second)
    with pytest.raises(ZeroDivisionError):
        trainer.forward_backward(batch, denominator=40.0)
    handle.remove()


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("sharding", ["full", "keep_parameters", "optimizer"])
def test_after_an_error_in_a_pass_an_update_begins_anew(
    folder: Path, ranks: RankPool, sharding: str, where: str
) -> None:
    config, batch = level(folder, sharding), make_batch(folder)
    alone = ranks.run(2, after_a_failure, config, batch, "")[0]
    assert largest_difference(ranks.run(2, after_a_failure, config, batch, where)[0], alone) <= 1e-12
