"""Provides a process group in which rank 0 broadcasts weights to engines.

Workers of rollout servers import this module in their own environment, so it may import only torch. The group is
independent of torch's global process groups, and a process may be in several such groups, one after another or at once.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slimefsdp.weight_sync.buckets import ALIGNMENT, Layout, host_buffers, layout_of, pack, packed_bytes

_POLL_S = 0.0005
_JOIN_POLL_S = 0.05  # interval of checks whether all members have joined
_ALIVE_POLL_S = 1.0  # interval of checks whether rank 0 has left
_LEFT = "rank 0 has left"  # a key of the store
# Abandoned broadcasts as (group, work, tensor). gloo cannot cancel them before their timeout, and destroying a group
# would wait for its broadcasts, so these objects are kept until the broadcast has ended.
_abandoned: list[tuple[Any, Any, torch.Tensor]] = []
GROUP = "the broadcast group"  # part of the text of every BroadcastError, by which errors can be recognised
_NCCL_EXTRA_S = 60.0  # NCCL kills the process at its own timeout, which must therefore be later than timeout_s


class BroadcastError(RuntimeError):
    """Says that a member of the group left, or did not join in time.

    `missing` are the ranks known not to have joined.
    """

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class Rendezvous(NamedTuple):
    """Holds what an engine's processes need to join a broadcast group."""

    address: str
    port: int
    rank: int  # rank of the engine's first process; its other processes have the following ranks
    world_size: int
    backend: str  # gloo or nccl
    timeout_s: float  # timeout of joining, and of each broadcast


