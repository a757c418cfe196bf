"""Packs the tensors of a bucket into one tensor of bytes to send to an engine, and unpacks them.

Workers of rollout servers, which have their own environment, import this module, so it may import only torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

ALIGNMENT = 16  # bytes; a view of bytes as another dtype must start at a multiple of the element size

Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype such as "float32", and shape of each tensor of a bucket; known to sender and receiver."""


def pack(
    tensors: Iterable[torch.Tensor], *, alignment: int = ALIGNMENT, into: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the bytes of tensors of one device, [bytes] uint8; each starts at a multiple of `alignment`.

    Args:
        into: memory for the result, uint8, at least `packed_bytes` long; None: new memory.
    """
    items = list(tensors)
    starts, size = _offsets([tensor.numel() * tensor.element_size() for tensor in items], alignment)
    if into is None:
        into = torch.empty(size, dtype=torch.uint8, device=items[0].device if items else "cpu")
    flat = into[:size]
    for end in [*starts[1:], size]:  # clears the padding after each tensor, which is sent too
        flat[max(0, end - alignment) : end].zero_()
    for tensor, start in zip(items, starts, strict=True):
        _part(flat, start, tensor.dtype, tensor.shape).copy_(tensor)
    return flat


def packed_bytes(layout: Layout, alignment: int = ALIGNMENT) -> int:
    """Returns the number of bytes of the result of `pack` for tensors of this layout."""
    return _offsets([_size(dtype, shape) for _, dtype, shape in layout], alignment)[1]


class KeptBuffers:
    """Provides buffers for buckets in rotation; reusing memory avoids page faults, which cost more than the copy.

    Args:
        count: number of buffers; two, if a bucket is packed while the one before is being sent.
        make: makes a new buffer with the given number of bytes.
    """

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._buffers: list[tuple[int, Any]] = [(0, None)] * count  # (bytes, buffer)
        self._make = make

    def next(self, nbytes: int) -> Any:
        """Returns the next buffer in rotation, replaced by a new one if it has fewer than `nbytes`."""
        size, buffer = self._buffers.pop(0)
        if size < nbytes:
            del buffer  # frees the old one before the new one is allocated
            size, buffer = nbytes, self._make(nbytes)
        self._buffers.append((size, buffer))
        return buffer

    def clear(self) -> None:
        self._buffers = [(0, None)] * len(self._buffers)


def host_buffers(count: int) -> KeptBuffers:
    """Returns `count` rotating buffers on the host; each is a uint8 tensor, [bytes]."""
    return KeptBuffers(count, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def unpack(flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """Returns the tensors of a packed bucket as (name, view of the same memory); the inverse of `pack`."""
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
    """Compares received bytes with the sender's digest; None: there is nothing to compare.

    Raises:
        ValueError: the bytes were altered in transit.
    """
    if digest is not None and digest_of(data) != digest:
        raise ValueError(f"a bucket of {data.numel()} bytes was altered on the way: its checksum is another one")


def dtype_named(name: str) -> torch.dtype:
    """Returns the dtype torch.<name>.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
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
