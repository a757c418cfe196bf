"""Under fsdp.cpu_offload a rank has threads for updates on the host, whatever one thread its launcher gave it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.trainer import Trainer
from slimefsdp.training.build import host_threads
from tests.support.comparisons import largest_difference
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.waiting import PATIENCE_S

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def threads_on(rank: int, config: RunConfig, device: str) -> int | None:
    """What a rank would have on a device; nothing is computed there."""
    mesh = build_mesh(2, 1, CPU)
    return host_threads(config, replace(mesh, device=torch.device(device)))


def test_ranks_on_cuda_share_the_cores_of_their_machine_unless_the_settings_say_how_many(
    folder: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads(device: str, **fsdp: Any) -> list[int | None]:
        return ranks.run(2, threads_on, settings(folder, mesh={"dp": 2}, fsdp=fsdp), device)

    cores = len(os.sched_getaffinity(0))
    assert threads("cuda", cpu_offload=True) == [max(1, cores // 2)] * 2
    assert threads("cpu", cpu_offload=True) == [None] * 2, "there ranks share the cores already"
    for device in ("cuda", "cpu"):
        assert threads(device, cpu_offload=True, offload_threads=7) == [7] * 2
        assert threads(device) == [None] * 2


def update(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[int, dict[str, torch.Tensor], float]:
    """Threads of a rank, its parameters after a step, and the norm of the last update."""
    before = torch.get_num_threads()
    try:
        trainer = Trainer(config, device=CPU)
        metrics = trainer.train_step(batch)
        named = {name: p.full_tensor().detach().clone() for name, p in trainer.policy.named_weights()}
        return torch.get_num_threads(), named, metrics["grad_norm"]
    finally:
        torch.set_num_threads(before)


def test_more_threads_take_the_same_update(folder: Path, ranks: RankPool) -> None:
    batch = make_batch(folder)
    (one, expected, norm), (three, found, norm_of_three) = (
        ranks.run(1, update, settings(folder, optim={"name": "adamw"}, fsdp=fsdp), batch)[0]
        for fsdp in ({"cpu_offload": True}, {"cpu_offload": True, "offload_threads": 3})
    )
    assert (one, three) == (1, 3)
    assert largest_difference(found, expected) <= 1e-12 and np.isclose(norm, norm_of_three, rtol=1e-12)


def test_a_rank_under_ray_has_them_though_ray_gave_it_one(cluster: None, make_config: Any, batch: RolloutBatch) -> None:
    group = WorkerGroup.launch(make_config(fsdp={"cpu_offload": True, "offload_threads": 3}))
    try:
        group.train_step(batch)
        asked = [
            worker.__ray_call__.remote(lambda _: (os.environ["OMP_NUM_THREADS"], torch.get_num_threads()))
            for worker in group.receivers
        ]
        assert ray.get(asked, timeout=PATIENCE_S) == [("1", 3)] * 2
    finally:
        group.shutdown()
