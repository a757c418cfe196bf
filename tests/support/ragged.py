"""A small batch with everything that makes packing hard: ragged samples in groups, with holes in their masks."""

from __future__ import annotations

import numpy as np

from slimefsdp.data.rollout_batch import RolloutBatch


def ragged_batch(
    rng: np.random.Generator, *, longest: int, tokens: tuple[int, int], without_variance: int = 0
) -> RolloutBatch:
    """16 samples of fewer than `longest` tokens, in groups of four.

    Args:
        tokens: the lowest, and one more than the highest.
        without_variance: so many samples, the first ones, have a reward of 1.
    """
    samples = []
    for index in range(16):
        length = int(rng.integers(2, longest))
        response = int(rng.integers(1, length))
        mask = rng.random(response) > 0.3
        mask[0] = True
        samples.append(
            {
                "tokens": rng.integers(*tokens, length),
                "response_length": response,
                "reward": 1.0 if index < without_variance else float(rng.random()),
                "group_id": index // 4,
                "loss_mask": mask,
            }
        )
    return RolloutBatch.from_samples(samples)
