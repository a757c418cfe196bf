"""Sends new weights to a pool's engines, replaces lost engines, and has colocated engines and ranks take turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from actors.engines.processes import ColocatedRanks, EngineProcesses
from actors.engines.requests import EngineRequests
from actors.fault_tolerance.recovery import LOST, Restarts
from slimefsdp.errors import SlimeError, StateError, SyncError
from slimefsdp.results import FailedReceiver, SyncReport


class EngineUpdates(EngineRequests):
    """Sends new weights to the engines, and remembers which version of the weights the engines have.

    Args:
        restarts: the budget for replacing engines; None means that lost engines are not replaced.
    """

    def __init__(self, processes: EngineProcesses, restarts: Restarts | None) -> None:
        super().__init__(processes)
        self._restarts = restarts
        self._group: Any = None  # the trainer group that sends the weights
        self._version: int | None = None  # version of the engines' weights
        self._replacing = threading.RLock()  # one thread may update while another thread samples
        self._updating = threading.RLock()
        self._sending_s = 0.0  # time spent on sending weights to colocated engines, over all turns
        self._updates = 0  # number of beginnings and ends of updates so far

    def _updated_since(self, updates: int) -> bool:
        """Waits for the end of a running update; returns whether `_updates` has changed from the value `updates`."""
        with self._updating:  # an engine that failed in an update has no weights until the update ends
            return self._updates != updates

    def update_from(self, group: Any, *, aborts: bool = False) -> int:
        """Sends a trainer group's weights to the engines, and returns the version of these weights.

        With this call, the turn of colocated engines begins.

        Args:
            aborts: whether running samples are aborted and drawn again with the new weights; otherwise these samples
                continue with the new weights.

        Raises:
            SyncError: an engine refused, died, or did not answer within cluster.sync_timeout_s. All other engines have
                the weights; the failed engine samples again after its next update.
        """
        self._processes.require_running("update_from")
        if not hasattr(group, "update_weights"):
            problem = f"group is a {type(group).__name__}, which has no weights to send"
            raise StateError(problem, field="group", hint="give a WorkerGroup or a SupervisedGroup")
        self._group = group
        with self._updating:
            self._updates += 1
            if self._processes.colocated is not None:
                self._processes.colocated.keep_parameters_only()
            if aborts:
                self._processes.may_ask.clear()
            try:
                if aborts:
                    with suppress(*LOST):  # the update below also meets the lost engine, and handles the loss
                        self.abort()
                self._version = self._update(group, range(len(self._processes.engines)))
            finally:
                self._processes.may_ask.set()
            self._updates += 1
        return self._version

    def _update(self, group: Any, indices: Sequence[int]) -> int:
        """Sends the weights to the engines at `indices`, and returns the version of the weights.

        If the pool replaces lost engines, an engine that fails is replaced; then only the new engine is sent weights.
        """
        if self._restarts is None:
            report = self._delivered(group, indices)
            for failure in report.failed:
                raise failure.error
            return report.version
        version, wanted = None, set(indices)
        while True:
            engines = list(self._processes.engines)
            try:
                report = self._delivered(group, indices)
            except SyncError as error:  # the update failed on all engines
                with self._replacing:
                    lost = self._processes.lost()
                    if lost:
                        self._replace(lost, error)
                        wanted.update(lost)
                        indices = sorted({*indices, *lost})
                    elif self._processes.engines == engines:  # otherwise another thread replaced a lost engine
                        raise
                continue
            if version not in (None, report.version):  # the engines that were sent weights before have an older version
                version, indices = None, sorted(wanted)
                continue
            version, indices = report.version, [failure.receiver for failure in report.failed]
            if not indices:
                return version
            with self._replacing:
                for failure in report.failed:
                    if self._processes.engines[failure.receiver] is engines[failure.receiver]:
                        self._replace([failure.receiver], failure.error)

    def _replace_lost(self, index: int, engine: Any, error: SlimeError) -> None:
        """Replaces a lost engine, unless another thread has replaced it already, and sends weights to the new engine.

        If the policy has newer weights than the engines, all engines get the newer weights. With
        rollout.max_staleness, only the new engine gets them.

        Raises:
            SlimeError: `error`, if lost engines are not replaced or the budget is spent.
        """
        if self._restarts is None or self._group is None:
            raise error
        with self._replacing:
            if self._processes.engines[index] is engine:
                self._replace([index], error)
            version = self._update(self._group, [index])
        if version != self._version and not self._processes.config.rollout.max_staleness:
            self.update_from(self._group)

    def _replace(self, indices: Sequence[int], error: SlimeError) -> None:
        assert self._restarts is not None
        self._restarts.start_another(error, lambda: self._processes.restart(indices), tuple(indices))

    def _delivered(self, group: Any, indices: Sequence[int]) -> SyncReport:
        """Sends weights to these engines, which may be asleep; the report has a failed engine's index in the pool."""
        if self._processes.colocated is None:
            return self._sent(group, indices)
        return self._sent_to_sleepers(self._processes.colocated, group, indices)

    def _sent(self, group: Any, indices: Sequence[int]) -> SyncReport:
        receivers = [self._processes.engines[index] for index in indices]
        report: SyncReport = group.update_weights(receivers, drop_failed=True)
        failed = [FailedReceiver(indices[failure.receiver], failure.error) for failure in report.failed]
        for failure in failed:
            failure.error.rank = failure.receiver
        return replace(report, failed=tuple(failed))

    # ------------------------------------------------------------------ turns with the trainer

    def take_turn(self, seconds: dict[str, float]) -> None:
        """Wakes colocated engines, sends them weights and puts the trainer to sleep; does nothing for awake engines.

        Args:
            seconds: the time of sending weights is added to the entry `sync`, and the rest to `turn`.

        Raises:
            As `update_from`.
        """
        ranks = self._colocated_ranks("take_turn")
        if not self._processes.are_asleep:
            return
        began, sent_before = time.perf_counter(), self._sending_s
        self.update_from(ranks.group)
        sending_s = self._sending_s - sent_before
        seconds["sync"] = seconds.get("sync", 0.0) + sending_s
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began - sending_s

    def sleep(self) -> None:
        """Has colocated engines free their devices, by which the engines lose their weights. Idempotent.

        An engine that is lost, or does not answer, is ended; the next update reports or replaces this engine.

        Raises:
            SyncError: an engine refused.
        """
        if self._processes.is_ended:  # a supervisor that restarts ranks calls this, also after `shutdown`
            return
        self._colocated_ranks("sleep")
        if not self._processes.are_asleep:
            self._processes.put_to_sleep(range(len(self._processes.engines)))
            self._processes.are_asleep = True

    def end_turn(self, seconds: dict[str, float], *, wakes_trainer: bool) -> None:
        """Puts colocated engines to sleep, and may wake the trainer; adds the time to `seconds["turn"]`."""
        ranks = self._colocated_ranks("end_turn")
        began = time.perf_counter()
        self.sleep()
        if wakes_trainer:
            ranks.wake_up()
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began

    def _colocated_ranks(self, name: str) -> ColocatedRanks:
        self._processes.require_running(name)
        if self._processes.colocated is None:
            problem = f"{name}() of engines that have devices of their own"
            raise StateError(problem, field=name, hint="set rollout.placement=colocated, or do not call it")
        return self._processes.colocated

    def _sent_to_sleepers(self, ranks: ColocatedRanks, group: Any, indices: Sequence[int]) -> SyncReport:
        """Sends weights to colocated engines. Once every engine has the weights, they take memory for their caches."""
        while True:
            self._processes.are_asleep = False
            try:
                self._processes.wake_up(indices, ("weights",))
                began = time.perf_counter()
                try:
                    report = self._sent(group, indices)
                finally:
                    self._sending_s += time.perf_counter() - began
                ranks.free_parameters()
            except SyncError:
                if not self._processes.are_asleep:
                    raise
            if not self._processes.are_asleep:
                if not report.failed:
                    self._processes.wake_up(range(len(self._processes.engines)), ("kv_cache",))
                return report
            # Ranks were lost during the update; the supervisor put all engines to sleep before it started new ranks.
            indices = range(len(self._processes.engines))
            ranks.keep_parameters_only()
