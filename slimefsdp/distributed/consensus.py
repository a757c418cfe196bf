"""Lets ranks agree on values and errors, so that no rank enters a collective that another one will never join."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device

from slimefsdp.errors import SlimeError, portable


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collective: returns the values of all ranks, in rank order; they must be picklable."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_equal(value: str, group: dist.ProcessGroup) -> bool:
    """Collective: returns whether the value is the same on every rank; ranks exchange only its sha256."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), dtype=np.int64)
    largest, inverted_smallest = np.split(_largest([*digest, *~digest], group), 2)
    return bool((largest == ~inverted_smallest).all())


def any_true(value: bool, group: dist.ProcessGroup) -> bool:
    return bool(_largest([int(value)], group)[0])


def _largest(values: Sequence[int], group: dist.ProcessGroup) -> np.ndarray:
    """Collective: returns the elementwise maximum over the ranks, int64."""
    largest = torch.tensor(np.array(values, dtype=np.int64), device=_get_object_coll_device(group))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.cpu().numpy()


def run_together(action: Callable[[], object], group: dist.ProcessGroup) -> None:
    """Collective: runs `action`, which has no collectives, on every rank; all raise the first error in rank order.

    Typed errors name the rank that raised them, here and in `run_on_first`.
    """
    error = error_of(action)
    if any_true(error is not None, group):
        raise_first(gathered(sendable(error), group), error, group)


def run_on_first(action: Callable[[], object], group: dist.ProcessGroup, stream: Iterable[object] = ()) -> None:
    """Collective: runs `action` on rank 0; all ranks raise its error.

    Args:
        stream: a collective iterable that `action` consumes. The other ranks iterate over it at the same time, and rank
            0 finishes the iteration if the action fails.
    """
    error = error_of(action) if dist.get_rank(group) == 0 else None
    deque(stream, maxlen=0)  # frees each item before the next one is made
    if any_true(error is not None, group):
        raise_first(gathered(sendable(error), group), error, group)


def sendable(error: Exception | None) -> Exception | None:
    """Returns an error that can be pickled; one that cannot would leave the peers waiting in the collective."""
    return None if error is None else portable(error)


def raise_first(errors: Sequence[Exception | None], own: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises the first error in rank order, the same on every rank.

    Args:
        errors: the gathered errors of all ranks; None for a rank without an error.
        own: this rank's error.
    """
    for rank, error in enumerate(errors):
        if error is not None:
            if own is not None and rank == dist.get_rank(group):
                error = own  # on the rank that raised it, the original keeps its traceback
            if isinstance(error, SlimeError) and error.rank is None:
                error.rank = dist.get_global_rank(group, rank)
            raise error


def error_of(action: Callable[[], object]) -> Exception | None:
    """Runs an action and returns the error that it raises; None if it raises none."""
    try:
        action()
    except Exception as error:
        return error
    return None
