"""Settings and batches for what is decided before any rank works."""

from __future__ import annotations

from typing import Any

import numpy as np

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch

VOCAB = 50


def settings(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "model": {"path": "unread"},
        "batch": {"max_tokens_per_rank": 16},
        "optim": {"total_updates": 10},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return config_from_dict(tree)


def make_batch(rewards: list[float], *, group: int = 2, seed: int = 0, **fields: Any) -> RolloutBatch:
    """One sample per reward, in groups of so many neighbours, with ragged responses and holes in the masks."""
    rng = np.random.default_rng(seed)
    samples = []
    for index, reward in enumerate(rewards):
        response = int(rng.integers(1, 8))
        mask = rng.random(response) > 0.3
        mask[rng.integers(response)] = True
        tokens = rng.integers(0, VOCAB, response + int(rng.integers(1, 8))).tolist()
        samples.append({"tokens": tokens, "response_length": response, "reward": reward, "group_id": index // group,
                        "loss_mask": mask.tolist()})  # fmt: skip
    return RolloutBatch.from_samples(samples).replace(**fields)
