"""The settings of a run: pydantic models of each section, and how they are read from YAML and overrides.

Public names are imported at their first use, so that other modules of this package can be used without importing
pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimefsdp.config.run import RunConfig, config_from_dict, load_config
    from slimefsdp.config.trainer import TrainerConfig

__all__ = ["RunConfig", "TrainerConfig", "config_from_dict", "load_config"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'slimefsdp.config' has no attribute {name!r}")
    module = "trainer" if name == "TrainerConfig" else "run"
    return getattr(import_module(f"slimefsdp.config.{module}"), name)
