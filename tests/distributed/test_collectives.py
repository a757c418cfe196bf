"""A rank that keeps others waiting has begun fewer collectives; NCCL's are aborted where gloo's end by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slimefsdp.distributed.collectives import abort_collectives, collectives_begun, needs_abort
from slimefsdp.distributed.mesh import build_mesh
from tests.support.fresh_ranks import run_fresh
from tests.support.rank_pool import RankPool
from tests.support.waiting import PATIENCE_S, wait_until


def begun_while_one_waits(rank: int) -> list[int]:
    """What each rank has begun more than before: collectives of a mesh, then while rank 0 waits for rank 1 in one."""
    mesh = build_mesh(2, 1, torch.device("cpu"))
    own = dist.new_group(backend="gloo")  # as one of saves in the background, which is no part of a call
    at_first = collectives_begun("cpu")
    for group in (mesh.group, own, mesh.cp_group):
        dist.all_reduce(torch.ones(1), group=group)
    found = [collectives_begun("cpu") - at_first]
    waiting = threading.Thread(target=lambda: dist.all_reduce(torch.ones(1), group=mesh.group))
    if rank == 0:
        waiting.start()
        wait_until(lambda: collectives_begun("cpu") - at_first > found[0])
    found.append(collectives_begun("cpu") - at_first)
    dist.barrier(group=own)
    if rank == 1:
        waiting.start()
    waiting.join(timeout=PATIENCE_S)
    return [*found, collectives_begun("cpu") - at_first]


def test_a_rank_that_others_wait_for_has_begun_fewer_collectives(ranks: RankPool) -> None:
    assert ranks.run(2, begun_while_one_waits) == [[2, 3, 3], [2, 2, 3]]


def after_an_abort(rank: int, send: Callable[[Any], None]) -> None:
    abort_collectives()
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        send((needs_abort(), collectives_begun("cpu"), type(error), str(error)))


def test_after_an_abort_there_are_no_groups_and_collectives_raise() -> None:
    ((((needs, begun, kind, said),), _),) = run_fresh(1, after_an_abort)
    assert (needs, begun, kind) == (False, 0, ValueError) and "has not been initialized" in said


def test_all_groups_of_nccl_are_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(distributed_c10d, "_abort_process_group", lambda: calls.append("all groups"))
    assert needs_abort() is True
    abort_collectives()
    assert calls == ["all groups"]
