"""Engines that are replaced when one is lost, and get the policy's weights before they serve again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from actors.rollout.engine import EnginePool, Sampled
from actors.supervisor import LOST, MAX_WITHOUT_PROGRESS, SupervisedGroup
from slimefsdp.errors import SlimeError, SyncError


class SupervisedEngines(EnginePool):
    """An `EnginePool` that starts all its engines anew after a loss, at most cluster.max_restarts times.

    What they draw follows from the seed and the weights, so a call that is made again draws the same; with
    rollout.sync_interval_steps > 1 the weights may be newer than those of the engines that were lost.
    """

    _group: SupervisedGroup | None = None  # that the weights come from
    _restarts = 0
    _in_a_row = 0

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
            self._in_a_row = 0
            return drawn

    def _replace(self, error: SlimeError) -> None:
        while True:
            self._restarts += 1
            self._in_a_row += 1
            if self._restarts > self._config.cluster.max_restarts or self._in_a_row > MAX_WITHOUT_PROGRESS:
                raise error
            print(f"engines replaced: {error.message}", file=sys.stderr, flush=True)
            try:
                self.relaunch()
            except LOST as another:
                error = another
                continue
            return
