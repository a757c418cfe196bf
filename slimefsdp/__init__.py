"""slimefsdp: an FSDP2 training backend for RL post-training.

Names are resolved on first use, so that importing the package, its errors or its settings costs no torch import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimefsdp.batching.plan import Plan
    from slimefsdp.config import RunConfig, load_config
    from slimefsdp.data.rollout_batch import RolloutBatch
    from slimefsdp.results import LogProbs
    from slimefsdp.trainer import Trainer

__all__ = ["LogProbs", "Plan", "RolloutBatch", "RunConfig", "Trainer", "load_config"]
__version__ = "0.1.0"

_HOME = {
    "LogProbs": "slimefsdp.results",
    "Plan": "slimefsdp.batching.plan",
    "RolloutBatch": "slimefsdp.data.rollout_batch",
    "RunConfig": "slimefsdp.config",
    "Trainer": "slimefsdp.trainer",
    "load_config": "slimefsdp.config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slimefsdp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """With the names that are not resolved yet, for completion."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
