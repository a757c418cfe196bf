"""slimefsdp: an FSDP2 training backend for RL post-training.

Names are resolved on first use, so that importing the package, its errors or its settings costs no torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig, load_config
    from slimefsdp.data.plan import Plan
    from slimefsdp.data.rollout import RolloutBatch
    from slimefsdp.reports import LogProbs
    from slimefsdp.trainer import Trainer

__all__ = ["LogProbs", "Plan", "RolloutBatch", "RunConfig", "Trainer", "load_config"]
__version__ = "0.1.0"

_HOME = {
    "LogProbs": "slimefsdp.reports",
    "Plan": "slimefsdp.data.plan",
    "RolloutBatch": "slimefsdp.data.rollout",
    "RunConfig": "slimefsdp.config",
    "Trainer": "slimefsdp.trainer",
    "load_config": "slimefsdp.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slimefsdp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
