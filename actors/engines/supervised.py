"""Engines that are replaced when one is lost, and get the policy's weights before they serve again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

from actors.engines.pool import EnginePool, SampledResponse
from actors.engines.protocol import Request
from actors.fault_tolerance.recovery import LOST, Restarts
from slimefsdp.config import RunConfig
from slimefsdp.errors import EngineError, SlimeError, StateError, SyncError


class RestartingEngines(EnginePool):
    """An `EnginePool` that starts an engine anew when it is lost: at most cluster.max_restarts times in all, and three
    times in a row. It does so from the first `update_from` on, which says where the weights come from.

    What engines draw follows from the seed and the weights, so what was lost is drawn again as it was. Where the policy
    has gone on since the engines had its weights (rollout.sync_interval_steps above 1), all of them get its present
    ones, and all samples of the call are drawn from these; under rollout.max_staleness the new engine alone does.
    """

    def __init__(self, config: RunConfig, beside: Any = None) -> None:
        super().__init__(config, beside)
        self._group: Any = None  # that the weights come from
        self._version: int | None = None  # of the engines' weights
        self._restarts = Restarts(config.cluster.max_restarts, "engines")
        self._lock = threading.RLock()  # of replacing: one thread may update while another samples
        self._updating = threading.RLock()
        self._updates = 0  # counted when they begin and when they have ended

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        """As of `EnginePool`."""
        self._group = group
        with self._updating:
            self._updates += 1
            self._version = super().update_from(group, aborts=aborts)
            self._updates += 1
        return self._version

    def _encoded(self, method: Literal["encode", "encode_observations"], prompts: Sequence[Any]) -> list[list[int]]:
        """As of `EnginePool`; the engine that is asked is replaced where it is lost."""
        while True:
            engine = self._engines[0]
            try:
                return super()._encoded(method, prompts)
            except LOST as error:
                self._after_loss(0, engine, error)

    def draw(
        self,
        requests: Sequence[Request],
        each: Callable[[SampledResponse], None] | None = None,
        *,
        may_mix: bool = False,
    ) -> tuple[int, list[SampledResponse]]:
        """As of `EnginePool`."""
        while True:
            updates = self._updates
            try:
                drawn = super().draw(requests, each, may_mix=may_mix)
            except StateError:
                with self._updating:  # an engine that failed in one has no weights until it ends
                    if self._updates == updates:
                        raise
                continue  # other weights came meanwhile
            self._restarts.progress()
            return drawn

    def _update(self, group: Any, indices: Sequence[int]) -> int:
        """As of `EnginePool`; engines that failed are replaced, and sent the weights by themselves."""
        version, wanted = None, set(indices)
        while True:
            engines = self.receivers
            try:
                report = self._delivered(group, indices)
            except SyncError as error:  # of all of them
                with self._lock:
                    lost = self.dead()
                    if lost:
                        self._replace(lost, error)
                        wanted.update(lost)
                        indices = sorted({*indices, *lost})
                    elif self.receivers == engines:  # else one was replaced while it was sent to
                        raise
                continue
            if version not in (None, report.version):  # the others are of an earlier one
                version, indices = None, sorted(wanted)
                continue
            version, indices = report.version, [one.receiver for one in report.failed]
            if not indices:
                return version
            with self._lock:
                for one in report.failed:
                    if self._engines[one.receiver] is engines[one.receiver]:
                        self._replace([one.receiver], one.error)

    def _after_loss(self, index: int, engine: Any, error: SlimeError) -> None:
        if self._group is None:
            raise error
        with self._lock:
            if self._engines[index] is engine:
                self._replace([index], error)
            version = self._update(self._group, [index])
        if version != self._version and not self._config.rollout.max_staleness:
            self.update_from(self._group)

    def _replace(self, indices: Sequence[int], error: SlimeError) -> None:
        while True:
            self._restarts.spend(error, tuple(indices))
            try:
                self.relaunch(indices)
                return
            except (*LOST, EngineError) as another:  # it did not start
                error = another
