"""A sample longer than the positions a model has learned never reaches the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

POSITIONS = 16


def batch_with(longest: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(0, 96, length).tolist(), "response_length": 2, "reward": float(length)}
        for length in (5, longest, 9)
    ]
    return RolloutBatch.from_samples(samples)


def calls_of_rank(rank: int, path: Path) -> tuple[list[str], int, float]:
    """The refusals, how often the model ran until then, and the gradient norm with a sample that just fits."""
    config = {
        "model": {"path": str(path)},
        "mesh": {"dp": 1, "cp": dist.get_world_size(), "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 64},
        "algorithm": "sft",
        "optim": {"total_updates": 9},
    }
    trainer = Trainer(config_from_dict(config), device=torch.device("cpu"))
    runs: list[str] = []
    trainer.policy.register_forward_pre_hook(lambda *_: runs.append("forward"))
    refusals = []
    for call in (trainer.compute_log_probs, trainer.train_step):
        try:
            call(batch_with(POSITIONS + 1))
        except BatchError as error:
            refusals.append(str(error))
    runs_before = len(runs)
    return refusals, runs_before, trainer.train_step(batch_with(POSITIONS))["grad_norm"]


@pytest.mark.parametrize("cp", [1, 2])
def test_gpt2_refuses_the_sample_by_name_before_any_forward(tiny_folder: TinyFolder, ranks: RankPool, cp: int) -> None:
    path = tiny_folder("gpt2", max_position_embeddings=POSITIONS)
    for refusals, runs_before, norm in ranks.run(cp, calls_of_rank, path):
        assert all("sample 1 has 17 tokens, the model learned 16 positions" in refusal for refusal in refusals)
        assert len(refusals) == 2 and runs_before == 0 and norm > 0
