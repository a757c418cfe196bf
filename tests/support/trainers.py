"""Trainers of tiny models on gloo ranks: settings, batches, and what is compared of them."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import torch

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import SlimeError
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.trainer import Trainer
from slimefsdp.training import step
from tests.support.plain_step import make_batch

CPU = torch.device("cpu")
MESHES: dict[str, dict[str, Any]] = {"one rank": {}, "two data ranks": {"dp": 2}, "two context ranks": {"cp": 2}}
SPREADS: dict[str, dict[str, Any]] = {
    "one rank": {"mesh": {"dp": 1}},
    "two shards": {"mesh": {"dp": 2}},
    "two copies": {"mesh": {"dp_replicate": 2}},
    "parameters kept": {"mesh": {"dp": 2}, "fsdp": {"sharding": "keep_parameters"}},
    "summed once": {"mesh": {"dp": 2}, "fsdp": {"sharding": "optimizer"}},
    "whole on every rank": {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}},
    "on the host": {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}},
}


def settings(folder: Path, **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(folder)},
        "mesh": {"device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 64},
        "optim": {"lr": 0.01, "total_updates": 100},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return config_from_dict(tree)


def fresh_batch(seed: int = 0) -> RolloutBatch:
    """Ragged samples with holes in their masks; the rewards of samples 4 and 5, one group, are equal."""
    return make_batch(Path(), seed=seed).replace(old_log_probs=None, ref_log_probs=None)


def fingerprint(policy: PolicyModel) -> str:
    """Collective: a digest of every bit of every weight."""
    digest = hashlib.sha256()
    for name, parameter in policy.all_parameters():
        # a copy: on one rank the full tensor is the shard, and what numpy has seen can no longer sleep
        digest.update(name.encode() + parameter.full_tensor().detach().clone().numpy().tobytes())
    return digest.hexdigest()


def step_and_updates(trainer: Trainer, batch: RolloutBatch) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The metrics of a train step, and those of each of its updates before the optimiser's."""
    recorded: list[dict[str, float]] = []
    original = step.forward_backward

    def recording(*args: Any) -> dict[str, float]:
        recorded.append(original(*args))
        return recorded[-1]

    step.forward_backward = recording
    try:
        return trainer.train_step(batch), recorded
    finally:
        step.forward_backward = original


def error_of(call: Any) -> SlimeError | None:
    try:
        call()
    except SlimeError as error:
        return error
    return None


def steps_then_weights(rank: int, config: RunConfig, batches: list[RolloutBatch]) -> tuple[list[Any], str]:
    trainer = Trainer(config, device=CPU)
    return [trainer.train_step(batch) for batch in batches], fingerprint(trainer.policy)


def hex_losses(metrics: list[dict[str, float]]) -> list[str]:
    return [values["loss"].hex() for values in metrics]


def ranks_of(mesh: dict[str, int]) -> int:
    return math.prod(mesh.values())
