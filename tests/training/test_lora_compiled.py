"""Compiled layers compute the same with adapters on and off, and are compiled once for each of these."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.plain_lora import adapters_of, fill_b
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")


def compiled_life(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: log-probs with adapters on and off, by turns, and what a step makes of the adapters."""
    import torch._dynamo

    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trainer = Trainer(config, device=CPU)
    base = trainer.compute_log_probs(batch).log_probs  # where B is 0, those of the model
    fill_b(trainer)
    found: dict[str, Any] = {"base": base, "graphs": [int(counters["stats"]["unique_graphs"])]}
    for turn in range(3):
        found[f"on {turn}"] = trainer.compute_log_probs(batch).log_probs
        found[f"off {turn}"] = trainer.compute_log_probs(batch, "ref").log_probs
        found["graphs"].append(int(counters["stats"]["unique_graphs"]))
    trainer.forward_backward(batch)
    gradients = {name: p.grad.full_tensor() for name, p in trainer.policy.trained_weights()}
    trainer.zero_grad()
    trainer.train_step(batch)
    found["graphs"].append(int(counters["stats"]["unique_graphs"]))
    for name, alpha in (("first", 2.0), ("second", 3.0)):
        trainer.create_adapter(name, alpha=alpha)
        fill_b(trainer)
        found[name] = trainer.compute_log_probs(batch).log_probs
        found["graphs"].append(int(counters["stats"]["unique_graphs"]))
    return found | {"gradients": gradients, "adapters": adapters_of(trainer)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_layers_compute_the_same_with_adapters_on_and_off(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    folder = tiny_folder(vocab_size=97, intermediate_size=55, num_hidden_layers=1)
    sections: dict[str, Any] = {
        "lora": {"rank": 3, "alpha": 7.0},
        "precision": {"compute_dtype": "float32"},
        "optim": {"name": "sgd", "lr": 0.05},
    }
    plain, ours = (
        ranks.run(1, compiled_life, settings(folder, model={"compile": on}, **sections), make_batch(folder))[0]
        for on in (False, True)
    )
    for turn in range(3):
        assert np.abs(ours[f"on {turn}"] - plain["on 0"]).max() <= 1e-5
        assert np.abs(ours[f"off {turn}"] - plain["base"]).max() <= 1e-5
    assert np.abs(plain["on 0"] - plain["base"]).max() > 0.1
    for what in ("gradients", "adapters"):
        largest = max(value.abs().max().item() for value in plain[what].values())
        assert largest > 0.05 and largest_difference(ours[what], plain[what]) <= 1e-5 * max(1.0, largest)
    for name in ("first", "second"):
        assert np.abs(ours[name] - plain[name]).max() <= 1e-5
    on, *turns, trained, first, second = ours["graphs"]
    # once with adapters and once without, however often they change, and once more with gradients
    assert on < turns[0] == turns[1] == turns[2] <= 2 * on and turns[2] < trained <= 3 * on + 1
    assert first == second == trained, "another adapter's alpha is a number that the same graphs are given"
    assert plain["graphs"][-1] == 0