class BroadcastGroup:
    """A member of the group; the constructor returns when all `world_size` members have joined.

    Args:
        address: address at which the other members reach rank 0's machine.
        port: port on which rank 0 listens.
        backend: gloo for tensors on the host, or nccl for tensors on the current CUDA device.
        timeout_s: timeout of the constructor and of each broadcast.
        listener: on rank 0, a socket bound to the port, so that no other program can take the port; the group closes
            it.
        is_given_up: on rank 0, an event that ends every wait for other members.

    Raises:
        BroadcastError: other members did not join in time.
        ValueError: there is no such backend.
    """

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
        *,
        listener: socket.socket | None = None,
        is_given_up: threading.Event | None = None,
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r} is neither gloo nor nccl")
        self._timeout_s = timeout_s
        self._name = f"rank {rank} of {world_size} at {address}:{port}"
        self._port = port
        self._group: Any = None
        self._is_first = rank == 0
        self._buffers = host_buffers(2)
        self._is_given_up = is_given_up or threading.Event()
        _abandoned[:] = [entry for entry in _abandoned if not entry[1].is_completed()]
        timeout = timedelta(seconds=timeout_s)
        try:
            self._store = dist.TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )  # fmt: skip
            # not all backends and releases of torch wait for all members in their constructor
            self._wait_for_members(rank, world_size)
            self._group = self._new_group(backend, _own_address_towards(address, port), rank, world_size)
        except RuntimeError as error:  # the errors of torch's store and of gloo
            self.close()
            raise BroadcastError(
                f"{self._name}: {GROUP} did not come together within {timeout_s:g} s: {_first_line(error)}",
                getattr(error, "missing", ()),
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends a contiguous tensor from rank 0, or receives into the tensor on other ranks; returns it when complete.

        Raises:
            BroadcastError: a member left or was late; the group cannot be used any more.
        """
        if self._group is None:
            raise BroadcastError(f"{self._name}: {GROUP} is closed")
        try:
            work = self._group.broadcast(tensor, 0)
            self._await(work, tensor)
        except BroadcastError:
            raise
        except RuntimeError as error:
            raise BroadcastError(f"{self._name}: {GROUP} broke: {_first_line(error)}") from error
        return tensor

    def _await(self, work: Any, tensor: torch.Tensor) -> None:
        """Waits for a broadcast until its timeout, or until this rank or rank 0 leaves, which backends do not notice.

        Raises:
            BroadcastError: the broadcast did not complete.
            RuntimeError: the broadcast failed.
        """
        group, began = self._group, time.monotonic()
        last_check, problem = began, None
        while problem is None and not work.is_completed():
            now = time.monotonic()
            if now - began > self._timeout_s:
                problem = f"a broadcast took more than {self._timeout_s:g} s"
            elif self._is_given_up.is_set():
                problem = "this side has left"
            elif now - last_check > _ALIVE_POLL_S:
                last_check, problem = now, None if self._is_first_alive() else "rank 0 has left"
            time.sleep(_POLL_S)
        if problem is None:
            work.wait()
            return
        if isinstance(group, dist.ProcessGroupGloo):
            _abandoned.append((group, work, tensor))
        else:
            group.abort()
        raise BroadcastError(f"{self._name}: {GROUP} broke: {problem}")

    def _is_first_alive(self) -> bool:
        """Returns whether rank 0, which hosts the store, is still in the group."""
        try:
            return not self._store.check([_LEFT])
        except (RuntimeError, AttributeError):  # rank 0's store is gone, or this member is closed
            return False

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        """Returns the layout and the packed bytes of a bucket, for `broadcast`.

        On the host, the memory is used again two buckets later.
        """
        return self._packed(list(tensors), ALIGNMENT)

    def _packed(self, named: list[tuple[str, torch.Tensor]], alignment: int) -> tuple[Layout, torch.Tensor]:
        layout = layout_of(named)
        is_on_host = all(tensor.device.type == "cpu" for _, tensor in named)
        into = self._buffers.next(packed_bytes(layout, alignment)) if is_on_host else None
        return layout, pack((tensor for _, tensor in named), alignment=alignment, into=into)

    def close(self) -> None:
        """Leaves the group and closes its sockets; idempotent. Other members get an error at their next broadcast.

        A broadcast in another thread ends with an error; if rank 0 closes, so do the broadcasts of other members.
        """
        self._is_given_up.set()
        with suppress(RuntimeError, AttributeError):  # already closed, or never opened
            if self._is_first:
                self._store.set(_LEFT, "")
        if self._group is not None and hasattr(self._group, "shutdown"):
            self._group.shutdown()
        self._group = None
        self.__dict__.pop("_store", None)

    def _wait_for_members(self, rank: int, world_size: int) -> None:
        keys = [f"here/{other}" for other in range(world_size)]
        self._store.set(keys[rank], "")
        if rank > 0:
            self._store.wait(keys)
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if time.monotonic() > deadline or self._is_given_up.wait(_JOIN_POLL_S):
                missing = [other for other, key in enumerate(keys) if not self._store.check([key])]
                raise BroadcastError(f"ranks {missing} have not come", missing)

    def _store_of_group(self, backend: str) -> dist.Store:
        return dist.PrefixStore("weights", self._store)

    def _new_group(self, backend: str, own_address: str, rank: int, world_size: int) -> Any:
        store = self._store_of_group(backend)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=self._timeout_s + _NCCL_EXTRA_S)
            return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # by default gloo uses the address that this machine's name resolves to, which other machines may not reach
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=self._timeout_s)
        return dist.ProcessGroupGloo(store, rank, world_size, options)


class TorchBroadcastGroup(BroadcastGroup):
    """Rank 0 of a group whose other members use torch.distributed, such as SGLang's workers.

    The other members use the TCP store at rank 0's address, with the key prefixes of a group called
    `torch_group_name(port)`. They write nothing into the store when they join. With NCCL they connect at the first
    broadcast.
    """

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        """Packs tensors without gaps; tensors with larger elements come first, so every offset is aligned."""
        return self._packed(sorted(tensors, key=lambda named: -named[1].element_size()), 1)

    def _wait_for_members(self, rank: int, world_size: int) -> None:
        pass

    def _store_of_group(self, backend: str) -> dist.Store:
        # the prefix of init_custom_process_group, and the two prefixes of torch's _new_process_group_helper
        name, device = torch_group_name(self._port), "cuda" if backend == "nccl" else "cpu"
        return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store)))


def torch_group_name(port: int) -> str:
    """Returns the name of the group at a port, on all members."""
    return f"slimefsdp_{port}"


def _own_address_towards(address: str, port: int) -> str:
    """Returns the address from which this machine sends packets to another address."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        own: str = probe.getsockname()[0]
    return own


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
