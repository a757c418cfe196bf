"""Starts calls on Ray actors in the order in which they were made, and waits for them.

Every wait has a deadline. After a first failure, a wait soon ends and raises the root cause.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.cluster.ray_errors import explained, require_cluster
from actors.workers.watchdog import Waiting, Watchdog
from slimefsdp.errors import PeerFailed, SlimeError, WorkerDied, WorkerHung

Result = TypeVar("Result", covariant=True)

# How long to wait for the root cause after a first failure, since peers often report a lost rank before Ray does. It is
# longer than train_worker.EXIT_AFTER_S, so that peers can also report errors that the end of the failed rank causes.
GRACE_S = 5.0
SLICE_S = 0.25  # length of a single wait; between two waits, signals are handled and the watchdog checks the actors
_TURN_S = 0.002  # interval of checking whether a call has ended, while lanes take turns
_GET_S = 5.0  # limit on fetching an answer that Ray reports as ready
# Each wait is for one eighth of the missing answers. A wait for each single answer would take O(N^2) time for N ranks.
_ONE_IN = 8


class Future(Generic[Result]):
    """The future of a call that is queued or running.

    A coroutine may `await` it; cancelling the coroutine ends only the wait, not the call.

    Args:
        wait: waits for the call, and returns its result or raises its error.
    """

    def __init__(self, wait: Callable[[], Result]) -> None:
        self._wait = wait

    def result(self) -> Result:
        """Waits for the call and returns its result.

        Raises:
            WorkerHung: not all ranks answered in time. WorkerDied: a process ended.
            SlimeError: any error that a rank raised.
        """
        return self._wait()

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()


class CallFuture(Future[Any]):
    """The future of a call that runs on several actors.

    Args:
        refs: one reference per rank, in rank order.
        first_only: whether the result is the first reference's value instead of a list of all values.
        first_rank: the rank of the first reference.
        watchdog: ends the wait when an actor hangs; the watchdog's actors begin with rank 0. None means that only the
            timeout ends the wait.
        since: the start of the timeout: a time of `time.monotonic`, or an earlier call of the same actors; then the
            timeout starts when the earlier call ends. None means now.
        setting: the setting of the timeout, for errors.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        *,
        name: str,
        timeout_s: float,
        first_only: bool,
        first_rank: int = 0,
        watchdog: Watchdog | None = None,
        since: float | CallFuture | None = None,
        setting: str = "cluster.call_timeout_s",
    ) -> None:
        self.name = name
        self._refs = list(refs)
        self._ranks = {ref: rank for rank, ref in enumerate(self._refs, first_rank)}
        self._pending = dict(self._ranks)  # reference -> rank, of the ranks without an answer at the last check
        self._first_only = first_only
        self._timeout_s, self._setting, self._watchdog = timeout_s, setting, watchdog
        self._began = since if isinstance(since, float) else time.monotonic()
        self._earlier = since if isinstance(since, CallFuture) else None
        self._hung: WorkerHung | None = None  # the error of a wait which found that the call hangs
        self._has_aborted = False

    def has_ended(self) -> bool:
        """Returns whether all ranks have answered (a result or an error), without waiting."""
        if pending := self._pending:
            done = set(ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)[0])
            self._pending = {ref: rank for ref, rank in pending.items() if ref not in done}
        return not self._pending

    def current(self) -> CallFuture:
        """Returns the call that the ranks are running: this call, or an earlier call that has not ended."""
        current = self
        while (earlier := current._earlier) is not None:  # another thread may clear `_earlier` at the same time
            if earlier.has_ended():
                current._earlier, current._began = None, time.monotonic()
            else:
                current = earlier
        return current

    def require_moving(self, name: str) -> None:
        """Raises WorkerHung if this call hangs; `name` is the later call that would have to wait for this call."""
        hung = self._hung
        if hung is None or self.has_ended():
            return
        error = WorkerHung(
            f"{name} has to wait for {self.name}, which hung: {hung.message}",
            field=hung.field,
            hint="shut the group down and launch a new one, as actors.fault_tolerance does by itself",
            rank=hung.rank,
            call=hung.call,
        )
        error.stack = hung.stack
        raise error

    def result(self) -> Any:
        """Waits for the ranks; returns rank 0's result, or all results in rank order.

        Raises:
            WorkerHung: not all ranks answered this call, or an earlier one, in time. WorkerDied: a process ended.
            ResourceError: the Ray cluster is gone.
            SlimeError: any error of a rank; if several ranks failed, the root cause, with the other errors in `others`.
        """
        pending = list(self._refs)
        values: dict[Any, Any] = {}
        failures: list[tuple[int, Exception]] = []
        give_up = math.inf  # the time to stop waiting for the root cause, after a first failure
        looked = time.monotonic()
        while pending:
            current = self if failures else self.current()
            if current is not self:
                current.require_moving(self.name)
            left_s = max(0.0, min(give_up, current._began + current._timeout_s) - time.monotonic())
            enough = max(1, len(pending) // _ONE_IN)
            done, pending = ray.wait(pending, num_returns=enough, timeout=min(SLICE_S, left_s))
            late = []  # references that Ray reports as ready, but whose answer cannot be fetched
            for ref in done:
                try:
                    values[ref] = ray.get(ref, timeout=_GET_S)
                except RayError as error:
                    if isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError):
                        late.append(ref)
                        continue
                    failure = meaning_of(error, self._ranks[ref], self.name)
                    failures.append((self._ranks[ref], failure))
                    if _ends_rank(error, failure) and self._watchdog is not None and not self._has_aborted:
                        self._has_aborted = True  # with NCCL, collectives of other ranks do not end by themselves
                        self._watchdog.abort_collectives([rank for rank, _ in failures])
                    # the death of a process is a root cause, so no other error has to be waited for
                    grace_s = 0.0 if isinstance(failure, WorkerDied) else GRACE_S
                    give_up = min(give_up, time.monotonic() + grace_s)
            pending += late
            if left_s == 0.0 and len(done) == len(late):
                if failures:
                    break
                if current is self:
                    raise self._overdue([self._ranks[ref] for ref in pending], [self._ranks[ref] for ref in late])
                if not current.has_ended():
                    raise current._overdue(list(current._pending.values()))
            elif not failures and time.monotonic() - looked >= SLICE_S:
                looked = time.monotonic()
                require_cluster()
                current._look()
        if failures:
            raise _root_cause(failures)
        self._pending = {}
        return values[self._refs[0]] if self._first_only else [values[ref] for ref in self._refs]

    def _look(self) -> None:
        """Has the watchdog check the ranks that have not answered; raises WorkerHung if one hangs."""
        if self._watchdog is None or self.has_ended():
            return
        try:
            self._watchdog.look(Waiting(self.name, list(self._pending.values()), self._began))
        except WorkerHung as error:
            self._hung = error
            raise

    def _overdue(self, ranks: Sequence[int], late: Sequence[int] = ()) -> WorkerHung:
        """Returns the error of this call after its deadline.

        Args:
            ranks: the ranks without an answer.
            late: those of `ranks` whose answer Ray reports as ready, but which could not be fetched.
        """
        if self._watchdog is not None:
            self._hung = self._watchdog.overdue(Waiting(self.name, ranks, self._began), self._timeout_s, self._setting)
        else:
            self._hung = WorkerHung(
                f"{self.name} did not finish within {self._timeout_s:g} s",
                field=self._setting,
                hint="look at the rank's log, or raise the timeout",
                rank=ranks[0],
                call=self.name,
            )
        if late:
            answered = ", ".join(map(str, late))
            self._hung.others += (
                f"rank {answered} has answered, and Ray's object store does not hand the answer over",
            )
        return self._hung


