"""Under run.deterministic training repeats to the bit, whatever was drawn before, and kernels without order raise."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.algorithms.policy_losses import PolicyLoss, PolicyOptions, PolicyTokens, ppo_loss
from slimefsdp.config import RunConfig
from slimefsdp.trainer import Trainer
from slimefsdp.training.step import seed_generators
from tests.support.fresh_ranks import run_fresh
from tests.support.trainers import CPU, fingerprint, fresh_batch, settings

DRAWN: list[float] = []  # by noisy_loss in this process


def draw() -> float:
    """From each of the generators that training may use."""
    return float(torch.rand(())) + random.random() + float(np.random.random())


def noisy_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """PPO's, each token weighted at random, and each pack."""
    found = ppo_loss(tokens, options)
    if not len(found.loss):
        return found  # the trial before training
    DRAWN.append(draw())
    return found._replace(loss=found.loss * (torch.rand_like(tokens.log_probs) + DRAWN[-1]))


def trained(rank: int, send: Callable[[Any], None], config: RunConfig, actions: str) -> None:
    """Does what the letters say (s: a step, d: a draw, S: a save, L: a load), and sends all bits that came out."""
    trainer, losses = Trainer(config, device=CPU), []
    for action in actions:
        if action == "s":
            losses.append(trainer.train_step(fresh_batch(trainer.updates_taken))["loss"].hex())
        elif action == "d":
            draw()
        elif action == "S":
            trainer.save(1)
        elif action == "L":
            trainer.load(1)
    send((losses, fingerprint(trainer.policy), DRAWN))


def results(config: RunConfig, actions: str, ranks: int = 2) -> list[Any]:
    ended = run_fresh(ranks, trained, config, actions)
    assert [code for _, code in ended] == [0] * ranks
    return [sent[0] for sent, _ in ended]


def noisy(folder: Path, tmp_path: Path, *, is_deterministic: bool = True, seed: int = 0, **sections: Any) -> RunConfig:
    return settings(
        folder,
        **{
            "mesh": {"dp": 2},
            "batch": {"samples_per_update": 4},
            "loss": {"policy": "tests.training.test_determinism:noisy_loss"},
            "run": {"dir": str(tmp_path), "deterministic": is_deterministic, "seed": seed},
            **sections,
        },
    )


def test_runs_of_one_seed_are_equal_to_the_bit_and_another_seed_differs(folder: Path, tmp_path: Path) -> None:
    first = results(noisy(folder, tmp_path), "ss")
    assert first == results(noisy(folder, tmp_path), "dsdds")
    other = results(noisy(folder, tmp_path, seed=1), "ss")
    for (losses, weights, _), (other_losses, other_weights, _) in zip(first, other, strict=True):
        assert losses != other_losses and weights != other_weights


@pytest.mark.parametrize("is_deterministic", [True, False])
def test_a_replay_from_a_checkpoint_is_equal_also_where_generators_stand_elsewhere(
    folder: Path, tmp_path: Path, is_deterministic: bool
) -> None:
    config = noisy(folder, tmp_path, is_deterministic=is_deterministic)
    whole = results(config, "sSss")
    again = results(config, "Ldss")
    for (losses, weights, _), (repeated, repeated_weights, _) in zip(whole, again, strict=True):
        assert (losses[1:] == repeated and weights == repeated_weights) == is_deterministic


def test_ranks_that_share_packs_draw_the_same_and_others_do_not(folder: Path, tmp_path: Path) -> None:
    mesh = {"dp": 2, "cp": 2}
    drawn = [found[2] for found in results(noisy(folder, tmp_path, mesh=mesh), "s", ranks=4)]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and len(drawn[0]) > 1
    assert not set(drawn[0]) & set(drawn[2])


def test_every_generator_follows_from_seed_update_and_data_rank() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        drawn = {}
        for place in [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]:
            for _ in range(2):
                seed_generators(*place)
                drawn.setdefault((float(torch.rand(())), random.random(), float(np.random.random())), place)
        assert list(drawn.values()) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
        assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def kernels(rank: int, send: Callable[[Any], None], config: RunConfig) -> None:
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # of whoever runs the tests
    losses = [Trainer(config, device=CPU).train_step(fresh_batch())["loss"].hex()]
    try:
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        refused = False
    except RuntimeError:
        refused = True
    fills = torch.utils.deterministic.fill_uninitialized_memory
    send((refused, fills, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), losses))


def outcomes(folder: Path) -> Iterator[Any]:
    for is_deterministic in (False, True):
        ((sent, code),) = run_fresh(1, kernels, settings(folder, run={"deterministic": is_deterministic}))
        assert code == 0
        yield sent[0]


def test_an_operation_that_may_sum_in_any_order_is_refused_and_training_needs_none(folder: Path) -> None:
    plain, strict = outcomes(folder)
    assert plain[0] is False and strict[0] is True
    assert plain[2] is None and strict[1:3] == (False, ":4096:8")
    assert plain[3] == strict[3], "on a CPU the kernels are the same ones"
