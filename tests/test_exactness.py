"""The central promise: the same gradient, and the same weights, as one plain PyTorch process, on any mesh and split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.comparisons import (
    error_norm,
    largest_difference,
    plain_gradients,
    trainer_gradients,
    trainer_weights,
)
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Path:
    # 97 rows and 55 columns divide by no world size used here
    return tiny_folder(tie_word_embeddings=request.param, vocab_size=97, intermediate_size=55)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [40, 512])
def test_gradients_equal_a_plain_step_in_float64(folder: Path, ranks: RankPool, dp: int, max_tokens: int) -> None:
    config = settings(folder, mesh={"dp": dp}, batch={"max_tokens_per_rank": max_tokens})
    batch = make_batch(folder)
    plain = plain_gradients(folder, config, batch, torch.float64)
    assert max(g.abs().max().item() for g in plain.values()) > 0.05
    for ours in ranks.run(dp, trainer_gradients, config, batch):
        assert largest_difference(ours, plain) <= 1e-12


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("coefficient, dropped", [(0.3, 0), (0.0, 2)], ids=["with KL", "policy loss alone"])
def test_weights_after_a_step_of_several_updates_equal_plain_steps_in_float64(
    folder: Path, ranks: RankPool, dp: int, coefficient: float, dropped: int
) -> None:
    loss = {"kl_coefficient": coefficient, "entropy_coefficient": coefficient / 6}
    config = settings(folder, mesh={"dp": dp}, loss=loss)
    batch = make_batch(folder)
    plan = plan_training(config, batch)
    assert len(plan.updates) >= 4  # two epochs of two updates or more
    with KeepFloat64():
        plain = PlainStep(folder, config, torch.float64)
        start = plain.weights()
        plain.train(batch, plan)
    assert largest_difference(plain.weights(), start) > 1e-2
    for metrics, ours in ranks.run(dp, trainer_weights, config, batch):
        assert metrics["dropped_samples"] == dropped  # a group whose rewards are equal trains by KL and entropy only
        assert largest_difference(ours, plain.weights()) <= 1e-12


@pytest.mark.parametrize(("dp", "max_tokens"), [(1, 40), (2, 40), (4, 512)])
def test_float32_is_as_exact_as_a_plain_float32_step(folder: Path, ranks: RankPool, dp: int, max_tokens: int) -> None:
    config = settings(
        folder, mesh={"dp": dp}, batch={"max_tokens_per_rank": max_tokens}, precision={"compute_dtype": "float32"}
    )
    batch = make_batch(folder)
    truth = plain_gradients(folder, config, batch, torch.float64)
    plain = plain_gradients(folder, config, batch, torch.float32)
    ours = ranks.run(dp, trainer_gradients, config, batch)[0]
    assert error_norm(ours, truth) <= 1.5 * error_norm(plain, truth)


def test_float32_weights_after_a_step_are_as_exact_as_plain_float32_steps(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, mesh={"dp": 2}, precision={"compute_dtype": "float32"})
    batch = make_batch(folder)
    plan = plan_training(config, batch)
    finals = {}
    for dtype in (torch.float64, torch.float32):
        with KeepFloat64():
            plain = PlainStep(folder, config, dtype)
            plain.train(batch, plan)
        finals[dtype] = plain.weights()
    _, ours = ranks.run(2, trainer_weights, config, batch)[0]
    assert error_norm(ours, finals[torch.float64]) <= 1.5 * error_norm(finals[torch.float32], finals[torch.float64])


def halves_against_whole(rank: int, config: RunConfig, batch: RolloutBatch, denominator: float | None) -> float:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        trainer.forward_backward(batch)
        whole = {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}
        trainer.updater.optimizer.zero_grad()
        for half in (np.arange(0, 4), np.arange(4, batch.num_samples)):
            trainer.forward_backward(batch.select(half), denominator=denominator)
    return largest_difference({name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}, whole)


def test_halves_equal_the_whole_exactly_if_they_divide_by_its_count(folder: Path, ranks: RankPool) -> None:
    config, batch = settings(folder, mesh={"dp": 2}), make_batch(folder)
    assert ranks.run(2, halves_against_whole, config, batch, float(batch.mask.sum()))[0] <= 1e-12
    assert ranks.run(2, halves_against_whole, config, batch, None)[0] > 1e-3  # the comparison can fail
