"""Random batches with rewards for the tests of advantages, and one way to ask for their advantages."""

from __future__ import annotations

import numpy as np
import pytest

from slimefsdp.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions, advantages

GROUP_NAMES = [7, -3, 2**62, 0]
OPTIONS = AdvantageOptions(gamma=0.9, gae_lambda=0.8, epsilon=1e-3, pass_k=2)
every_estimator = pytest.mark.parametrize("name", list(ESTIMATORS))
several_batches = pytest.mark.parametrize("seed", range(6))


def batch_for(name, seed):
    """Interleaved groups of two to five samples, of one to seven tokens with holes; one sample is masked altogether.

    Token rewards are integers / 8 and add up without rounding; the estimators that ask for it get right and wrong, or
    nothing negative.
    """
    rng = np.random.default_rng(seed)
    group_ids = rng.permutation(np.repeat(GROUP_NAMES, rng.integers(2, 6, size=4)))
    lengths = rng.integers(1, 8, size=group_ids.size)
    sample_ids = np.repeat(np.arange(group_ids.size), lengths)
    mask = (rng.random(sample_ids.size) < 0.7) & (sample_ids != 1)
    rewards = {
        "pass_at_k": np.where(rng.random(group_ids.size) < 0.5, 2.0, -1.0),
        "maxrl": rng.integers(0, 4, size=group_ids.size) / 2,
    }.get(name, rng.integers(-40, 41, size=group_ids.size) / 8)
    token_rewards = np.zeros(sample_ids.size)
    if name not in ("pass_at_k", "maxrl"):
        token_rewards = np.where(mask, rng.integers(-8, 9, size=sample_ids.size) / 8, 0.0)
    scores = rewards + np.bincount(sample_ids, weights=token_rewards)
    for sample, reward in enumerate(rewards):
        if (trained := np.flatnonzero(mask & (sample_ids == sample))).size:
            token_rewards[trained[-1]] += reward
    baseline_rewards, values = rng.normal(size=group_ids.size), rng.normal(size=sample_ids.size)
    return AdvantageInputs(scores, token_rewards, mask, sample_ids, group_ids, baseline_rewards, values)


def computed(name, inputs, options=OPTIONS, whiten=False):
    return advantages(inputs, ESTIMATORS[name], options, whiten=whiten)
