"""Import paths that earlier documents named, for one release: each gives the module's new place, and warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "actors.interrupts": "actors.signals",
    "actors.supervisor": "actors.fault_tolerance.supervisor",
    "actors.weight_transport": "actors.workers.object_store_update",
    "slimefsdp.loss": "slimefsdp.algorithms",
    "slimefsdp.loss.advantages": "slimefsdp.algorithms.advantages",
    "slimefsdp.loss.policy": "slimefsdp.algorithms.policy_losses",
    "slimefsdp.parallel": "slimefsdp.distributed",
    "slimefsdp.parallel.mesh": "slimefsdp.distributed.mesh",
    "slimefsdp.weights": "slimefsdp.weight_sync",
    "slimefsdp.weights.receive": "slimefsdp.weight_sync.receive",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in MOVED:
            return spec_from_loader(name, self)
        if name.rpartition(".")[0] in MOVED:  # Python would load a second copy of a module of the new package
            raise ModuleNotFoundError(
                f"no module {name!r}; {name.rpartition('.')[0]} is now another package", name=name
            )
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}; the old path goes in 0.2", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._own = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # importlib has put the old name's spec on the module that everybody shares
        module.__spec__, module.__loader__ = self._own


def install() -> None:
    """Has Python find the old paths."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())  # before Python looks into the new package under the old name
