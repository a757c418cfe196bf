"""Describes what a checkpoint and a run that loads it must have in common, from settings and config.json alone.

Every rank compares it when it loads, and the driver, which has no torch, before a launch.
"""

from __future__ import annotations

from typing import Any

from slimefsdp.checkpoint.manifest import architecture_of
from slimefsdp.config import TrainerConfig
from slimefsdp.config.sections import AdamWSettings
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.rpc import Role

# entry of an identity that describes the base weights of a role's adapters; only ranks can compute it
BASE_WEIGHTS = {"actor": "model.path", "critic": "critic.path"}


def identity_of(config: TrainerConfig, role: Role, folder: ModelFolder) -> dict[str, Any]:
    """Returns what a checkpoint of a role and a run that loads it must have in common; without `BASE_WEIGHTS`."""
    identity: dict[str, Any] = {
        "model_type": folder.model_type,
        "vocab_size": folder.vocab_size,
        "config.json": architecture_of(folder.config),
        "master_dtype": "float64" if config.precision.compute_dtype == "float64" else "float32",
        "optim.name": config.optim.name,
        "model.frozen": sorted(config.model.frozen or ()) if role == "actor" else [],
    }
    if isinstance(config.optim, AdamWSettings) and config.optim.state_dtype != "auto":
        identity["optim.state_dtype"] = config.optim.state_dtype  # the first versions had auto alone
    # other runs have no such entries, as the first versions had none
    if config.lora.rank is not None and role != "ref":
        identity |= {
            "lora.rank": config.lora.rank,
            "lora.alpha": config.lora.alpha,
            "lora.targets": sorted(config.lora.targets),
            "precision.compute_dtype": config.precision.compute_dtype,  # in which the base weights are stored
        }
    return identity
