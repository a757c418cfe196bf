"""A rank that fails only because another one did knows it by torch's words; a bug is never taken for that."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimefsdp.distributed.collectives import lost_a_peer, peer_failed
from slimefsdp.errors import PeerFailed
from tests.support.fresh_ranks import run_fresh


def errors_of(calls: list[Callable[[], object]]) -> list[tuple[bool, str, str]]:
    found = []
    for call in calls:
        try:
            call()
        except Exception as error:
            found.append((lost_a_peer(error), str(error), str(peer_failed(error).field)))
    return found


def without_the_other(rank: int, send: Callable[[Any], None], how: str) -> None:
    """Collectives of rank 0 when rank 1 has ended, or sleeps for longer than the group waits."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
    values = torch.ones(300_000)
    dist.all_reduce(values, group=group)
    if rank == 1:
        if how == "ends":
            os._exit(3)
        time.sleep(4)
        send([])
        os._exit(0)
    gathered: list[Any] = [None] * 2
    send(
        errors_of(
            [
                lambda: dist.all_reduce(values, group=group),
                lambda: dist.all_gather_object(gathered, "x", group=group),
                lambda: dist.send(values, 1, group=group),
                lambda: dist.barrier(group=group),
            ]
        )
    )
    os._exit(0)


@pytest.mark.parametrize(("how", "field"), [("ends", "process_group"), ("is late", "cluster.call_timeout_s")])
def test_every_collective_after_a_peers_end_or_delay_says_that_a_peer_was_lost(how: str, field: str) -> None:
    found = run_fresh(2, without_the_other, how)[0][0][0]
    assert len(found) == 4
    assert all(is_lost for is_lost, _, _ in found), found
    assert found[0][2] == field


@pytest.mark.parametrize(
    "error",
    [
        dist.DistStoreError("wait timeout after 3000ms, keys: /0//cpu//0/1"),
        dist.DistNetworkError("The client socket has failed to connect to any network address of (10.0.0.1, 4711)."),
        # as NCCL's documentation and sources word them; not met on a GPU yet
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network"),
        dist.DistBackendError("NCCL communicator was aborted on rank 1."),
        dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, ...)"),
    ],
)
def test_words_of_the_store_and_of_nccl_are_known(error: Exception) -> None:
    assert lost_a_peer(error)
    typed = peer_failed(error)
    assert isinstance(typed, PeerFailed) and typed.hint and str(error) in typed.message


@pytest.mark.parametrize(
    "said",
    [
        "Connection closed by peer [10.0.0.1]:2", "Read error [10.0.0.1]:2: Connection reset by peer",
        "writev [10.0.0.1]:2: Broken pipe", "connect [10.0.0.1]:2: Connection refused",
        "recv: Connection reset by peer",
        "timed out connecting: SO_ERROR: No route to host", "Read error [10.0.0.1]:2: Network is unreachable",
        "writev [10.0.0.1]:2: No route to host", "short read: got 3 bytes while expecting to read 8 bytes",
    ],
)  # fmt: skip
def test_what_the_kernel_says_of_a_connection_is_known_in_gloos_errors_alone(said: str) -> None:
    assert lost_a_peer(RuntimeError(f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] {said}"))
    assert not lost_a_peer(RuntimeError(said))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a reward service: Connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
        TimeoutError("timed out"),
        dist.DistBackendError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"),
        RuntimeError("[/gloo/gloo/allreduce.cc:31] Enforce failed: opts.elements > 0"),
    ],
)
def test_other_errors_are_not_blamed_on_a_peer(error: Exception) -> None:
    assert not lost_a_peer(error)
