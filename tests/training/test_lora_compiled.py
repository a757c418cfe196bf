"""Compiled layers train adapters as peft does, and compute the same with them on and off, compiled once for each."""

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
from tests.support.plain_lora import (
    ALL,
    EXPERTS,
    fill_b,
    lora_gradients,
    lora_training,
    plain_gradients,
    plain_training,
)
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU"),
]


def forget_graphs() -> None:
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    """How many were compiled since `forget_graphs`."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled_life(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: log-probs with adapters on and off, by turns, and of further adapters after a step."""
    forget_graphs()
    trainer = Trainer(config, device=CPU)
    base = trainer.compute_log_probs(batch).log_probs  # where B is 0, those of the model
    fill_b(trainer)
    found: dict[str, Any] = {"base": base, "graphs": [graphs()]}
    for turn in range(3):
        found[f"on {turn}"] = trainer.compute_log_probs(batch).log_probs
        found[f"off {turn}"] = trainer.compute_log_probs(batch, "ref").log_probs
        found["graphs"].append(graphs())
    trainer.train_step(batch)
    found["graphs"].append(graphs())
    for name, alpha in (("first", 2.0), ("second", 3.0)):
        trainer.create_adapter(name, alpha=alpha)
        fill_b(trainer)
        found[name] = trainer.compute_log_probs(batch).log_probs
        found["graphs"].append(graphs())
    return found


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
    for name in ("first", "second"):
        assert np.abs(ours[name] - plain[name]).max() <= 1e-5
    on, *turns, trained, first, second = ours["graphs"]
    # once with adapters and once without, however often they change, and once more with gradients
    assert 0 < on < turns[0] == turns[1] == turns[2] <= 2 * on and turns[2] < trained <= 3 * on + 1
    assert first == second == trained, "another adapter's alpha is a number that the same graphs are given"
    assert plain["graphs"][-1] == 0


def compiled_training(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: gradients, and a train step of several updates."""
    forget_graphs()
    _, gradients, _ = lora_gradients(rank, config, batch)
    return {**lora_training(rank, config, batch), "gradients": gradients, "graphs": graphs()}


SPREAD: dict[str, tuple[int, dict[str, Any], list[str], Any]] = {  # dp, changes, our targets, peft's
    "qwen3": (1, {"intermediate_size": 55}, ["attention", "mlp"], ALL),
    "qwen3_moe": (2, {}, ["attention", "experts"], {**EXPERTS, "target_modules": ALL[:4]}),
}


@pytest.mark.parametrize("model", SPREAD)
def test_compiled_layers_train_adapters_as_peft_does(tiny_folder: TinyFolder, ranks: RankPool, model: str) -> None:
    dp, changes, ours, theirs = SPREAD[model]
    folder = tiny_folder(model, vocab_size=97, num_hidden_layers=1, **changes)
    config = settings(
        folder,
        lora={"rank": 3, "alpha": 7.0, "targets": ours},
        optim={"name": "adamw", "lr": 0.01, "eps": 1e-4},
        model={"path": str(folder), "compile": True},
        mesh={"dp": dp},
    )
    batch = make_batch(folder)
    found = ranks.run(dp, compiled_training, config, batch)
    start = found[0]["start"]
    gradients = plain_gradients(folder, config, batch, start, theirs)
    trained = plain_training(folder, config, batch, start, theirs).weights()
    assert largest_difference(trained, start) > 1e-2
    for life in found:
        assert largest_difference(life["gradients"], gradients) <= 1e-12
        assert largest_difference(life["end"], trained) <= 1e-12
        assert life["graphs"] > 0
