"""Compiled layers train adapters as peft does, and compute the same with them on and off, compiled once for each."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_lora import (
    ALL,
    adapters_of,
    fill_b,
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
    torch._dynamo.utils.clear_compilation_metrics()


def graphs() -> int:
    """How many frames were compiled since `forget_graphs`, but for those of KeepFloat64 itself."""
    found = torch._dynamo.utils.get_compilation_metrics()
    return sum(one.co_name != "__torch_function__" for one in found)


def compiled_life(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """Of one rank: log-probs with adapters on and off, by turns, what training makes of them, and further adapters."""
    forget_graphs()
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        base = trainer.compute_log_probs(batch).log_probs  # where B is 0, those of the model
        fill_b(trainer)
        found: dict[str, Any] = {"base": base, "start": adapters_of(trainer), "graphs": [graphs()]}
        for turn in range(3):
            found[f"on {turn}"] = trainer.compute_log_probs(batch).log_probs
            found[f"off {turn}"] = trainer.compute_log_probs(batch, "ref").log_probs
            found["graphs"].append(graphs())
        trainer.forward_backward(batch)
        found["gradients"] = {name: p.grad.full_tensor() for name, p in trainer.policy.trained_weights()}
        trainer.zero_grad()
        trainer.train_step(batch)
        found["end"] = adapters_of(trainer)
        found["graphs"].append(graphs())
        for name, alpha in (("first", 2.0), ("second", 3.0)):
            trainer.create_adapter(name, alpha=alpha)
            fill_b(trainer)
            found[name] = trainer.compute_log_probs(batch).log_probs
            found["graphs"].append(graphs())
    return found


def require_training_of_peft(found: dict[str, Any], config: RunConfig, batch: RolloutBatch, theirs: Any) -> None:
    folder, start = config.model.path, found["start"]
    gradients = plain_gradients(folder, config, batch, start, theirs)
    assert min(gradient.abs().max().item() for gradient in gradients.values()) > 1e-4
    assert largest_difference(found["gradients"], gradients) <= 1e-12
    trained = plain_training(folder, config, batch, start, theirs).weights()
    assert largest_difference(found["end"], trained) <= 1e-12 and largest_difference(trained, start) > 1e-2


def compiled_settings(folder: Path, *, compile: bool = True, lora: dict[str, Any], **sections: Any) -> RunConfig:
    optim = {"name": "adamw", "lr": 0.01, "eps": 1e-4}
    model = {"path": str(folder), "compile": compile}
    return settings(folder, model=model, optim=optim, lora={"rank": 3, "alpha": 7.0, **lora}, **sections)


def test_compiled_layers_compute_the_same_with_adapters_on_and_off(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    folder = tiny_folder(vocab_size=97, intermediate_size=55, num_hidden_layers=1)
    configs, batch = [compiled_settings(folder, compile=on, lora={}) for on in (False, True)], make_batch(folder)
    plain, ours = (ranks.run(1, compiled_life, config, batch)[0] for config in configs)
    for turn in range(3):
        assert np.abs(ours[f"on {turn}"] - plain["on 0"]).max() <= 1e-5  # which are float32
        assert np.abs(ours[f"off {turn}"] - plain["base"]).max() <= 1e-5
    assert np.abs(plain["on 0"] - plain["base"]).max() > 0.1
    for name in ("first", "second"):
        assert np.abs(ours[name] - plain[name]).max() <= 1e-5
    require_training_of_peft(ours, configs[1], batch, ALL)
    on, *turns, trained, first, second = ours["graphs"]
    # once with adapters and once without, however often they change, and once more with gradients
    assert 0 < on < turns[0] == turns[1] == turns[2] <= 2 * on and turns[2] < trained <= 3 * on + 1
    assert first == second == trained, "another adapter's alpha is a number that the same graphs are given"
    assert plain["graphs"][-1] == 0
