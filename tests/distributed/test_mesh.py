"""The mesh: who shares data, packs and parameters with whom, and a typed error where the ranks do not fit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.errors import ConfigError
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.refusals import names, refused
from tests.support.trainers import fresh_batch, settings

CPU = torch.device("cpu")


def places(rank: int, dp_replicate: int, dp: int, cp: int, is_whole: bool) -> dict[str, Any]:
    mesh = build_mesh(dp, cp, CPU, dp_replicate=dp_replicate, is_whole_on_every_rank=is_whole)
    return {
        "data": (mesh.data_rank, mesh.data_ranks),
        "cp": mesh.cp_rank,
        "cp group": dist.get_process_group_ranks(mesh.cp_group),
        "copy": dist.get_process_group_ranks(mesh.shard_group),
        "first": mesh.is_first_copy,
        "all": dist.get_process_group_ranks(mesh.group),
    }


def test_ranks_are_row_major_with_cp_ranks_adjacent(ranks: RankPool) -> None:
    found = ranks.run(4, places, 2, 1, 2, False)
    assert [place["data"] for place in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [place["cp"] for place in found] == [0, 1, 0, 1]
    assert [place["cp group"] for place in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["copy"] for place in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["first"] for place in found] == [True, True, False, False]
    found = ranks.run(4, places, 2, 2, 1, False)
    assert [place["data"] for place in found] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [place["copy"] for place in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [place["cp group"] for place in found] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("shape", [(1, 2, 2), (1, 4, 1), (1, 1, 4)])
def test_without_copies_all_ranks_share_the_parameters(ranks: RankPool, shape: tuple[int, int, int]) -> None:
    for place in ranks.run(4, places, *shape, False):
        assert place["copy"] == place["all"] == [0, 1, 2, 3] and place["first"]


def test_whole_on_every_rank_means_a_copy_each(ranks: RankPool) -> None:
    found = ranks.run(4, places, 1, 2, 2, True)
    assert [place["copy"] for place in found] == [[0], [1], [2], [3]]
    assert [place["first"] for place in found] == [True, False, False, False]
    assert [place["data"] for place in found] == [(0, 2), (0, 2), (1, 2), (1, 2)]


@pytest.mark.parametrize("shape, way_out", [((2, 2, 1), [4]), ((1, 1, 1), ["mesh.dp=2", 1])])
def test_another_number_of_ranks_is_one_error_that_names_all_three(
    ranks: RankPool, shape: tuple[int, int, int], way_out: list[object]
) -> None:
    settings = [f"mesh.{axis}={size}" for axis, size in zip(("dp_replicate", "dp", "cp"), shape, strict=True)]
    with refused(ConfigError, "mesh.dp", *settings, math.prod(shape), 2) as caught:
        ranks.run(2, places, *shape, False)
    assert all(names(str(caught.value.hint), value) for value in way_out)


def timeouts(rank: int) -> list[float]:
    mesh = build_mesh(1, 2, CPU, dp_replicate=2, timeout_s=7.0)
    groups = (mesh.group, mesh.shard_group, mesh.cp_group)
    return [group._get_backend(CPU).options._timeout.total_seconds() for group in groups]


def test_every_group_of_a_mesh_has_its_timeout(ranks: RankPool) -> None:
    assert ranks.run(4, timeouts) == [[7.0] * 3] * 4


def threads_after_trainers(rank: int, config: RunConfig, batch: RolloutBatch) -> list[int]:
    found = []
    for _ in range(4):
        Trainer(config, device=CPU).forward_backward(batch)
        found.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the threads of a process are listed by Linux alone")
def test_a_process_that_makes_many_trainers_gathers_no_threads(folder: Path, ranks: RankPool) -> None:
    config = settings(folder, mesh={"cp": 2})
    for first, *others in ranks.run(2, threads_after_trainers, config, fresh_batch()):
        assert others == [first] * 3
