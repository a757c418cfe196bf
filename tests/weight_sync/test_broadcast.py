"""Weights arrive in every member of a broadcast group bit by bit; one that is gone or late is an error elsewhere."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.weight_sync.broadcast import BroadcastError, BroadcastGroup
from slimefsdp.weight_sync.buckets import ALIGNMENT, pack, packed_bytes, unpack
from tests.support.forks import FORKS
from tests.support.waiting import PATIENCE_S

LATE_S = 3.0
SLACK_S = 20.0  # of a busy machine
LARGE = 16 * 2**20  # bytes: no socket holds them for a process that does not read


def bucket() -> list[tuple[str, torch.Tensor]]:
    """Tensors of several dtypes, and of sizes that leave the next one unaligned."""
    torch.manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "scalar": (), "empty": (0, 4), "c": (33, 2)}
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float32, torch.bfloat16]
    return [(name, torch.randn(shape).to(dtype)) for (name, shape), dtype in zip(shapes.items(), dtypes, strict=True)]


def layout_of(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors]


def joined(port: int, rank: int, world_size: int, timeout_s: float = 60.0, **how: Any) -> BroadcastGroup:
    return BroadcastGroup("127.0.0.1", port, rank, world_size, "gloo", timeout_s, **how)


def receive_a_bucket(parent: Connection, port: int, rank: int) -> None:
    group = joined(port, rank, 3)
    layout = layout_of(bucket())
    for _ in range(2):
        got = unpack(group.broadcast(torch.full((packed_bytes(layout),), 255, dtype=torch.uint8)), layout)
        parent.send([(name, tensor.view(-1).view(torch.uint8).tolist()) for name, tensor in got])


def take_part(parent: Connection, port: int, rank: int, world_size: int, timeout_s: float = LATE_S) -> None:
    """Joins, says so, and receives when it is told to."""
    parent.send("started")  # which takes long on a busy machine
    group = joined(port, rank, world_size, timeout_s)
    parent.send("joined")
    parent.recv()
    began = time.monotonic()
    try:
        group.broadcast(torch.empty(LARGE, dtype=torch.uint8))
    except BroadcastError as error:
        parent.send((str(error), time.monotonic() - began))
    else:
        parent.send(("received", 0.0))


def join_often(parent: Connection, ports: list[int], rank: int) -> None:
    held = []
    for port in ports:
        group = joined(port, rank, 2)
        assert int(group.broadcast(torch.zeros(8, dtype=torch.uint8)).sum()) == 8
        group.close()
        held.append(descriptors())
    parent.send(held)


def descriptors() -> int:
    """Open ones, and threads."""
    return sum(len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))


@contextmanager
def member(function: Callable[..., None], *args: Any) -> Iterator[tuple[Connection, Any]]:
    """A process that runs it, and the other end of its connection; it is gone afterwards."""
    here, there = FORKS.Pipe()
    process = FORKS.Process(target=function, args=(there, *args))
    process.start()
    there.close()
    try:
        yield here, process
    finally:
        process.kill()
        process.join()
        here.close()


def heard(connection: Connection) -> Any:
    assert connection.poll(PATIENCE_S)
    return connection.recv()


def listening() -> tuple[socket.socket, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    return listener, listener.getsockname()[1]


def test_every_member_gets_every_bit() -> None:
    listener, port = listening()
    with member(receive_a_bucket, port, 1) as (one, _), member(receive_a_bucket, port, 2) as (two, _):
        group = joined(port, 0, 3, listener=listener)
        for round_ in range(2):
            tensors = [(name, tensor + round_) for name, tensor in bucket()]
            group.broadcast(pack([tensor for _, tensor in tensors]))
            sent = [(name, tensor.reshape(-1).view(torch.uint8).tolist()) for name, tensor in tensors]
            assert heard(one) == heard(two) == sent
        group.close()
        group.close()
        with pytest.raises(BroadcastError):
            group.broadcast(torch.zeros(1))


@pytest.mark.slow
def test_members_that_do_not_come_are_an_error_in_time_on_both_sides() -> None:
    listener, port = listening()
    for how in ({"rank": 0, "listener": listener}, {"rank": 1}):
        began = time.monotonic()
        with pytest.raises(BroadcastError) as caught:
            joined(port, world_size=2, timeout_s=LATE_S, **how)  # type: ignore[arg-type]
        assert time.monotonic() - began < LATE_S + SLACK_S and str(port) in str(caught.value)


def test_a_member_that_was_killed_is_an_error_for_the_sender() -> None:
    listener, port = listening()
    with member(take_part, port, 1, 2) as (connection, process):
        assert heard(connection) == "started"
        group = joined(port, 0, 2, LATE_S, listener=listener)
        assert heard(connection) == "joined"
        process.kill()
        process.join()
        began = time.monotonic()
        with pytest.raises(BroadcastError):
            group.broadcast(torch.zeros(LARGE, dtype=torch.uint8))
        assert time.monotonic() - began < LATE_S + SLACK_S
        group.close()


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["gone", "stopped"])
def test_a_sender_that_does_not_send_is_an_error_for_the_others(stopped: bool) -> None:
    listener, port = listening()
    with member(take_part, port, 1, 2) as (connection, _):
        assert heard(connection) == "started"
        group = joined(port, 0, 2, LATE_S, listener=listener)
        assert heard(connection) == "joined"
        if not stopped:
            group.close()
        connection.send("receive")
        said, seconds = heard(connection)
        assert said != "received" and seconds < LATE_S + SLACK_S
        group.close()


def test_a_sender_that_leaves_frees_those_who_wait_for_a_member_that_takes_no_part() -> None:
    listener, port = listening()
    with (
        member(take_part, port, 1, 4, PATIENCE_S) as (one, _),
        member(take_part, port, 2, 4, PATIENCE_S) as (two, _),
        member(take_part, port, 3, 4, PATIENCE_S) as (three, _),
    ):
        assert [heard(each) for each in (one, two, three)] == ["started"] * 3
        group = joined(port, 0, 4, PATIENCE_S, listener=listener)
        assert [heard(each) for each in (one, two, three)] == ["joined"] * 3
        three.send("receive")  # from one of the others, or one of them from it
        two.send("receive")
        with ThreadPoolExecutor(1) as side:
            sending = side.submit(group.broadcast, torch.zeros(LARGE, dtype=torch.uint8))
            assert not one.poll(1.0)
            group.close()
            with pytest.raises(BroadcastError):
                sending.result(timeout=PATIENCE_S / 2)
        for each in (two, three):
            assert each.poll(PATIENCE_S / 2)
            each.recv()


def test_groups_leave_nothing_open() -> None:
    before = descriptors()
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(15)]
    ports = [listener.getsockname()[1] for listener in listeners]
    with member(join_often, ports, 1) as (connection, _):
        for listener, port in zip(listeners, ports, strict=True):
            group = joined(port, 0, 2, listener=listener)
            group.broadcast(torch.ones(8, dtype=torch.uint8))
            group.close()
        theirs = heard(connection)
    assert descriptors() <= before + 2, "what the process that starts others keeps open"
    assert theirs[-1] <= theirs[4]


def test_both_sides_agree_where_a_tensor_lies() -> None:
    tensors = bucket()
    flat, layout = pack([tensor for _, tensor in tensors]), layout_of(tensors)
    assert flat.numel() == packed_bytes(layout) and flat.numel() % ALIGNMENT == 0
    for (name, tensor), (found, view) in zip(tensors, unpack(flat, layout), strict=True):
        assert found == name and view.dtype == tensor.dtype and torch.equal(view, tensor)
        assert view.numel() == 0 or (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0
    with pytest.raises(ValueError):
        unpack(flat[:-1], layout)
    with pytest.raises(ValueError):
        packed_bytes([("a", "float31", (2,))])
    with pytest.raises(ValueError):
        BroadcastGroup("127.0.0.1", 1, 0, 1, "mpi", 1.0)
