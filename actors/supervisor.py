"""A worker group that outlives its ranks: calls are journalled, and what is lost starts anew and catches up.

The journal holds every call that changes the state of a rank since a checkpoint, with its arguments as the ranks got
them. When ranks are lost, all processes of the job are ended and started again in the same places, the newest
checkpoint that verifies is loaded, the calls behind it are made again, and the caller gets the result it waits for.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from actors.calls import CallFuture
from actors.placement import Places
from actors.worker_group import WorkerGroup, add_calls
from slimefsdp.checkpoint.manifest import io_reported
from slimefsdp.config import RunConfig
from slimefsdp.errors import CheckpointError, PeerFailed, ResourceError, SlimeError, WorkerDied, WorkerHung
from slimefsdp.reports import Health
from slimefsdp.surface import Role

LOST = (WorkerDied, WorkerHung, PeerFailed)
"""Errors after which the ranks of a group are of no more use, and new ones may succeed."""
MAX_WITHOUT_PROGRESS = 3  # restarts; a fault that comes back each time is none that a restart helps against
RECOVERIES = "recoveries.jsonl"
# whatever else is called reads, and is not made again once its result is here
_CHANGES_STATE = {
    *("train_step", "forward_backward", "optimizer_step", "update_ref", "sleep", "wake_up", "save", "load")
}
_TRAINS = {"train_step", "forward_backward", "optimizer_step", "load"}
_COMPARED = ("loss", "grad_norm")  # metrics that a call made again must reproduce


@dataclass(frozen=True, slots=True)
class Recovery:
    """One time that lost ranks were replaced; a line of `recoveries.jsonl` in `run.dir`."""

    code: str  # of the error that began it, as in slimefsdp.errors
    rank: int | None
    phase: str | None
    message: str
    noticed_at: float  # seconds since the epoch
    seconds: float  # from then until the calls of the journal were made again
    checkpoint_step: int | None  # that was loaded; None: there was none, the models are those of the launch
    calls_repeated: int
    differences: tuple[str, ...]  # metrics that came out otherwise than the first time


@dataclass(eq=False)
class _Call:
    """One call of the caller's, over all the groups that had to work on it."""

    role: Role
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    running: CallFuture | None = None
    launch: int = 0  # which group `running` is of
    is_done: bool = False
    value: Any = None
    reference_is_current: bool | None = None  # of a save: see `Supervisor._reference_is_current`

    @property
    def step(self) -> int:
        """Of a save."""
        return int(self.kwargs["step"] if "step" in self.kwargs else self.args[0])


class SupervisedCall:
    """A future whose `result` outlives the ranks that began to work on it."""

    def __init__(self, supervisor: Supervisor, call: _Call) -> None:
        self._supervisor = supervisor
        self._call = call

    def result(self) -> Any:
        """As `CallFuture.result`; raises WorkerDied, WorkerHung or PeerFailed when the budget of restarts is spent."""
        return self._supervisor.result(self._call)


