"""Ranks that are launched again keep the sharding level that `fsdp.sharding=auto` chose first, and so every bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers import worker_group
from actors.workers.train_worker import TrainWorker
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from tests.support.runs import TIMES


@pytest.mark.slow
def test_a_relaunch_with_less_memory_free_takes_the_same_level(
    cluster: None, make_config: Any, batch: RolloutBatch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    free = tmp_path / "free"

    class OnMemory(TrainWorker):  # defined here, so that it travels by value
        def add_trainer(self, config: RunConfig, role: str) -> str:
            from slimefsdp.training import build

            build.free_bytes = lambda device: int(free.read_text())
            return super().add_trainer(config, role)

    monkeypatch.setattr(worker_group, "TrainWorker", OnMemory)
    # several packs an update: their gradients are summed in another order at another level
    config = make_config(fsdp={"sharding": "auto"}, batch={"max_tokens_per_rank": 64})
    free.write_text(str(10**12))
    group = SupervisedGroup.launch(config)
    try:
        assert group.config.fsdp.sharding == "optimizer"
        pids = [health.pid for health in group.health()]  # type: ignore[union-attr]
        first = group.train_step(batch)
        free.write_text("1000")
        os.kill(pids[1], signal.SIGKILL)
        second = group.train_step(batch)
        assert len(group.recoveries) == 1 and group.recoveries[0].differences == ()
        assert group.config.fsdp.sharding == "optimizer"
    finally:
        group.shutdown()
    free.write_text(str(10**12))
    undisturbed = SupervisedGroup.launch(config)
    try:
        for expected in (first, second):
            again = undisturbed.train_step(batch)
            assert {k: v.hex() for k, v in again.items() if k not in TIMES} == {
                k: v.hex() for k, v in expected.items() if k not in TIMES
            }
    finally:
        undisturbed.shutdown()
