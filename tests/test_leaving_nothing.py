"""The calls of a training loop leave no file, thread or memory behind in the process that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.process_resources import held_by_the_process
from tests.support.tiny_models import save_tiny_model
from tests.support.trainers import fresh_batch, settings

MEGABYTE = 2**20


def held_after_calls(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, int], dict[str, int]]:
    trainer = Trainer(config, device=torch.device("cpu"))

    def held(steps: range) -> dict[str, int]:
        for step in steps:
            trainer.compute_log_probs(batch)
            trainer.train_step(batch)
            trainer.sleep()
            trainer.wake_up()
            trainer.save(step)
        return held_by_the_process()

    return held(range(1, 9)), held(range(9, 33))


def test_calls_leave_no_file_thread_or_memory_behind(ranks: Any, tmp_path: Path) -> None:
    config = settings(save_tiny_model(tmp_path / "model"), mesh={"dp": 2}, run={"dir": str(tmp_path)})
    for early, late in ranks.run(2, held_after_calls, config, fresh_batch()):
        assert late["files"] <= early["files"] and late["threads"] <= early["threads"]
        assert late["bytes"] - early["bytes"] < 8 * MEGABYTE
