"""Buckets: so much of the parameters an update computes at a time, where moments rest in fewer bytes than it needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

# few enough elements that a CPU's caches hold them, and enough to fill a GPU
BUCKET_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
OTHER_BUCKET_ELEMENTS = 2**20  # of other devices


def bucket_elements(device: torch.device) -> int:
    """Elements of a bucket on a device."""
    return BUCKET_ELEMENTS.get(device.type, OTHER_BUCKET_ELEMENTS)


def split_state(
    tensors: Sequence[torch.Tensor], step: torch.Tensor, length: int
) -> Iterator[tuple[tuple[torch.Tensor, ...], torch.Tensor]]:
    """Views of a parameter's tensors, `length` of dim 0 at a time, each with a count of steps to add 1 to.

    torch counts a step for every piece, and the parameter has one: all pieces but the last count on a copy of it.

    Args:
        tensors: as long as each other in dim 0; where that is 0, there is one piece all the same.
        step: a scalar.
    """
    pieces = list(zip(*(tensor.split(length) for tensor in tensors), strict=True))
    for number, piece in enumerate(pieces):
        yield piece, step if number == len(pieces) - 1 else step.clone()
