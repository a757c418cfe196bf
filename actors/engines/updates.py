"""New weights for the engines of a pool, their turns with the trainer, and other engines for those that are lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from actors.engines.colocated import RanksBeside
from actors.engines.processes import EngineProcesses
from actors.fault_tolerance.recovery import LOST, Restarts
from slimefsdp.errors import SlimeError, StateError, SyncError
from slimefsdp.results import FailedReceiver, SyncReport


class EngineUpdates:
    """Keeps track of which weights the engines have, and sends new ones.

    Args:
        restarts: of engines; None: none that is lost is replaced.
    """

    def __init__(self, processes: EngineProcesses, restarts: Restarts | None) -> None:
        self.restarts = restarts
        self._processes = processes
        self._group: Any = None  # that the weights come from
        self._version: int | None = None  # of the engines' weights
        self._replacing = threading.RLock()  # one thread may update while another samples
        self._updating = threading.RLock()
        self._count = 0  # of updates, counted when they begin and when they have ended

    def count(self) -> int:
        """Returns a number that is another one once an update has begun or ended since."""
        return self._count

    def came_since(self, count: int) -> bool:
        """Returns whether an update came since `count` returned this; waits for the end of one that goes on."""
        with self._updating:  # an engine that failed in one has no weights until it ends
            return self._count != count

    def update_from(self, group: Any, abort: Callable[[], None] | None = None) -> int:
        """Does as `EnginePool.update_from`.

        Args:
            abort: ends what is being sampled, before the update; None: that goes on.
        """
        self._processes.require_running("update_from")
        if not hasattr(group, "update_weights"):
            problem = f"group is a {type(group).__name__}, which has no weights to send"
            raise StateError(problem, field="group", hint="give a WorkerGroup or a SupervisedGroup")
        self._group = group
        with self._updating:
            self._count += 1
            if self._processes.beside is not None:
                self._processes.beside.keep_parameters_only()
            if abort is not None:
                self._processes.may_ask.clear()
            try:
                if abort is not None:
                    with suppress(*LOST):  # the update finds out
                        abort()
                self._version = self._update(group, range(len(self._processes.engines)))
            finally:
                self._processes.may_ask.set()
            self._count += 1
        return self._version

    def _update(self, group: Any, indices: Sequence[int]) -> int:
        """Sends these engines the weights; returns their version.

        Engines that fail are replaced, where engines are restarted, and sent the weights by themselves.
        """
        if self.restarts is None:
            report = self._delivered(group, indices)
            for failure in report.failed:
                raise failure.error
            return report.version
        version, wanted = None, set(indices)
        while True:
            engines = list(self._processes.engines)
            try:
                report = self._delivered(group, indices)
            except SyncError as error:  # of all of them
                with self._replacing:
                    lost = self._processes.dead()
                    if lost:
                        self._replace(lost, error)
                        wanted.update(lost)
                        indices = sorted({*indices, *lost})
                    elif self._processes.engines == engines:  # else one was replaced while it was sent to
                        raise
                continue
            if version not in (None, report.version):  # the others are of an earlier one
                version, indices = None, sorted(wanted)
                continue
            version, indices = report.version, [failure.receiver for failure in report.failed]
            if not indices:
                return version
            with self._replacing:
                for failure in report.failed:
                    if self._processes.engines[failure.receiver] is engines[failure.receiver]:
                        self._replace([failure.receiver], failure.error)

    def replace_lost(self, index: int, engine: Any, error: SlimeError) -> None:
        """Replaces an engine that was lost, unless another one stands in its place, and sends it the weights.

        Where the policy has gone on since the engines had its weights, all of them get its present ones, but under
        rollout.max_staleness, where the new engine alone does.

        Raises:
            SlimeError: the error, where engines are not restarted, or no more.
        """
        if self.restarts is None or self._group is None:
            raise error
        with self._replacing:
            if self._processes.engines[index] is engine:
                self._replace([index], error)
            version = self._update(self._group, [index])
        if version != self._version and not self._processes.config.rollout.max_staleness:
            self.update_from(self._group)

    def _replace(self, indices: Sequence[int], error: SlimeError) -> None:
        assert self.restarts is not None
        self.restarts.start_another(error, lambda: self._processes.relaunch(indices), tuple(indices))

    def _delivered(self, group: Any, indices: Sequence[int]) -> SyncReport:
        """An update of these engines, which may be asleep; failed ones are named by their index."""
        return self._sent(group, indices) if self._processes.beside is None else self._sent_to_sleepers(group, indices)

    def _sent(self, group: Any, indices: Sequence[int]) -> SyncReport:
        receivers = [self._processes.engines[index] for index in indices]
        report: SyncReport = group.update_weights(receivers, drop_failed=True)
        failed = [FailedReceiver(indices[one.receiver], one.error) for one in report.failed]
        for one in failed:
            one.error.rank = one.receiver
        return replace(report, failed=tuple(failed))

    # ------------------------------------------------------------------ turns with the trainer

    def take_turn(self, seconds: dict[str, float]) -> None:
        """Wakes colocated engines with the group's present weights, and puts the group to sleep.

        Nothing happens where they have their turn already.

        Args:
            seconds: what sending weights took is added here as `sync`, and the rest as `turn`.

        Raises:
            As `update_from`.
        """
        beside = self._ranks_beside("take_turn")
        if not self._processes.are_asleep:
            return
        began, sent_before = time.perf_counter(), beside.sending_s
        self.update_from(beside.group)
        sending_s = beside.sending_s - sent_before
        seconds["sync"] = seconds.get("sync", 0.0) + sending_s
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began - sending_s

    def sleep(self) -> None:
        """Has colocated engines free their devices; they lose their weights. Idempotent.

        One that is lost, or does not answer, is ended: the next update finds it gone.

        Raises:
            SyncError: one refused.
        """
        if self._processes.is_ended:  # and a supervisor has them sleep before it starts ranks
            return
        self._ranks_beside("sleep")
        if not self._processes.are_asleep:
            self._processes.put_to_sleep(range(len(self._processes.engines)))
            self._processes.are_asleep = True

    def end_turn(self, seconds: dict[str, float], *, wakes_trainer: bool) -> None:
        """Colocated engines sleep, and the trainer may wake.

        Args:
            seconds: as `take_turn`.

        Raises:
            As `sleep`, and what the group raises.
        """
        beside = self._ranks_beside("end_turn")
        began = time.perf_counter()
        self.sleep()
        if wakes_trainer:
            beside.wake_up()
        seconds["turn"] = seconds.get("turn", 0.0) + time.perf_counter() - began

    def _ranks_beside(self, name: str) -> RanksBeside:
        self._processes.require_running(name)
        if self._processes.beside is None:
            problem = f"{name}() of engines that have devices of their own"
            raise StateError(problem, field=name, hint="set rollout.placement=colocated, or do not call it")
        return self._processes.beside

    def _sent_to_sleepers(self, group: Any, indices: Sequence[int]) -> SyncReport:
        """Sends weights to colocated engines; once all have them, the engines take the rest of their memory."""
        assert self._processes.beside is not None
        while True:
            self._processes.are_asleep = False
            try:
                self._processes.wake_up(indices, ("weights",))
                with self._processes.beside.sending():
                    report = self._sent(group, indices)
                self._processes.beside.free_parameters()
            except SyncError:
                if not self._processes.are_asleep:
                    raise
            if not self._processes.are_asleep:
                if not report.failed:
                    self._processes.wake_up(range(len(self._processes.engines)), ("kv_cache",))
                return report
            # ranks were lost, and all engines sleep since others were started
            indices = range(len(self._processes.engines))
            self._processes.beside.keep_parameters_only()
