"""A group in which rank 0 broadcasts weights to engines, and the form of a bucket in it: one tensor of bytes.

Trainer ranks, embedded engines and the workers of a rollout server with an environment of its own import this file, so
it needs torch alone. The group is no global process group: a process may be in others, and join this one again.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ALIGNMENT = 16  # bytes: a view of bytes as another dtype must begin at a multiple of its size
_POLL_S = 0.0005
_AFTER_S = 60.0  # NCCL ends the whole process when its own time is over: it must never be first

Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype such as "float32", and shape of each tensor of a bucket; both sides know it."""


class BroadcastError(RuntimeError):
    """A member of the group ended, or did not come in time."""


class BroadcastGroup:
    """Members 0 to `world_size` - 1; the constructor returns when all are there.

    Args:
        address: of the machine of rank 0, as the others reach it.
        port: free there.
        backend: gloo or nccl; tensors are on the host, or on the current CUDA device.
        timeout_s: for the constructor, and for each broadcast.
        listener: bound to the port, on rank 0, and taken over; a port that was only found free may be gone by now.

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
    ) -> None:
        if backend not in ("gloo", "nccl"):
            raise ValueError(f"backend={backend!r} is neither gloo nor nccl")
        self._timeout_s = timeout_s
        self._name = f"rank {rank} of {world_size} at {address}:{port}"
        self._port = port
        self._group: Any = None
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
                f"{self._name}: the group did not come together within {timeout_s:g} s: {_first_line(error)}"
            ) from error

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sends a contiguous tensor from rank 0, or fills it elsewhere; returns it when that is done.

        Raises:
            BroadcastError: a member ended or was late; the group is of no use any more.
        """
        if self._group is None:
            raise BroadcastError(f"{self._name}: the group is closed")
        try:
            work = self._group.broadcast(tensor, 0)
            if isinstance(self._group, dist.ProcessGroupGloo):
                work.wait()
            else:  # waiting for NCCL has no end; asking it has
                deadline = time.monotonic() + self._timeout_s
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        self._group.abort()
                        raise BroadcastError(f"{self._name}: a broadcast took more than {self._timeout_s:g} s")
                    time.sleep(_POLL_S)
                work.wait()
        except BroadcastError:
            raise
        except RuntimeError as error:
            raise BroadcastError(f"{self._name}: a broadcast failed: {_first_line(error)}") from error
        return tensor

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Layout, torch.Tensor]:
        """The form of a bucket in this group, and what is in it, in that order."""
        held = list(tensors)
        return _layout(held), pack(tensor for _, tensor in held)

    def close(self) -> None:
        """Leaves the group and gives its sockets back; idempotent. The others notice at their next broadcast."""
        if self._group is not None and hasattr(self._group, "shutdown"):
            self._group.shutdown()
        self._group = None
        self.__dict__.pop("_store", None)

    def _meet(self, rank: int, world_size: int) -> None:
        self._store.set(f"here/{rank}", "")
        self._store.wait([f"here/{other}" for other in range(world_size)])

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
        """As `BroadcastGroup`: bytes without gaps. Larger elements come first, so each begins where its dtype may."""
        held = sorted(tensors, key=lambda named: -named[1].element_size())
        return _layout(held), pack((tensor for _, tensor in held), alignment=1)

    def _meet(self, rank: int, world_size: int) -> None:
        pass

    def _store_of_group(self, backend: str) -> dist.Store:
        # init_custom_process_group's prefix, and the two of torch's _new_process_group_helper
        name, device = torch_group_name(self._port), "cuda" if backend == "nccl" else "cpu"
        return dist.PrefixStore(f"{device}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, self._store)))


def torch_group_name(port: int) -> str:
    """What both ends call the group that meets at a port."""
    return f"slimefsdp_{port}"


def pack(tensors: Iterable[torch.Tensor], *, alignment: int = ALIGNMENT) -> torch.Tensor:
    """The bytes of tensors of one device, [bytes] uint8, each beginning at a multiple of `alignment`."""
    held = list(tensors)
    starts, size = _places([tensor.numel() * tensor.element_size() for tensor in held], alignment)
    flat = torch.zeros(size, dtype=torch.uint8, device=held[0].device if held else "cpu")
    for tensor, start in zip(held, starts, strict=True):
        _part(flat, start, tensor.dtype, tensor.shape).copy_(tensor)
    return flat


def packed_bytes(layout: Layout) -> int:
    """How long `pack` makes such tensors."""
    return _places([_size(dtype, shape) for _, dtype, shape in layout])[1]


def unpack(flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `pack`: views of the same memory, by name."""
    starts, size = _places([_size(dtype, shape) for _, dtype, shape in layout])
    if size != flat.numel():
        raise ValueError(f"a bucket of {flat.numel()} bytes was to have {size}")
    return [
        (name, _part(flat, start, dtype_named(dtype), shape))
        for (name, dtype, shape), start in zip(layout, starts, strict=True)
    ]


def dtype_named(name: str) -> torch.dtype:
    """The dtype that prints as torch.<name>.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def _part(flat: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _size(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype_named(dtype).itemsize


def _layout(tensors: Sequence[tuple[str, torch.Tensor]]) -> Layout:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors]


def _places(sizes: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Where each begins, and where the last one ends, with its padding."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // alignment) * alignment
    return starts, end


def _way_to(address: str, port: int) -> str:
    """The address of this machine that packets to another one leave from."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)  # sends nothing
        own: str = way.getsockname()[0]
    return own


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
