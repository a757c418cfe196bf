"""Agreement between ranks, so that no rank goes on into a collective that another one will never join."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist

from slimefsdp.errors import SlimeError, portable


def all_equal(value: str, group: dist.ProcessGroup) -> bool:
    """Collective: whether every rank brings the same value."""
    values: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return len(set(values)) == 1


def run_together(action: Callable[[], object], group: dist.ProcessGroup) -> None:
    """Collective: every rank runs `action`, itself without collectives; all raise the first error in rank order.

    A typed error names the rank it comes from, here and in `run_on_first`.
    """
    _raise_together(_error_of(action), group)


def run_on_first(action: Callable[[], object], group: dist.ProcessGroup, stream: Iterable[object] = ()) -> None:
    """Collective: rank 0 runs `action`; its error is raised by all.

    Args:
        stream: a collective iterable that `action` consumes. The other ranks keep step with it, and rank 0 finishes it
            if the action fails half-way.
    """
    error = _error_of(action) if dist.get_rank(group) == 0 else None
    for _ in stream:
        pass
    _raise_together(error, group)


def _raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    # what cannot be pickled would, inside of the collective, leave the peers waiting
    dist.all_gather_object(errors, None if error is None else portable(error), group=group)
    for rank, found in enumerate(errors):
        if found is not None:
            if error is not None and rank == dist.get_rank(group):
                found = error  # where it happened it keeps its traceback
            if isinstance(found, SlimeError) and found.rank is None:
                found.rank = dist.get_global_rank(group, rank)
            raise found


def _error_of(action: Callable[[], object]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
