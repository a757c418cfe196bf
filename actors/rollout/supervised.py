"""Engines that are replaced when one is lost, and get the policy's weights before they serve again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.fault_tolerance.restarts import LOST, Restarts
from actors.rollout.engine import EnginePool, Sampled
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, SyncError


class RestartingEngines(EnginePool):
    """An `EnginePool` that starts all its engines anew after a loss, at most cluster.max_restarts times.

    What they draw follows from the seed and the weights, so a call that is made again draws the same; with
    rollout.sync_interval_steps > 1 the weights may be newer than those of the engines that were lost.
    """

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._group: Any = None  # that the weights come from
        self._restarts = Restarts(config.cluster.max_restarts, "engines")

    def update_from(self, group: Any) -> int:
        """As of `EnginePool`."""
        self._group = group
        while True:
            try:
                version = super().update_from(group)
            except SyncError as error:
                if self.are_alive():
                    raise
                self._replace(error)
                continue
            return version

    def generate(
        self, prompts: Sequence[Any], *, samples_per_prompt: int, seed: Sequence[int], greedy: bool = False
    ) -> tuple[int, list[Sampled]]:
        """As of `EnginePool`."""
        while True:
            try:
                drawn = super().generate(prompts, samples_per_prompt=samples_per_prompt, seed=seed, greedy=greedy)
            except LOST as error:
                if self._group is None:
                    raise
                self._replace(error)
                self.update_from(self._group)
                continue
            self._restarts.progress()
            return drawn

    def _replace(self, error: SlimeError) -> None:
        while True:
            self._restarts.spend(error)
            try:
                self.relaunch()
                return
            except LOST as another:
                error = another
