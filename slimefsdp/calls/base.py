"""The base of the classes with calls; subclasses decide where a call's body runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError
from slimefsdp.rpc import Arguments, Call
from slimefsdp.training.prepare import PreparedBatch

if TYPE_CHECKING:
    from slimefsdp.training.adapters import Adapters
    from slimefsdp.training.step import RankState
    from slimefsdp.weight_sync.receive import WeightReceiver


class Calls:
    """Base of the classes whose methods are calls.

    `Trainer` runs the bodies, which use the attributes declared here. A driver's handle has none of them: its `_make`
    sends the call to the ranks.
    """

    _state: RankState
    _adapters: Adapters | None  # None: the run has no adapters
    receiver: WeightReceiver  # of another group's weights, in a reference group
    _frozen_source: str  # changes when weights that are not trained may have changed

    def _make(self, call: Call, arguments: Arguments) -> Any:
        raise NotImplementedError

    def _require_adapters(self, name: str) -> Adapters:
        """Returns the adapters.

        Raises:
            ConfigError: the run has no adapters.
        """
        if self._adapters is None:
            raise ConfigError(f"{name}() on a run without adapters", field="lora.rank", hint="set lora.rank")
        return self._adapters


def planned(batch: RolloutBatch) -> PreparedBatch:
    """Types the batch of a call as its body receives it, since `_make` has checked and planned it."""
    return cast(PreparedBatch, batch)
