"""Meshes on which ranks share matrices or experts, and what is compared on them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint.shards import SavedShards
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.comparisons import largest_difference, trainer_weights
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.trainers import fingerprint

CPU = torch.device("cpu")
COMPOSED: list[dict[str, Any]] = [  # settings that sharing layers goes together with
    {"model": {"activation_checkpointing": "full"}},
    {"model": {"activation_checkpointing": "selective"}},
    {"fsdp": {"sharding": "keep_parameters"}},
    {"fsdp": {"sharding": "optimizer"}},
    {"fsdp": {"cpu_offload": True}},
]


def on_mesh(dp_replicate: int, dp: int, cp: int, tp: int, strategy: str | None = None) -> dict[str, Any]:
    sections: dict[str, Any] = {"mesh": {"dp_replicate": dp_replicate, "dp": dp, "cp": cp, "tp": tp}}
    return sections if strategy is None else sections | {"attention": {"strategy": strategy}}


def difference_from_plain(ranks: RankPool, path: Path, **sections: Any) -> float:
    """The largest difference of any weight, on any rank, from a plain process after several clipped updates."""
    optim = {"name": "sgd", "lr": 0.05, "max_grad_norm": 0.5}
    loss = {"epochs": 1, "kl_coefficient": 0.3, "entropy_coefficient": 0.05}
    sections = {"optim": optim, "loss": loss, "batch": {"max_tokens_per_rank": 64}} | sections
    config = settings(path, **sections)
    batch = make_batch(path)
    plan = plan_training(config, batch)
    assert len(plan.updates) == 3
    with KeepFloat64():
        plain = PlainStep(path, config, torch.float64)
        start = plain.weights()
        plain.train(batch, plan)
    expected = plain.weights()
    assert largest_difference(expected, start) > 1e-3
    results = ranks.run(config.ranks, trainer_weights, config, batch)
    return max(largest_difference(weights, expected) for _, weights in results)


def train_and_save(rank: int, config: RunConfig, batch: RolloutBatch) -> Path:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    path = trainer.save(1)
    trainer.finish_save()
    return path


def load_and_save(rank: int, config: RunConfig) -> tuple[Path, bool]:
    trainer = Trainer(config, device=CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the random generators are those of another mesh
        trainer.load()
    is_in_sync = trainer.check_sync().is_in_sync
    path = trainer.save(2)
    trainer.finish_save()
    return path, is_in_sync


def difference_of_checkpoints(
    ranks: RankPool, path: Path, run_dir: Path, first: dict[str, Any], second: dict[str, Any]
) -> list[str]:
    """The tensors that differ between a checkpoint of the first mesh and one of the second, which has loaded it."""
    common: dict[str, Any] = {"optim": {"name": "adamw", "lr": 0.01}, "run": {"dir": str(run_dir)}}
    config = settings(path, **common, **first)
    saved = SavedShards(ranks.run(config.ranks, train_and_save, config, make_batch(path))[0])
    config = settings(path, **common, **second)
    found = ranks.run(config.ranks, load_and_save, config)
    assert all(is_in_sync for _, is_in_sync in found)
    again = SavedShards(found[0][0])
    assert saved.specs == again.specs and any(name.endswith("exp_avg_sq") for name in saved.specs)
    return [name for name in saved.specs if not torch.equal(saved.read(name), again.read(name))]


def digest_of_weights(rank: int, configs: list[RunConfig]) -> list[str]:
    return [fingerprint(Trainer(config, device=CPU).policy) for config in configs]
