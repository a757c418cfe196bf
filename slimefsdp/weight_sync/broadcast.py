"""A group in which rank 0 broadcasts weights to engines.

Trainer ranks, embedded engines and the workers of a rollout server with an environment of its own import this file, so
it needs torch alone. The group is no global process group: a process may be in others, and join this one again.
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

from slimefsdp.weight_sync.packed_bucket import ALIGNMENT, Layout, host_buffers, layout_of, pack, packed_bytes

_POLL_S = 0.0005
_LOOK_S = 0.05  # for others to come
_ASK_S = 1.0  # whether rank 0 is there
_LEFT = "rank 0 has left"  # a key of the store
# broadcasts that nobody waits for any more, with their groups and tensors: gloo does not end them before their time,
# and a group that goes would wait for its own
_unended: list[tuple[Any, Any, torch.Tensor]] = []
GROUP = "the broadcast group"  # said in every BroadcastError, so that one can be known by its text
_AFTER_S = 60.0  # NCCL ends the whole process when its own time is over: it must never be first


class BroadcastError(RuntimeError):
    """A member of the group ended, or did not come in time: `missing` are the ranks that are known not to have come."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class Rendezvous(NamedTuple):
    """Where the members of a broadcast group meet, and which of them an engine's processes are."""

    address: str
    port: int
    rank: int  # of the engine's first process; the others follow it
    world_size: int
    backend: str  # gloo or nccl
    timeout_s: float  # for the meeting, and for each broadcast


class BroadcastGroup:
    """Members 0 to `world_size` - 1; the constructor returns when all are there.

    Args:
        address: of the machine of rank 0, as the others reach it.
        port: free there.
        backend: gloo or nccl; tensors are on the host, or on the current CUDA device.
        timeout_s: for the constructor, and for each broadcast.
        listener: bound to the port, on rank 0, and taken over; a port that was only found free may be gone by now.
        is_given_up: on rank 0; once it is set, nobody waits for others any more.

    Raises:
        BroadcastError: the others did not come. ValueError: there is no such backend.
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
        _unended[:] = [one for one in _unended if not one[1].is_completed()]
        timeout = timedelta(seconds=timeout_s)
        try:
            self._store = dist.TCPStore(
                address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )  # fmt: skip
            # the constructors below wait for all only with some backends and releases
            self._meet(rank, world_size)
            self._group = self._made(backend, _way_to(address, port), rank, world_size)
        except RuntimeError as error:  # what torch raises of its store and of gloo descends from it
            self.close()
            raise BroadcastError(
                f"{self._name}: {GROUP} did not come together within {timeout_s:g} s: {_first_line(error)}",
                getattr(error, "missing", ()),
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends a contiguous tensor from rank 0, or fills it elsewhere; returns it when that is done.

        Raises:
            BroadcastError: a member ended or was late; the group is of no use any more.
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
        """Waits for a broadcast in time, and no longer when this side or rank 0 has left; neither backend would tell.

        Raises:
            BroadcastError, RuntimeError: it did not end, or not well.
        """
        group, began = self._group, time.monotonic()
        asked, why = began, None
        while why is None and not work.is_completed():
            now = time.monotonic()
            if now - began > self._timeout_s:
                why = f"a broadcast took more than {self._timeout_s:g} s"
            elif self._is_given_up.is_set():
                why = "this side has left"
            elif now - asked > _ASK_S:
                asked, why = now, None if self._is_first_there() else "rank 0 has left"
            time.sleep(_POLL_S)
        if why is None:
            work.wait()
            return
        if isinstance(group, dist.ProcessGroupGloo):
            _unended.append((group, work, tensor))
        else:
            group.abort()
        raise BroadcastError(f"{self._name}: {GROUP} broke: {why}")

    def _is_first_there(self) -> bool:
        """Whether rank 0, who keeps the store, has not left."""
        try:
            return not self._store.check([_LEFT])
        except (RuntimeError, AttributeError):  # it is gone there, or here
            return False

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        """The form of a bucket in this group, and what is in it, in that order.

        On the host that is memory of the bucket before the last, which is kept as long as the group.
        """
        return self._packed(list(tensors), ALIGNMENT)

    def _packed(self, held: list[tuple[str, torch.Tensor]], alignment: int) -> tuple[Layout, torch.Tensor]:
        layout = layout_of(held)
        is_on_host = all(tensor.device.type == "cpu" for _, tensor in held)
        into = self._buffers.next(packed_bytes(layout, alignment)) if is_on_host else None
        return layout, pack((tensor for _, tensor in held), alignment=alignment, into=into)

    def close(self) -> None:
        """Leaves the group and gives its sockets back; idempotent. The others notice at their next broadcast.

        A broadcast that another thread waits for ends with an error, and those of the others, where this is rank 0.
        """
        self._is_given_up.set()
        with suppress(RuntimeError, AttributeError):  # it is closed already, or never was
            if self._is_first:
                self._store.set(_LEFT, "")
        if self._group is not None and hasattr(self._group, "shutdown"):
            self._group.shutdown()
        self._group = None
        self.__dict__.pop("_store", None)

    def _meet(self, rank: int, world_size: int) -> None:
        keys = [f"here/{other}" for other in range(world_size)]
        self._store.set(keys[rank], "")
        if rank > 0:
            self._store.wait(keys)
            return
        deadline = time.monotonic() + self._timeout_s
        while not self._store.check(keys):
            if time.monotonic() > deadline or self._is_given_up.wait(_LOOK_S):
                missing = [other for other, key in enumerate(keys) if not self._store.check([key])]
                raise BroadcastError(f"ranks {missing} have not come", missing)

    def _store_of_group(self, backend: str) -> dist.Store:
        return dist.PrefixStore("weights", self._store)

    def _made(self, backend: str, own_address: str, rank: int, world_size: int) -> Any:
        store = self._store_of_group(backend)
        if backend == "nccl":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = timedelta(seconds=self._timeout_s + _AFTER_S)
            return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # gloo would take the address that this machine's name stands for, which others may not reach
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=own_address)]
        options._timeout = timedelta(seconds=self._timeout_s)
        return dist.ProcessGroupGloo(store, rank, world_size, options)


class TorchBroadcastGroup(BroadcastGroup):
    """Rank 0 of a group whose other members are made by torch.distributed, as SGLang's workers are.

    They take a TCP store at our address and the prefixes of a group called `torch_group_name(port)`. They do not say
    in the store that they are there, and those of NCCL meet at the first broadcast.
    """

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        """Packs tensors into bytes without gaps. Larger elements come first, so each begins at an aligned offset."""
        return self._packed(sorted(tensors, key=lambda named: -named[1].element_size()), 1)

    def _meet(self, rank: int, world_size: int) -> None:
        pass

    def _store_of_group(self, backend: str) -> dist.Store:
        # init_custom_process_group's prefix, and the two of torch's _new_process_group_helper
        name, device = torch_group_name(self._port), "cuda" if backend == "nccl" else "cpu"
        return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store)))


def torch_group_name(port: int) -> str:
    """Returns what both ends call the group that meets at a port."""
    return f"slimefsdp_{port}"


def _way_to(address: str, port: int) -> str:
    """The address of this machine that packets to another one leave from."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)  # sends nothing
        own: str = way.getsockname()[0]
    return own


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
