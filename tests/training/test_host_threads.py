"""Under fsdp.cpu_offload a rank has threads for updates on the host, whatever one thread its launcher gave it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.training.build import host_threads
from tests.support.plain_step import settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

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
        assert threads(device) == [None] * 2
