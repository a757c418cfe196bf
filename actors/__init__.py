"""The part of slimefsdp that uses Ray: worker processes, the driver's handles on them, rollouts and the command line.

Names are imported on first use, since `connect` has to set environment variables before ray is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.cluster.connect import connect
    from actors.engines.pool import EnginePool
    from actors.fault_tolerance.group_host import launch_named
    from actors.fault_tolerance.supervisor import SupervisedGroup
    from actors.workers.group_calls import submit
    from actors.workers.worker_group import WorkerGroup

__all__ = ["EnginePool", "SupervisedGroup", "WorkerGroup", "connect", "launch_named", "submit"]

_HOME = {
    "EnginePool": "actors.engines.pool",
    "SupervisedGroup": "actors.fault_tolerance.supervisor",
    "WorkerGroup": "actors.workers.worker_group",
    "connect": "actors.cluster.connect",
    "launch_named": "actors.fault_tolerance.group_host",
    "submit": "actors.workers.group_calls",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'actors' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Lists all public names, including those not imported yet, so that interactive completion offers them."""
    return sorted({*globals(), *__all__})
