"""Calls that create, delete and list the adapters of one base model."""

from __future__ import annotations

from slimefsdp.calls.base import Calls
from slimefsdp.errors import ConfigError
from slimefsdp.results import AdapterInfo
from slimefsdp.rpc import call, check_adapter_name, check_new_adapter


class AdapterCalls(Calls):
    """Calls for the adapters of an actor with `lora.rank`."""

    @call("actor", changes_state=True, adapter="by_name", check=check_new_adapter)
    def create_adapter(
        self, name: str, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> None:
        """Creates another adapter on the same base with new weights, and makes it the current one.

        Args:
            rank: at most lora.rank, which is the default.
            alpha: default: lora.alpha.
            seed: the seed of A's random weights; default: run.seed.

        Raises:
            ConfigError: the run has no adapters, or a value is out of range. StateError: the name is taken.
            ResourceError: the host has no memory for the adapter that was current before.
        """
        adapters, config = self._require_adapters("create_adapter"), self._state.config
        assert config.lora.rank is not None
        if rank is not None and rank > config.lora.rank:
            problem = f"rank={rank} of an adapter is more than lora.rank={config.lora.rank}, for which there is room"
            raise ConfigError(
                problem, field="rank", hint="choose a smaller one, or start the run with a larger lora.rank"
            )
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.create(
                name,
                rank or config.lora.rank,
                alpha or config.lora.alpha,
                config.run.seed if seed is None else seed,
            )

    @call("actor", changes_state=True, adapter="by_name", check=check_adapter_name)
    def delete_adapter(self, name: str) -> None:
        """Deletes an adapter; its checkpoints and exports stay on disk.

        Raises:
            StateError: there is no adapter of this name, or it is the run's own.
            ConfigError: the run has no adapters, or the name is not valid.
        """
        adapters = self._require_adapters("delete_adapter")
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.delete(name)

    @call("actor", adapter="any")
    def adapters(self) -> list[AdapterInfo]:
        """Lists all adapters in the order of their creation.

        Raises:
            ConfigError: the run has no adapters.
        """
        return self._require_adapters("adapters").listed()
