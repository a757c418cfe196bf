"""Gradients and weights of the product and of a plain step, and how far they are apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep


def trainer_gradients(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        trainer.forward_backward(batch)
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}


def trainer_weights(
    rank: int, config: RunConfig, batch: RolloutBatch
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        metrics = trainer.train_step(batch)
    return metrics, {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}


def plain_gradients(path: Path, config: RunConfig, batch: RolloutBatch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        plain = PlainStep(path, config, dtype)
        plain.backward(batch, np.arange(batch.num_samples))
    return plain.gradients()


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


def error_norm(a: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    return sum((a[name].double() - truth[name]).square().sum().item() for name in truth) ** 0.5
