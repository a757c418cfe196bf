"""slimefsdp: an FSDP2 training backend for RL post-training.

Names are resolved on first use, so that importing the package, its errors or its settings does not import torch. The
names that need Ray (`connect`, groups of workers, engines) are defined in `actors`.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.cluster.connect import connect
    from actors.engines.pool import EnginePool
    from actors.fault_tolerance.group_host import launch_named
    from actors.fault_tolerance.supervisor import SupervisedGroup
    from actors.rollout.environment import Environment, Observation, Prompt, StepResult
    from actors.rollout.prompts import PromptStream
    from actors.rollout.records import read_records
    from actors.workers.group_calls import submit
    from actors.workers.worker_group import WorkerGroup
    from slimefsdp.batching.plan import Plan
    from slimefsdp.config import RunConfig, load_config
    from slimefsdp.data.rollout_batch import RolloutBatch, Sample
    from slimefsdp.results import LogProbs
    from slimefsdp.trainer import Trainer

__all__ = [
    "EnginePool", "Environment", "LogProbs", "Observation", "Plan", "Prompt", "PromptStream",
    "RolloutBatch", "RunConfig", "Sample", "StepResult", "SupervisedGroup", "Trainer", "WorkerGroup", "connect",
    "launch_named", "load_config", "read_records", "submit",
]  # fmt: skip
__version__ = "0.1.0"

_HOME = {
    "EnginePool": "actors.engines.pool",
    "Environment": "actors.rollout.environment",
    "LogProbs": "slimefsdp.results",
    "Observation": "actors.rollout.environment",
    "Plan": "slimefsdp.batching.plan",
    "Prompt": "actors.rollout.environment",
    "PromptStream": "actors.rollout.prompts",
    "RolloutBatch": "slimefsdp.data.rollout_batch",
    "RunConfig": "slimefsdp.config",
    "Sample": "slimefsdp.data.rollout_batch",
    "StepResult": "actors.rollout.environment",
    "SupervisedGroup": "actors.fault_tolerance.supervisor",
    "Trainer": "slimefsdp.trainer",
    "WorkerGroup": "actors.workers.worker_group",
    "connect": "actors.cluster.connect",
    "launch_named": "actors.fault_tolerance.group_host",
    "load_config": "slimefsdp.config",
    "read_records": "actors.rollout.records",
    "submit": "actors.workers.group_calls",
}


# transformers imports torchao if it is installed, and each process would warn of libraries that are not used here
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'slimefsdp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Lists all public names, including those not resolved yet, for completion."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
