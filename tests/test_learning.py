"""A policy learns from its rewards, and from nothing else: sample, score, train, new weights, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.models.build import build_for_sampling
from slimefsdp.sampling.params import SamplingParams
from slimefsdp.sampling.sampler import sample
from slimefsdp.trainer import Trainer
from slimefsdp.weight_sync.receive import WeightReceiver

PROMPTS = [[7, 8, 9], [20, 21], [40, 41, 42, 43]]
GROUP, RESPONSE_LENGTH, STEPS = 16, 6, 15
LOW_TOKENS = 160  # half of the example's vocabulary


def share_of_low_tokens(tokens: list[int]) -> float:
    """What a random model gets half of."""
    return sum(token < LOW_TOKENS for token in tokens) / len(tokens)


def rewards_of_training(rank: int, config: RunConfig, permute: bool) -> list[float]:
    """The mean reward of every step; with `permute`, what is trained on are rewards of other samples."""
    trainer = Trainer(config, device=torch.device("cpu"))
    engine = build_for_sampling(config.model.path, torch.float32, torch.device("cpu"))
    receiver = WeightReceiver(engine.named_weights())
    rng = np.random.default_rng(0)
    means = []
    for step in range(STEPS):
        trainer.update_weights([receiver])
        params = SamplingParams(RESPONSE_LENGTH, seed=(step,))
        completions = [found for _, found in sample(engine, dict(enumerate(PROMPTS)), GROUP, params)]
        rewards = np.array([share_of_low_tokens(completion.tokens) for completion in completions])
        means.append(float(rewards.mean()))
        samples = [
            {
                "tokens": PROMPTS[index // GROUP] + completion.tokens,
                "response_length": len(completion.tokens),
                "rollout_log_probs": completion.log_probs,
                "group_id": index // GROUP,
                "reward": reward,
            }
            for index, (completion, reward) in enumerate(
                zip(completions, rng.permutation(rewards) if permute else rewards, strict=True)
            )
        ]
        metrics = trainer.train_step(RolloutBatch.from_samples(samples, temperature=1.0))
        assert metrics["rollout_mismatch_max"] < 1e-3 and metrics["updates"] == 1
    return means


@pytest.mark.parametrize("permute", [False, True], ids=["its own rewards", "rewards of others"])
def test_a_policy_learns_from_its_rewards_and_not_from_those_of_others(
    example: Path, ranks: Any, permute: bool
) -> None:
    config = config_from_dict(
        {
            "model": {"path": str(example / "model")},
            "mesh": {"device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "optim": {"lr": 3e-3, "total_updates": STEPS},
        }
    )
    (means,) = ranks.run(1, rewards_of_training, config, permute)
    assert abs(means[0] - 0.5) < 0.15
    rise = float(np.mean(means[-3:]) - np.mean(means[:3]))
    assert rise < 0.15 if permute else rise > 0.3, means
