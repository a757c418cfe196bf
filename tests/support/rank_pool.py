"""Real gloo ranks for tests: a few processes started once, each call a fresh process group over some of them."""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

from tests.support.waiting import PATIENCE_S


class RankPool:
    """`pool.run(world_size, function, *args)` calls function(rank, *args) on every rank, returns a list."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        while len(self._ranks) < world_size:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self._ranks.append((process, here))
        self._ranks[0][1].send((0, world_size, None, function, args))
        try:
            port = self._ranks[0][1].recv()  # rank 0 listens there by now: nobody else can get it
        except EOFError:
            self.end()
            raise RuntimeError("a rank's process ended") from None
        for rank, (_, connection) in enumerate(self._ranks[1:world_size], start=1):
            connection.send((rank, world_size, port, function, args))
        results: dict[int, Any] = {}
        is_usable = True
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])}
        while waiting:
            answered = wait(list(waiting), timeout=PATIENCE_S)
            if not answered:  # the ranks that hang are of no more use to anybody
                self.end()
                raise TimeoutError(f"ranks {sorted(waiting.values())} of {world_size} did not answer")
            for connection in answered:
                assert isinstance(connection, Connection)
                try:
                    has_started, results[waiting.pop(connection)] = connection.recv()
                except EOFError:
                    self.end()
                    raise RuntimeError("a rank's process ended") from None
                # torch counts groups in each process: after a start that failed on some, later groups would not meet
                is_usable &= has_started
        if not is_usable:
            self.end()
        failed = [value for _, value in sorted(results.items()) if isinstance(value, Exception)]
        if failed:
            raise failed[0]
        return [results[rank] for rank in range(world_size)]

    def end(self) -> None:
        """Ends the processes as they are; the next call starts others."""
        for process, _ in self._ranks:
            process.kill()
        self._ranks = []

    def close(self) -> None:
        for process, connection in self._ranks:
            connection.send(None)
            process.join(timeout=PATIENCE_S)


def forget_meshes() -> None:
    """torch remembers how to redistribute a DTensor by its mesh's shape, with groups that are gone by then."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _redistribute._gen_transform_infos.cache_clear()
    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from slimefsdp.distributed.mesh import start_process_group

    torch.set_num_threads(1)
    is_frozen = False
    while (call := connection.recv()) is not None:
        rank, world_size, port, function, args = call
        listener, has_started = None, False
        if rank == 0:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            connection.send(port)
        try:
            start_process_group(
                torch.device("cpu"), rank=rank, world_size=world_size, address="127.0.0.1", port=port, timeout_s=120,
                listener=listener,
            )  # fmt: skip
            has_started = True
            result = function(rank, *args)
            dist.barrier()
        except Exception as error:
            error.add_note("".join(traceback.format_exception(error)))
            error.__traceback__ = None
            result = error
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_meshes()
        connection.send((has_started, result))
        # models and process groups are in cycles, and each group that is left has threads that wake up all the time
        del result
        gc.collect()
        if not is_frozen:  # what was imported is there for good: the next collections need not look at it
            gc.freeze()
            is_frozen = True
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit after sub-groups were used; everything is done by now
