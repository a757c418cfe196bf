"""The calls that all ranks of a group answer."""

from __future__ import annotations

from actors.workers.group_calls import GroupCalls

RPCS = tuple(
    name
    for name in vars(GroupCalls)
    if not name.startswith("_") and not name.endswith("_async") and name != "adapter"  # which gives a handle
)