class SupervisedGroup:
    """The methods of `WorkerGroup`, on ranks that are replaced when they are lost. Make one with `launch`."""

    if TYPE_CHECKING:  # what `add_calls` adds

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __init__(self, supervisor: Supervisor, role: Role) -> None:
        self.role = role
        self._supervisor = supervisor

    @classmethod
    def launch(cls, config: RunConfig) -> SupervisedGroup:
        """As `WorkerGroup.launch` for an actor, with its critic and reference group.

        Until the first `save` the journal holds all calls, later those since the oldest checkpoint that is kept.

        Raises:
            SlimeError: as `WorkerGroup.launch`; ranks that are lost meanwhile are replaced.
        """
        return cls(Supervisor(config), "actor")

    @property
    def config(self) -> RunConfig:
        """The settings, with mesh.dp as a number."""
        return self._group.config

    @property
    def critic(self) -> SupervisedGroup | None:
        """Of an actor under algorithm=ppo."""
        return None if self._group.critic is None else SupervisedGroup(self._supervisor, "critic")

    @property
    def reference_group(self) -> SupervisedGroup | None:
        """Of an actor with reference.placement=group."""
        return None if self._group.reference_group is None else SupervisedGroup(self._supervisor, "ref")

    @property
    def recoveries(self) -> tuple[Recovery, ...]:
        """Every time that ranks of the job were replaced, in order."""
        return tuple(self._supervisor.recoveries)

    @property
    def receivers(self) -> list[Any]:
        """As of `WorkerGroup`; they change when the group is replaced."""
        return self._group.receivers

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """As of `WorkerGroup`."""
        return self._group.health(timeout_s)

    def shutdown(self) -> None:
        """Ends all processes of the job, after saves in the background; idempotent."""
        if self.role == "actor":
            self._supervisor.shutdown()

    @property
    def _group(self) -> WorkerGroup:
        return self._supervisor.group(self.role)

    def _start(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SupervisedCall:
        return SupervisedCall(self._supervisor, self._supervisor.submit(self.role, name, args, kwargs))


add_calls(SupervisedGroup)


class Supervisor:
    """The groups of a job, the journal of their calls, and how both are brought back."""

    def __init__(self, config: RunConfig) -> None:
        self.recoveries: list[Recovery] = []
        self._config = config
        self._places = Places()
        self._lock = threading.RLock()  # calls of several threads keep one order, also while ranks are replaced
        self._journal: list[_Call] = []
        self._has_begin = True  # the journal reaches back to the launch
        self._launches = 0
        self._without_progress = 0
        # of a reference group of its own, which no checkpoint holds: it equals the policy; None: it is as launched
        self._reference_is_current: bool | None = None
        self._actor: WorkerGroup | None = None
        try:
            while self._actor is None:
                try:
                    self._launch()
                except LOST as error:
                    self._spend(error)
        except BaseException:
            self._places.release()
            raise

    def group(self, role: Role) -> WorkerGroup:
        """The present group of a role."""
        assert self._actor is not None
        found = {"actor": self._actor, "critic": self._actor.critic, "ref": self._actor.reference_group}[role]
        assert found is not None
        return found

    def submit(self, role: Role, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        """Starts a call.

        Raises:
            SlimeError: its arguments are wrong; no rank has seen them.
        """
        with self._lock:
            while True:
                launch = self._launches
                try:
                    prepared = self.group(role).prepare(name, args, kwargs)
                    break
                except LOST as error:  # of a reference group, which completes the batch
                    self._recover(error, launch)
            call = _Call(role, name, *prepared)
            self._begin(call)
            self._journal.append(call)  # also one that only reads, until its result is here
            return call

    def result(self, call: _Call) -> Any:
        """The result of a call, however many groups it takes."""
        while not call.is_done:
            running, launch = call.running, call.launch
            assert running is not None
            try:
                value = running.result()
                if call.name == "load":  # made again it must find the same one, whatever is the latest by then
                    restored = self.group(call.role).begin("restored", (), {}).result()
                    call.args, call.kwargs = (restored.step,), {}
            except LOST as error:
                if call not in self._journal:  # a read before a checkpoint: there is no way back to its state
                    raise
                self._recover(error, launch)
                continue
            except Exception as error:
                with self._lock:
                    if not _stays(call, error) and call in self._journal:
                        self._journal.remove(call)
                raise
            with self._lock:
                if not call.is_done and call.launch == launch:
                    self._without_progress = 0
                    self._finish(call, value)
        return call.value

    def shutdown(self) -> None:
        """Ends the job; idempotent."""
        if self._actor is not None:
            self._actor.shutdown()
        self._places.release()

    def _launch(self) -> None:
        self._launches += 1
        self._actor = WorkerGroup.launch(self._config, places=self._places)
        self._config = self._actor.config  # a job keeps its number of ranks

    def _begin(self, call: _Call) -> None:
        call.running, call.launch = self.group(call.role).begin(call.name, call.args, call.kwargs), self._launches

    def _finish(self, call: _Call, value: Any) -> None:
        """Keeps what a call returned, and forgets calls that nobody can need any more."""
        call.is_done, call.value = True, value
        if call.name not in _CHANGES_STATE:
            self._journal.remove(call)
        elif call.role == "actor":
            if call.name == "update_ref" and self._config.reference.placement == "group":
                self._reference_is_current = True
            elif call.name in _TRAINS and self._reference_is_current:
                self._reference_is_current = False
            elif call.name == "save":
                call.reference_is_current = self._reference_is_current
                self._forget()

    def _forget(self) -> None:
        """Cuts the journal before the oldest checkpoint that a recovery may go back to."""
        marks = list(self._marks())
        # one more than there are: with async_save the newest may not be on disk yet
        if len(marks) > self._config.checkpoint.keep_last + 1:
            oldest = marks[self._config.checkpoint.keep_last]
            first = min(self._journal.index(mark) for mark in self._starts(oldest).values())
            self._journal, self._has_begin = self._journal[first:], False

    def _marks(self) -> Iterator[_Call]:
        """The actor's saves, newest first."""
        return (
            call for call in reversed(self._journal) if (call.name, call.role) == ("save", "actor") and call.is_done
        )

    def _starts(self, mark: _Call) -> dict[Role, _Call]:
        """By role, the save at which its calls begin to count behind a checkpoint; a critic saves before its actor."""
        starts: dict[Role, _Call] = {"actor": mark}
        before = self._journal[: self._journal.index(mark)]
        for call in reversed(before):
            if (call.name, call.role) == ("save", "critic") and call.step == mark.step:
                starts["critic"] = call
                break
        return starts

    # ------------------------------------------------------------------ recovery

    def _spend(self, error: SlimeError) -> None:
        """Takes one restart from the budget; raises the error where there is none left."""
        self._without_progress += 1
        left = self._config.cluster.max_restarts - len(self.recoveries)
        if left > 0 and self._without_progress <= MAX_WITHOUT_PROGRESS:
            return
        if self._config.cluster.max_restarts:
            spent = f"cluster.max_restarts={self._config.cluster.max_restarts} are spent"
            why = spent if left <= 0 else f"{MAX_WITHOUT_PROGRESS} restarts in a row changed nothing"
            error.hint = f"{error.hint}; {why}" if error.hint else why
        raise error

    def _recover(self, error: SlimeError, launch: int) -> None:
        """Replaces all ranks after a loss in a launch's group; nothing where another thread has done that."""
        with self._lock:
            if launch != self._launches:
                return
            noticed_at, start, cause = time.time(), time.perf_counter(), error
            while True:
                self._spend(error)
                try:
                    if self._actor is not None:
                        self._actor.end()
                    self._launch()
                    step, repeated, differences = self._catch_up()
                    break
                except LOST as another:
                    error = another
            recovery = Recovery(
                *(cause.code, cause.rank, cause.phase, cause.message, noticed_at, time.perf_counter() - start),
                *(step, repeated, differences),
            )
            self.recoveries.append(recovery)
        self._report(recovery)

    def _catch_up(self) -> tuple[int | None, int, tuple[str, ...]]:
        """Brings a new group to where the lost one was: the step loaded, calls repeated, what came out otherwise."""
        mark = self._loaded_mark()
        starts = {} if mark is None else {role: self._journal.index(call) for role, call in self._starts(mark).items()}
        repeated = 0
        differences: list[str] = []
        for index, call in enumerate(list(self._journal)):
            if index <= starts.get(call.role, -1):
                continue
            self._begin(call)
            if not call.is_done:
                continue
            assert call.running is not None
            repeated += 1
            differences += _differences(call, call.running.result())
        return None if mark is None else mark.step, repeated, tuple(differences)

    def _loaded_mark(self) -> _Call | None:
        """Loads the newest checkpoint that verifies; None: there was none yet, and the journal tells everything."""
        problem: CheckpointError | None = None
        for mark in self._marks():
            if mark.reference_is_current is False:
                continue  # no checkpoint holds a reference group, and at this one it was that of an earlier step
            try:
                for role in self._starts(mark):
                    self.group(role).begin("load", (mark.step,), {}).result()
            except CheckpointError as error:
                print(f"checkpoint passed over: {error}", file=sys.stderr)
                problem = error
                continue
            if mark.reference_is_current:
                self.group("actor").begin("update_ref", (), {}).result()
            return mark
        if self._has_begin:
            return None
        raise problem or CheckpointError(
            "no checkpoint holds the reference group as it was",
            field="reference.placement",
            hint="save when update_ref was just called, or use reference.placement=colocated",
        )

    def _report(self, recovery: Recovery) -> None:
        where = "the launch" if recovery.checkpoint_step is None else f"step {recovery.checkpoint_step}"
        rank = "a rank" if recovery.rank is None else f"rank {recovery.rank}"
        print(
            f"recovered: {rank} was lost in {recovery.phase} ({recovery.message}); from {where}, "
            f"{recovery.calls_repeated} calls made again, {recovery.seconds:.1f} s",
            *(f"  not as the first time: {difference}" for difference in recovery.differences),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        run_dir = self._config.run.dir
        if run_dir is None:
            return
        with io_reported(run_dir / RECOVERIES, "recovery"):
            run_dir.mkdir(parents=True, exist_ok=True)
            with (run_dir / RECOVERIES).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(recovery)) + "\n")


def _stays(call: _Call, error: Exception) -> bool:
    """Whether a call that failed is part of the state all the same, as an update phase that stopped on the way is.

    What ended ranks (a bug in them, no memory) must not be made again.
    """
    return call.name in _CHANGES_STATE and isinstance(error, SlimeError) and not isinstance(error, ResourceError)


def _differences(call: _Call, value: Any) -> Iterator[str]:
    if not (isinstance(value, dict) and isinstance(call.value, dict)):
        return
    for name in _COMPARED:
        first, again = call.value.get(name), value.get(name)
        if first != again and (first == first or again == again):  # two NaN are as the first time
            yield f"{name} of {call.name} was {first}, is {again}"