def meaning_of(error: RayError, rank: int, call: str) -> Exception:
    """Returns the error that a rank raised, or the typed error for one of Ray's own errors."""
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    if isinstance(cause, RayError) and type(cause) is not RayTaskError:
        return explained(cause, rank, call)
    return cause


def _ends_rank(error: RayError, failure: Exception) -> bool:
    """Returns whether a failed rank's process has ended or will end; `failure` is the result of `meaning_of`."""
    raised = error.cause if isinstance(error, RayTaskError) else failure
    return raised.ends_rank if isinstance(raised, SlimeError) else True  # a rank ends itself after an untyped error


class QueuedCall(Future[Any]):
    """The future of a call that waits in a `Dispatcher` for its turn to start.

    If the call cannot be started, `result` raises the error, and no rank has seen the call.
    """

    def __init__(self, started: futures.Future[Any]) -> None:
        self._started = started

    def result(self) -> Any:
        return self._started.result().result()


class Dispatcher:
    """Starts calls one after another in a thread, so that callers do not wait.

    Each call belongs to a lane. Calls of one lane start in the order in which they were made. Lanes take turns, one
    call each. If there are several lanes, a call starts only when at most one earlier call still runs: otherwise the
    first call of a new lane would wait behind many calls that have started.

    The thread exists while calls wait, and is a daemon, so that a program with waiting calls can end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # lane -> its waiting calls; the next lane comes first, and lanes without calls are left out
        self._waiting: OrderedDict[str | None, deque[tuple[Callable[[], Any], futures.Future[Any]]]] = OrderedDict()
        self._has_lanes = False  # whether there is a lane besides None
        self._running: deque[Any] = deque()  # with `_has_lanes`: futures of started calls that may still run
        self._thread: threading.Thread | None = None  # the only thread that may start calls

    def submit(self, begin: Callable[[], Any], lane: str | None = None) -> QueuedCall:
        """Queues a call without waiting for it.

        Args:
            begin: starts the call and returns its future, which needs a method `has_ended` if there are several lanes.
            lane: the name of the call's lane; None is the lane without a name.
        """
        return QueuedCall(self._put(begin, lane))

    def drain(self, timeout_s: float) -> None:
        """Waits until all calls so far have started or could not start; raises TimeoutError after `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._lock:
            lanes = [None, *(lane for lane in self._waiting if lane is not None)]
        for lane in lanes:
            self._put(lambda: None, lane).result(max(0.0, end - time.monotonic()))

    def _put(self, begin: Callable[[], Any], lane: str | None) -> futures.Future[Any]:
        started: futures.Future[Any] = futures.Future()
        with self._lock:
            self._has_lanes |= lane is not None
            if self._thread is None:
                try:
                    self._thread = threading.Thread(target=self._run, name="slimefsdp-calls", daemon=True)
                    self._thread.start()
                except BaseException:  # no thread is left; or Ctrl-C, after which the thread may still run
                    self._thread = None
                    raise
            self._waiting.setdefault(lane, deque()).append((begin, started))
        return started

    def _run(self) -> None:
        while True:
            if self._has_lanes:
                self._wait_for_turn()
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if not self._waiting:
                    self._thread = None
                    return
                lane, calls = self._waiting.popitem(last=False)
                begin, started = calls.popleft()
                if calls:
                    self._waiting[lane] = calls
            try:
                started.set_result(future := begin())
                if self._has_lanes and future is not None:
                    self._running.append(future)
                del future
            except BaseException as error:  # raised by `QueuedCall.result`; later calls are started all the same
                started.set_exception(error)
            del begin, started  # otherwise they would keep the batch in memory

    def _wait_for_turn(self) -> None:
        while len(self._running) > 1:
            try:
                has_ended = self._running[0].has_ended()
            except Exception:  # the Ray cluster is gone, which the wait for the call reports
                has_ended = True
            if has_ended:
                self._running.popleft()
            else:
                time.sleep(_TURN_S)


class CallQueue:
    """Sends calls of any threads to a set of actors, in the same order to each actor.

    Args:
        dispatcher: may be shared with another set of actors; then the calls of both sets start in one order.
    """

    def __init__(self, dispatcher: Dispatcher | None = None) -> None:
        self.dispatcher = dispatcher or Dispatcher()
        self._lock = threading.Lock()  # if ranks had different orders, collectives of different calls would be mixed
        self._newest: CallFuture | None = None

    def require_moving(self, name: str) -> None:
        """Raises WorkerHung if the actors hang in an earlier call; `name` is the call that would have to wait."""
        if self._newest is not None:
            self._newest.current().require_moving(name)

    def begin(
        self, start: Callable[[], Sequence[Any]], *, name: str, counts_from_now: bool = False, **options: Any
    ) -> CallFuture:
        """Starts a call; if the actors hang in an earlier call, raises WorkerHung instead.

        Args:
            start: sends the call to all actors; returns one reference per rank.
            counts_from_now: whether the timeout begins now instead of at the end of all earlier calls.
            options: further arguments of `CallFuture`.
        """
        with self._lock:
            self.require_moving(name)
            earlier = None if self._newest is None or self._newest.has_ended() else self._newest
            self._newest = CallFuture(start(), name=name, since=None if counts_from_now else earlier, **options)
            return self._newest


def _root_cause(failures: list[tuple[int, Exception]]) -> Exception:
    """Returns the error to report when several ranks failed.

    The first of these is chosen: the death of a process, a typed error, an untyped error, the report of a lost peer. A
    typed error gets the other ranks' messages in `others`.
    """

    def order(failure: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = failure
        if isinstance(error, PeerFailed):
            return 3, rank
        return 0 if isinstance(error, WorkerDied) else 1 if isinstance(error, SlimeError) else 2, rank

    cause = min(failures, key=order)[1]
    if isinstance(cause, SlimeError):
        others: dict[str, list[str]] = {}
        for rank, error in failures:
            if error is not cause and _first_line(error) != _first_line(cause):
                others.setdefault(_first_line(error), []).append(str(rank))
        cause.others += tuple(f"rank {', '.join(ranks)}: {line}" for line, ranks in others.items())
    return cause


def _first_line(error: Exception) -> str:
    """Returns an error's type and the first line of its message, without the rank."""
    message = error.message if isinstance(error, SlimeError) else str(error.args[0] if error.args else "")
    return f"{type(error).__name__}: {message.strip().partition(chr(10))[0]}"
