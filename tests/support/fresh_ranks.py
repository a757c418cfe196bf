"""Ranks in processes of their own, new for each call: for what must survive a process, or its violent end."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.support.forks import FORKS


def run_fresh(world_size: int, function: Callable[..., None], *args: Any) -> list[tuple[list[Any], int | None]]:
    """Each rank runs function(rank, send, *args) in a new process; what it sent, and how the process ended.

    0: as it should; -9: killed; 1: an exception, for instance because a peer was killed.
    """
    listener = socket.create_server(("127.0.0.1", 0))  # rank 0 gets it as it is: nobody else can take its port
    port = listener.getsockname()[1]
    started = []
    for rank in range(world_size):
        here, there = FORKS.Pipe()
        store = listener if rank == 0 else None
        process = FORKS.Process(target=_run, args=(there, rank, world_size, port, store, function, args))
        process.start()
        there.close()
        started.append((process, here))
    listener.close()
    results = []
    for process, connection in started:
        sent = []
        try:
            while connection.poll(120):
                sent.append(connection.recv())
        except EOFError:
            pass
        process.join(timeout=10)
        if process.exitcode is None:
            process.kill()
            process.join()
        results.append((sent, process.exitcode))
    return results


def _run(
    connection: Connection,
    rank: int,
    world_size: int,
    port: int,
    listener: socket.socket | None,
    function: Any,
    args: tuple[Any, ...],
) -> None:
    import torch

    from slimefsdp.distributed.mesh import start_process_group

    torch.set_num_threads(1)
    code = 1
    try:
        start_process_group(
            torch.device("cpu"), rank=rank, world_size=world_size, address="127.0.0.1", port=port, timeout_s=60,
            listener=listener,
        )  # fmt: skip
        function(rank, connection.send, *args)
        torch.distributed.barrier()
        code = 0
    finally:
        connection.close()
        os._exit(code)  # gloo may abort at interpreter exit after sub-groups were used
