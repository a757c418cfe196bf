"""Training with moments in fewer bytes, on one rank and on meshes, with sleep, checkpoints and a fresh start."""

from __future__ import annotations

from typing import Any

import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.float64 import KeepFloat64
from tests.support.trainers import error_of

CPU = torch.device("cpu")


def trained(rank: int, config: RunConfig, batch: RolloutBatch, loads: bool, saves: bool) -> dict[str, Any]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        if loads:
            trainer.load(1)
        else:
            trainer.train_step(batch)
        if saves:
            trainer.save(1)
        trainer.sleep()
        trainer.train_step(batch)
    weights = {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}
    in_sync, held = trainer.check_sync().is_in_sync, trainer.memory().optimizer
    trainer.updater.begin_anew()
    left = max(float(v.abs().max()) for state in trainer.updater.optimizer.state.values() for v in state.values())
    return {"weights": weights, "in sync": in_sync, "bytes": held, "left": left}


SPREADS: dict[str, dict[str, Any]] = {
    "dp 2": {"mesh": {"dp": 2}},
    "summed once": {"mesh": {"dp": 2}, "fsdp": {"sharding": "optimizer"}},
    "on the host": {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}},
    "two copies of two shards": {"mesh": {"dp_replicate": 2, "dp": 2}},
    "cp 2": {"mesh": {"cp": 2}},
}


def loads_other(rank: int, config: RunConfig, other: RunConfig, batch: RolloutBatch) -> Any:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    trainer.save(1)
    return [error_of(lambda: Trainer(other, device=CPU).load(1))]
