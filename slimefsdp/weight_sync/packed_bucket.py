"""The form of a bucket on its way to an engine: one tensor of bytes, and where in it each of the bucket's tensors lies.

The workers of a rollout server with an environment of its own import this file, so it needs torch alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

ALIGNMENT = 16  # bytes: a view of bytes as another dtype must begin at a multiple of its size

Layout = Sequence[tuple[str, str, Sequence[int]]]
"""Name, dtype such as "float32", and shape of each tensor of a bucket; both sides know it."""


def pack(
    tensors: Iterable[torch.Tensor], *, alignment: int = ALIGNMENT, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The bytes of tensors of one device, [bytes] uint8, each beginning at a multiple of `alignment`.

    Args:
        into: memory for them, [`packed_bytes` or more] uint8; None: new memory.
    """
    held = list(tensors)
    starts, size = _places([tensor.numel() * tensor.element_size() for tensor in held], alignment)
    if into is None:
        into = torch.empty(size, dtype=torch.uint8, device=held[0].device if held else "cpu")
    flat = into[:size]
    for end in [*starts[1:], size]:  # the padding behind each: it travels too
        flat[max(0, end - alignment) : end].zero_()
    for tensor, start in zip(held, starts, strict=True):
        _part(flat, start, tensor.dtype, tensor.shape).copy_(tensor)
    return flat


def packed_bytes(layout: Layout, alignment: int = ALIGNMENT) -> int:
    """Returns how long `pack` makes such tensors."""
    return _places([_size(dtype, shape) for _, dtype, shape in layout], alignment)[1]


class KeptBuffers:
    """Memory for buckets, by turns; kept, since the pages of new memory cost several times what a copy into it does.

    Args:
        count: of the buffers; two, where a bucket is packed while the one before is on its way.
        make: a new one of so many bytes.
    """

    def __init__(self, count: int, make: Callable[[int], Any]) -> None:
        self._held: list[tuple[int, Any]] = [(0, None)] * count
        self._make = make

    def next(self, nbytes: int) -> Any:
        """The one whose turn it is, of `nbytes` or more."""
        size, buffer = self._held.pop(0)
        if size < nbytes:
            del buffer  # before there is another one
            size, buffer = nbytes, self._make(nbytes)
        self._held.append((size, buffer))
        return buffer

    def clear(self) -> None:
        """Keeps none, until the next is asked for."""
        self._held = [(0, None)] * len(self._held)


def host_buffers(count: int) -> KeptBuffers:
    """[bytes] uint8 tensors each."""
    return KeptBuffers(count, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))


def unpack(flat: torch.Tensor, layout: Layout) -> list[tuple[str, torch.Tensor]]:
    """The inverse of `pack`: views of the same memory, by name."""
    starts, size = _places([_size(dtype, shape) for _, dtype, shape in layout])
    if size != flat.numel():
        raise ValueError(f"a bucket of {flat.numel()} bytes was to have {size}")
    return [
        (name, _part(flat, start, dtype_named(dtype), shape))
        for (name, dtype, shape), start in zip(layout, starts, strict=True)
    ]


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Layout:
    """Returns what `unpack` needs to know of them."""
    return [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors]


def digest_of(data: torch.Tensor) -> str:
    """The sha256 of contiguous bytes, [bytes] uint8 on any device, in hex."""
    return hashlib.sha256(data.cpu().numpy().data).hexdigest()


def check_digest(data: torch.Tensor, digest: str | None) -> None:
    """Compares bytes that came with the digest that came with them, where one did.

    Raises:
        ValueError: they were altered on the way.
    """
    if digest is not None and digest_of(data) != digest:
        raise ValueError(f"a bucket of {data.numel()} bytes was altered on the way: its checksum is another one")


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


def _places(sizes: Sequence[int], alignment: int = ALIGNMENT) -> tuple[list[int], int]:
    """Returns where each begins, and where the last one ends, with its padding."""
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += -(-size // alignment) * alignment
    return starts, end
