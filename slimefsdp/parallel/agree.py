"""Agreement between ranks, so that no rank goes on into a collective that another one will never join."""

from __future__ import annotations

import torch.distributed as dist


def raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    """Collective: returns if no rank brings an error; otherwise every rank raises the first one in rank order."""
    errors: list[Exception | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(errors, error, group=group)
    for found in errors:
        if found is not None:
            raise found


def all_equal(value: str, group: dist.ProcessGroup) -> bool:
    """Collective: whether every rank brings the same value."""
    values: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return len(set(values)) == 1
