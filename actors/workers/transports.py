"""Chooses the transport of a weight update. Each transport is a module of its own and has one line here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.workers.broadcast_update import BroadcastUpdate
from actors.workers.disk_update import DiskUpdate
from actors.workers.ipc_update import IpcUpdate
from actors.workers.object_store_update import ObjectStoreUpdate
from actors.workers.weight_update import WeightUpdate

TRANSPORTS: dict[str, type[WeightUpdate]] = {
    "object_store": ObjectStoreUpdate,
    "broadcast": BroadcastUpdate,
    "ipc": IpcUpdate,
    "disk": DiskUpdate,
}
"""The values of `rollout.weight_transport` but `auto`."""


def transport_to(receivers: Sequence[Any], wanted: str) -> type[WeightUpdate]:
    """Returns the transport to these Ray actors.

    Args:
        wanted: a name in `TRANSPORTS`, for engines. Plain receivers, such as a reference group's ranks, lack its call
            and take weights from the object store.
    """
    kind = TRANSPORTS[wanted]
    return kind if all(hasattr(receiver, kind.call) for receiver in receivers) else ObjectStoreUpdate
