"""A worker group that survives the loss of ranks: it logs calls, replaces lost ranks, and repeats the calls on them.

The log keeps every call since the last checkpoints that changes the state of a rank, with the arguments that the ranks
got. The log keeps other calls until they have their result. When ranks are lost, all processes of the job are ended and
started again in the same places. The newest valid checkpoint is loaded, and the calls since that checkpoint are
repeated. Then the caller gets the result of its call.
"""

from __future__ import annotations

import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from typing import Any

from actors.cluster.placement import PlacementGroups
from actors.cluster.ray_errors import store
from actors.fault_tolerance.call_log import TRAINING, CallLog, LoggedCall, SpilledBatch
from actors.fault_tolerance.recovery import LOST, Recovery, Restarts, differences_of
from actors.workers.futures import Dispatcher, Future, QueuedCall
from actors.workers.group_calls import JobGroup, RankRequest
from actors.workers.worker_group import SAVE_GRACE_S, WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.errors import (
    CheckpointError,
    ResourceError,
    SlimeError,
    StateError,
    SyncError,
    WorkerDied,
)
from slimefsdp.results import Health
from slimefsdp.rpc import JobCheckpoint, Role
from slimefsdp.training.prepare import Planning


class SupervisedCall(Future[Any]):
    """The future of a call that is repeated on new ranks if ranks are lost."""

    def __init__(self, supervisor: Supervisor, call: LoggedCall) -> None:
        self._supervisor = supervisor
        self._call = call

    def __repr__(self) -> str:
        return f"SupervisedCall({self._call.request.name})"

    def result(self) -> Any:
        """Waits for the call; raises WorkerDied, WorkerHung or PeerFailed when no restart is left."""
        return self._supervisor.result(self._call)

    def has_ended(self) -> bool:
        """Returns whether the call has a result, or all ranks that ran it last have answered."""
        running = self._call.running
        return self._call.is_done or running is None or running.has_ended()


