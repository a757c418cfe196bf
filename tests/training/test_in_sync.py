"""Copies of a model never drift apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.results import ReplicaCheck
from slimefsdp.trainer import Trainer
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import fresh_batch, settings


def after_twenty_updates(rank: int, config: RunConfig) -> tuple[ReplicaCheck, int]:
    trainer = Trainer(config, device=torch.device("cpu"))
    for step in range(20):
        trainer.train_step(fresh_batch(step))
    return trainer.check_sync(), trainer.health().updates_taken


@pytest.mark.parametrize(
    "sections", [{"mesh": {"dp_replicate": 2}}, {"mesh": {"cp": 2}, "fsdp": {"sharding": "replicate"}}], ids=str
)
def test_copies_hold_the_same_bits_after_twenty_updates(
    ranks: Any, tiny_folder: TinyFolder, sections: dict[str, dict[str, Any]]
) -> None:
    config = settings(tiny_folder(), **sections, precision={"compute_dtype": "bfloat16"})
    for found, updates in ranks.run(2, after_twenty_updates, config):
        assert found.is_in_sync and found.checked > 20 and updates == 20, found
