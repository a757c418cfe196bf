"""Describes what a checkpoint and a run that loads it must have in common, from settings and config.json alone.

Every rank compares these values when it loads a checkpoint; the driver, which has no torch, does so before a launch.
"""

from __future__ import annotations

from typing import Any

from slimefsdp.checkpoint.manifest import architecture_of
from slimefsdp.config import TrainerConfig
from slimefsdp.config.sections import AdamWSettings
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.rpc import Role

# role -> the identity's entry for the base weights of the role's adapters, which only ranks can compute
BASE_WEIGHTS = {"actor": "model.path", "critic": "critic.path"}


def identity_of(config: TrainerConfig, role: Role, folder: ModelFolder) -> dict[str, Any]:
    """Returns the values that a checkpoint and a run that loads it must have in common, except for `BASE_WEIGHTS`."""
    identity: dict[str, Any] = {
        "model_type": folder.model_type,
        "vocab_size": folder.vocab_size,
        "config.json": architecture_of(folder.config),
        "master_dtype": "float64" if config.precision.compute_dtype == "float64" else "float32",
        "optim.name": config.optim.name,
        "model.frozen": sorted(config.model.frozen or ()) if role == "actor" else [],
    }
    if isinstance(config.optim, AdamWSettings) and config.optim.state_dtype != "auto":
        identity["optim.state_dtype"] = config.optim.state_dtype  # the first versions had only auto, and no such entry
    # runs without adapters have no such entries, like checkpoints of the first versions
    if config.lora.rank is not None and role != "ref":
        identity |= {
            "lora.rank": config.lora.rank,
            "lora.alpha": config.lora.alpha,
            "lora.targets": sorted(config.lora.targets),
            "precision.compute_dtype": config.precision.compute_dtype,  # in which the base weights are stored
        }
    return identity