class SupervisedGroup(JobGroup):
    """A handle with the methods of `WorkerGroup`, on ranks that are replaced when they are lost; see `launch`."""

    _job: Supervisor

    @classmethod
    def launch(cls, config: RunConfig) -> SupervisedGroup:
        """Launches an actor group with its critic and reference group, as `WorkerGroup.launch` does.

        Until the first `save`, the call log keeps all calls; afterwards, all calls since the oldest kept checkpoint.

        Raises:
            SlimeError: as `WorkerGroup.launch`; ranks that are lost during the launch are replaced.
        """
        return cls(Supervisor(config), "actor")

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Returns a record of each replacement of ranks of the job, in order."""
        return tuple(self._job.recoveries)

    @property
    def failure(self) -> Exception | None:
        """Returns the error that has ended the job, which every call raises; None while the job continues."""
        return self._job.failure

    @property
    def places(self) -> PlacementGroups:
        """Returns the placement groups of the processes, which are kept when ranks are replaced."""
        return self._job.group(self.role).places

    def before_relaunch(self, action: Callable[[], None]) -> None:
        """Registers an action that frees devices; it runs after each loss of ranks, before new ranks start."""
        self._job.before_relaunch.append(action)

    def shutdown(self) -> None:
        """Waits for saves in the background, then ends all processes of the job; idempotent."""
        if self.role == "actor":
            self._job.shutdown()


class Supervisor:
    """A `Job` that owns its groups and the log of their calls; it replaces lost ranks and repeats the logged calls."""

    def __init__(self, config: RunConfig) -> None:
        self.recoveries: list[Recovery] = []
        self.before_relaunch: list[Callable[[], None]] = []
        self._config = config
        self._places = PlacementGroups()
        self._sharding: dict[Role, str] = {}
        self._lock = threading.RLock()  # keeps calls of several threads in one order, also while ranks are replaced
        self._call_log = CallLog(config)
        self._launches = 0
        self._restarts = Restarts(config.cluster.max_restarts, "ranks")
        # number of the launch whose ranks are about to end by themselves, and the cause
        self._doomed: tuple[int, SlimeError] | None = None
        self._final: Exception | None = None  # the error that has ended the job
        self._dispatcher = Dispatcher()
        self._is_shut_down = False
        self._actor: WorkerGroup | None = None
        try:
            while self._actor is None:
                try:
                    self._launch()
                except LOST as error:
                    self._restarts.spend(error)
        except BaseException:
            self._places.release()
            raise

    def group(self, role: Role) -> WorkerGroup:
        assert self._actor is not None
        group = {"actor": self._actor, "critic": self._actor.critic, "ref": self._actor.reference_group}[role]
        assert group is not None
        return group

    @property
    def roles(self) -> tuple[Role, ...]:
        assert self._actor is not None
        others: dict[Role, WorkerGroup | None] = {"critic": self._actor.critic, "ref": self._actor.reference_group}
        return ("actor", *(role for role, group in others.items() if group is not None))

    def config_of(self, role: Role) -> RunConfig:
        return self.group(role).config

    def receivers(self, role: Role) -> list[Any]:
        return self.group(role).receivers

    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]:
        return self.group(role).health(timeout_s)

    @property
    def failure(self) -> Exception | None:
        return self._final

    def submit(self, role: Role, request: RankRequest) -> QueuedCall:
        """Queues a call, which begins when all earlier calls have begun.

        Raises:
            SlimeError: an argument is wrong, and no rank has seen the call; or the job has ended with this error.
        """
        with self._lock:
            while True:
                self._require_group()
                launch = self._launches
                try:
                    planning = self.group(role).check(request)
                    break
                except LOST as error:  # ranks that hang in an earlier call
                    self._recover(error, launch)
            self._refuse_update_of_reference(request)
            return self._dispatcher.submit(
                lambda: SupervisedCall(self, self._prepare_and_log(role, request, planning)), request.adapter
            )

    def _require_group(self) -> None:
        """Raises the error that ended the job, if any; replaces ranks that are known to be about to end."""
        if self._final is not None:
            raise self._final.with_traceback(None)  # a traceback would keep the objects of all earlier callers
        if self._doomed is not None:
            self._recover(self._doomed[1], self._doomed[0])

    def _prepare_and_log(self, role: Role, request: RankRequest, planning: Planning | None) -> LoggedCall:
        """Prepares a call, starts it on the ranks and appends it to the call log."""
        prepared: RankRequest | None = None
        while True:
            with self._lock:
                self._require_group()
                group, launch = self.group(role), self._launches
            try:
                if prepared is None:
                    prepared = group.prepared(request, planning)  # without the lock, so that other threads can call
                with self._lock:
                    self._require_group()  # the job may have ended meanwhile
                    if launch != self._launches:
                        continue
                    if prepared.name == "save":
                        prepared = prepared.having(job=JobCheckpoint(save_id=uuid.uuid4().hex))
                    call = LoggedCall(role, prepared, has_batch=planning is not None)
                    self._call_log.check(call)
                    self._start_on_ranks(call)
                    self._call_log.append(call)  # a call that only reads stays in the log until it has its result
                    return call
            except Exception as error:
                with self._lock:
                    if launch != self._launches or self._final is not None:
                        continue  # the error is of ranks that another thread has replaced
                    if self._is_shut_down or not isinstance(error, LOST):
                        raise
                    self._recover(error, launch)  # ranks hang, or the reference group was lost while it prepared

    def result(self, call: LoggedCall) -> Any:
        """Waits for a call, also during recoveries, and returns its result."""
        while not call.is_done:
            if self._final is not None:
                raise self._final.with_traceback(None)
            running, restored, launch = call.running, call.restored, call.launch
            assert running is not None
            try:
                value = running.result()
                loaded = None if restored is None else restored.result()
            except Exception as error:
                if not self._recovered_from(call, error, launch):
                    raise
                continue
            with self._lock:
                if not call.is_done and call.launch == launch:
                    self._restarts.progress()
                    call.value = value
                    call.is_done = True  # set after the value, since other threads read it without the lock
                    if loaded is not None:  # if repeated, the call must load the same step, not the newest one
                        call.request, call.restored = call.request.having(step=loaded.step), None
                    if call.name == "create_adapter":
                        self._call_log.created[call.request.arguments["name"]] = call
                    if not call.changes_state:
                        self._call_log.remove(call)
                    elif call.name == "delete_adapter":
                        self._call_log.forget_adapter(call)
                    elif call.name == "save":
                        # one checkpoint more than is kept: with async_save the newest may not be on disk yet
                        self._call_log.forget(self._config.checkpoint.keep_last + 1, call.adapter)
        return call.value

    def shutdown(self) -> None:
        if self._actor is not None:
            if self._config.checkpoint.async_save:
                try:
                    self._dispatcher.drain(SAVE_GRACE_S)
                except TimeoutError:
                    warnings.warn(f"calls are given up that could not begin within {SAVE_GRACE_S:g} s", stacklevel=3)
            self._is_shut_down = True
            self._actor.shutdown()
        self._places.release()
        self._call_log = CallLog(self._config)  # frees the batches of the old log

    def _launch(self) -> None:
        if self._is_shut_down:
            raise _shut_down()
        self._launches += 1
        self._doomed = None
        self._actor = WorkerGroup.launch(self._config, places=self._places, sharding=self._sharding)
        if self._is_shut_down:  # another thread has called `shutdown` meanwhile
            self._end()
            raise _shut_down()
        self._config = self._actor.config  # a relaunch keeps the number of ranks
        self._sharding = self._actor.sharding  # a relaunch keeps the levels, however much memory is free then

    def _start_on_ranks(self, call: LoggedCall) -> None:
        group, request = self.group(call.role), call.request
        if call.under_name is not None and call.name == "save" and call.is_done:  # the first save has taken the name
            request = request.having(overwrite=True)
        batch = request.arguments.get("batch")
        if isinstance(batch, SpilledBatch):
            request = request.having(batch=store(batch.read(), "batch"))
        if call.has_batch:
            group.await_weights()  # in a recovery, update_ref may have been repeated just before this call
        call.running, call.launch = group.begin(request), self._launches
        if call.name == "load":
            call.restored = group.begin(RankRequest("restored", adapter=call.adapter))

    def _refuse_update_of_reference(self, request: RankRequest) -> None:
        reference = self.group("actor").reference_group
        own = [] if reference is None else reference.receivers
        if any(receiver in own for receiver in request.arguments.get("receivers", ())):
            problem = "update_weights to the reference group, of which a recovery would know nothing"
            raise StateError(problem, field="receivers", hint="call update_ref instead")

    def _recovered_from(self, call: LoggedCall, error: Exception, launch: int) -> bool:
        """Handles an error of a call; returns True if ranks were lost and the job has recovered."""
        with self._lock:
            loss = self._loss_behind(call.name, error)
            if loss is not None:
                if call not in self._call_log:  # a read of the state before a checkpoint, which cannot be restored
                    return False
                self._recover(loss, launch)
                return True
            is_of_all_ranks = isinstance(error, SlimeError) and not isinstance(error, ResourceError)
            # A training call that all ranks refused stays in the log, since it may have changed the state before the
            # refusal. A call that ends ranks must not be repeated.
            if not is_of_all_ranks and call.name == "forward_backward":
                # a repetition drops the gradients of earlier calls, too, which the error has dropped
                zero_grad = RankRequest("zero_grad", adapter=call.adapter)
                self._call_log.replace(call, LoggedCall(call.role, zero_grad, is_done=True))
            elif not (is_of_all_ranks and call.name in TRAINING):
                self._call_log.remove(call)
            if not is_of_all_ranks and launch == self._launches:
                cause = f"ranks end after an error of their own: {type(error).__name__}: {error}"
                self._doomed = launch, WorkerDied(cause.partition("\n")[0], call=call.name)
            return False

    def _loss_behind(self, name: str, error: Exception) -> SlimeError | None:
        """Returns the loss of ranks that caused an error, or None if no ranks were lost."""
        if isinstance(error, LOST):
            return error
        reference = None if self._actor is None else self._actor.reference_group
        if name == "update_ref" and isinstance(error, SyncError) and reference is not None:
            return next((answer for answer in reference.health() if isinstance(answer, LOST)), None)
        return None

    # ------------------------------------------------------------------ recovery

    def _recover(self, cause: SlimeError, launch: int) -> None:
        """Replaces all ranks of a launch after a loss; does nothing if another thread has replaced them."""
        with self._lock:
            if self._final is not None or launch != self._launches:
                return
            if self._is_shut_down:
                raise cause
            noticed_at, start, error = time.time(), time.perf_counter(), cause
            try:
                while True:
                    self._restarts.spend(error)
                    try:
                        self._end()
                        for action in self.before_relaunch:
                            action()
                        self._launch()
                        step, repeated, differences = self._catch_up()
                        break
                    except LOST as another:
                        error = another
            except BaseException as final:
                # the new ranks do not have the lost ranks' state
                self._end()
                if self._is_shut_down:  # `shutdown` has released only the places that were reserved at that time
                    self._places.release()
                interrupted = StateError("a recovery was interrupted", field="cluster", hint="launch a new group")
                self._final = final if isinstance(final, Exception) else interrupted
                if isinstance(final, SlimeError) and final is not cause:
                    final.others += (f"it began with: {cause}",)
                raise
            took = time.perf_counter() - start
            self.recoveries.append(
                Recovery(
                    cause.code, cause.rank, cause.call, cause.message, noticed_at, took, step, repeated, differences
                )
            )
            self.recoveries[-1].report(self._config.run.dir)

    def _end(self) -> None:
        if self._actor is not None:
            self._actor.end()

    def _catch_up(self) -> tuple[int | None, int, tuple[str, ...]]:
        """Brings a new group to the state of the lost group.

        Returns:
            The loaded step (None without a checkpoint), the number of repeated calls, and a text for each metric of
            these calls that differs from the first time.
        """
        beginnings: dict[str | None, LoggedCall] = {}
        for adapter in (None, *self._call_log.created):
            beginning = self._restored_beginning(adapter)
            if beginning is not None:
                beginnings[adapter] = beginning
        repeated = 0
        differences: list[str] = []
        for call in self._call_log.since(beginnings):
            self._start_on_ranks(call)
            if call.is_done:
                assert call.running is not None
                repeated += 1
                differences += differences_of(call, self._replayed_result(call.name, call.running))
        return beginnings[None].step if None in beginnings else None, repeated, tuple(differences)

    def _restored_beginning(self, adapter: str | None) -> LoggedCall | None:
        """Loads the newest valid checkpoint, of the job or of an adapter, among those with a save in the call log.

        Returns:
            The call that saved the checkpoint. Without a valid checkpoint, the job or adapter is in the state in which
            it began; the result is then the call that created the adapter, or None for the job.

        Raises:
            CheckpointError: there is no valid checkpoint, and the log no longer reaches back to the launch or creation.
        """
        group, created = self.group("actor"), None if adapter is None else self._call_log.created[adapter]
        if created is not None:
            group.begin(created.request).result()
        problem: CheckpointError | None = None
        for save in self._call_log.saves(adapter):
            job = JobCheckpoint(save_id=save.request.arguments["job"].save_id)
            try:
                group.begin(RankRequest("load", {"step": save.step, "job": job}, adapter)).result()
                return save
            except CheckpointError as error:
                print(f"checkpoint passed over: {error}", file=sys.stderr)
                problem = error
        if not self._call_log.reaches_beginning(adapter):
            raise problem or CheckpointError(
                f"no checkpoint holds the state {'of the job' if adapter is None else f'of the adapter {adapter!r}'}",
                field="checkpoint",
                hint="save it under a step and not only under a name",
            )
        if problem is None:
            return created
        # a failed load may have changed a part of the state, so begin again
        if created is None:
            self._end()
            self._launch()
        else:
            group.begin(RankRequest("delete_adapter", {"name": adapter}, adapter)).result()
            group.begin(created.request).result()
        return created

    def _replayed_result(self, name: str, running: Any) -> Any:
        """Returns the result of a repeated call; if lost ranks caused a SyncError, raises the loss instead."""
        try:
            return running.result()
        except SyncError as error:
            raise self._loss_behind(name, error) or error from None


def _shut_down() -> StateError:
    return StateError("shutdown() during a recovery", field="cluster", hint="launch a new group")
