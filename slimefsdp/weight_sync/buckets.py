"""Packs the tensors of a bucket into one tensor of bytes for an engine, and shares memory between processes.

Memory on the host, or on a CUDA device by IPC handles, can be shared with other processes of this machine. Workers of
rollout servers import this module in their own environment, so it may import only torch.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Bucket = list[tuple[str, torch.Tensor]]
Handle = dict[str, Any]
"""Names memory that a process shares; a JSON value."""
ALIGNMENT = 16  # bytes; to view bytes as another dtype, they must start at a multiple of the element size

Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype such as "float32", and shape of each tensor of a bucket; known to sender and receiver."""


def pack(
    tensors: Iterable[torch.Tensor], *, alignment: int = ALIGNMENT, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the bytes of tensors on one device, [bytes] uint8; each tensor starts at a multiple of `alignment`.

    Args:
        into: memory for the result, uint8, at least `packed_bytes` long; None means new memory.
    """
    items = list(tensors)
    starts, size = _offsets([tensor.numel() * tensor.element_size() for tensor in items], alignment)
    if into is None:
        into = torch.empty(size, dtype=torch.uint8, device=items[0].device if items else "cpu")
    flat = into[:size]
    for end in [*starts[1:], size]:  # zeros the padding after each tensor, which is sent as well
        flat[max(0, end - alignment) : end].zero_()
    for tensor, start in zip(items, starts, strict=True):
        _part(flat, start, tensor.dtype, tensor.shape).copy_(tensor)
    return flat


def packed_bytes(layout: Layout, alignment: int = ALIGNMENT) -> int:
    """Returns the number of bytes of the result of `pack` for tensors of this layout."""
    return _offsets([_size(dtype, shape) for _, dtype, shape in layout], alignment)[1]


class KeptBuffers:
    """Provides buffers for buckets in rotation; reused memory has no page faults, which would cost more than the copy.

    Args:
        count: number of buffers; 2 if one bucket is packed while another is sent.
        make: returns a new buffer with the given number of bytes.
    """

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._buffers: list[tuple[int, Any]] = [(0, None)] * count  # (bytes, buffer)
        self._make = make

    def next(self, nbytes: int) -> Any:
        """Returns the next buffer in rotation; a buffer of fewer than `nbytes` bytes is replaced by a new one."""
        size, buffer = self._buffers.pop(0)
        if size < nbytes:
            del buffer  # freed before the new buffer is allocated
            size, buffer = nbytes, self._make(nbytes)
        self._buffers.append((size, buffer))
        return buffer

    def clear(self) -> None:
        self._buffers = [(0, None)] * len(self._buffers)


def host_buffers(count: int) -> KeptBuffers:
    """Returns `count` rotating buffers on the host; each is a uint8 tensor, [bytes]."""
    return KeptBuffers(count, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def unpack(flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a packed bucket as (name, view of the bucket's memory); the inverse of `pack`."""
    starts, size = _offsets([_size(dtype, shape) for _, dtype, shape in layout])
    if size != flat.numel():
        raise ValueError(f"a bucket of {flat.numel()} bytes was to have {size}")
    return [
        (name, _part(flat, start, dtype_named(dtype), shape))
        for (name, dtype, shape), start in zip(layout, starts, strict=True)
    ]


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors]


def digest_of(data: torch.Tensor) -> str:
    """Returns the sha256 of contiguous bytes, [bytes] uint8 on any device, as hex."""
    return hashlib.sha256(data.cpu().numpy().data).hexdigest()


def check_digest(data: torch.Tensor, digest: str | None) -> None:
    """Checks received bytes against the sender's digest; None means that there is no digest.

    Raises:
        ValueError: the bytes were altered in transit.
    """
    if digest is not None and digest_of(data) != digest:
        raise ValueError(f"a bucket of {data.numel()} bytes was altered on the way: its checksum is another one")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype torch.<name>; raises a ValueError if there is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return dtype


def _part(flat: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    return flat[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))


def _size(dtype: str, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype_named(dtype).itemsize


def _offsets(sizes: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Returns the start of each tensor, and the total size including padding."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // alignment) * alignment
    return starts, end


# ---------------------------------------------------------------------- shared memory


class SharedBuffer:
    """Allocates memory, `data` [bytes] uint8, that other processes can open by `handle` while this object exists.

    Memory on the host has no name in any file system. So it is freed when the last process that has it open ends, even
    by a kill.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data: torch.Tensor
        self.handle: Handle
        self._descriptor: int | None = None
        if device.type == "cuda":
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.handle = _cuda_handle(self.data)
            return
        name = f"slimefsdp_{uuid.uuid4().hex}"
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, nbytes)
        self.data = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        self.handle = {"name": name, "pid": os.getpid(), "descriptor": self._descriptor, "bytes": nbytes}

    def close(self) -> None:
        """Prevents further opening; idempotent. The memory is freed when the last process stops using it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def opened(handle: Handle) -> torch.Tensor:
    """Opens another process's memory for reading; returns it as [bytes] uint8.

    Raises:
        OSError: the memory is not on this machine or GPU, or has been freed.
    """
    if "gpu" in handle:
        return _opened_on_cuda(handle)
    link = Path(f"/proc/{handle['pid']}/fd/{handle['descriptor']}")
    if not link.is_symlink() or f"/memfd:{handle['name']} " not in str(link.readlink()):
        raise OSError(f"process {handle['pid']} with memory {handle['name']} is not on this machine")
    descriptor = os.open(link, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, handle["bytes"]), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class OpenedBuffers:
    """Caches the opened memory of two buffers, because a sender alternates between two."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}

    def get(self, handle: Handle) -> torch.Tensor:
        key = repr(sorted(handle.items()))
        if key not in self._opened:
            while len(self._opened) > 1:
                del self._opened[next(iter(self._opened))]
            self._opened[key] = opened(handle)
        return self._opened[key]


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _cuda_handle(data: torch.Tensor) -> Handle:
    # the values that torch.multiprocessing would pickle for a tensor
    device, *parts = data.untyped_storage()._share_cuda_()
    return {
        "gpu": _gpu_name(device),
        "bytes": data.numel(),
        "parts": [part.hex() if isinstance(part, bytes) else part for part in parts],
        "are_hex": [isinstance(part, bytes) for part in parts],
        "offset": data.storage_offset(),
    }


def _opened_on_cuda(handle: Handle) -> torch.Tensor:
    indices = [index for index in range(torch.cuda.device_count()) if _gpu_name(index) == handle["gpu"]]
    if not indices:
        raise OSError(f"GPU {handle['gpu']} of the sender is not this process's")
    parts = [
        bytes.fromhex(part) if is_hex else part for part, is_hex in zip(handle["parts"], handle["are_hex"], strict=True)
    ]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(indices[0], *parts)
    except RuntimeError as error:
        raise OSError(f"the sender's memory cannot be opened: {error}") from error
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[handle["offset"] : handle["offset"] + handle["bytes"]]
