"""Calls to Ray actors: begun in the order in which they were made, and waited for.

Every wait has a deadline, and the first failure ends it with its root cause.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future as Begun
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from actors.cluster.ray_errors import explained, require_cluster
from actors.workers.watchdog import Waiting, Watchdog
from slimefsdp.errors import PeerFailed, SlimeError, WorkerDied, WorkerHung

# How long to listen for the root cause after a first failure: peers of a rank that ends often report that sooner than
# Ray. Longer than a failed rank lives on (train_worker.EXIT_AFTER_S), so that peers can say what its end did to them.
GRACE_S = 5.0
SLICE_S = 0.25  # of a wait: in between signals are handled and the watchdog looks
_TURN_S = 0.002  # between two looks at whether a call has ended, where others wait for their turn
_GET_S = 5.0  # for an answer that Ray says is here
# A wait returns when one rank in so many has answered, at once where there are fewer than twice that: all waits of a
# call together look at so many times the ranks, and not at their square.
_ONE_IN = 8


class Awaitable:
    """A call whose `result()` waits for it; a coroutine may `await` it instead, while its event loop goes on.

    Who stops awaiting does not stop the call.
    """

    def result(self) -> Any:
        """Waits for the call, and returns its result or raises its error."""
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.get_running_loop().run_in_executor(None, self.result).__await__()


class CallFuture(Awaitable):
    """Waits for a call that runs on several actors.

    Args:
        refs: one per rank, in rank order.
        first_rank: the rank of the first of them.
        watchdog: of the actors, from rank 0 on; ends the wait when one hangs. None: the timeout alone does.
        since: when the timeout begins: at this time of `time.monotonic`, or once this earlier call of the same actors
            was seen to have ended; None: now.
        setting: where the timeout comes from.
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
        since: float | Running | None = None,
        setting: str = "cluster.call_timeout_s",
    ) -> None:
        self._refs = list(refs)
        self._ranks = {ref: rank for rank, ref in enumerate(self._refs, first_rank)}
        self._first_only = first_only
        self.running = Running(name, dict(self._ranks), timeout_s, watchdog, since, setting)

    def __repr__(self) -> str:
        ended = "" if self.running.pending else ", ended"  # as when last looked
        return f"CallFuture({self.running.name} on {len(self._refs)} rank{'s' * (len(self._refs) != 1)}{ended})"

    def has_ended(self) -> bool:
        """Returns whether all ranks have answered, whatever they said; waits for none."""
        return self.running.has_ended()

    def result(self) -> Any:
        """Waits for the ranks; returns rank 0's result, or all results in rank order.

        Raises:
            WorkerHung: not all ranks answered in time, this call or one that they do before. WorkerDied: a process
                ended. ResourceError: Ray is gone.
            SlimeError: what a rank raised; the root cause where several did, with the others' words in its `others`.
        """
        pending = list(self._refs)
        values: dict[Any, Any] = {}
        failures: list[tuple[int, Exception]] = []
        give_up = math.inf  # after a first failure
        looked = time.monotonic()
        while pending:
            current = self.running if failures else self.running.first_in_line()
            left_s = max(0.0, min(give_up, current.deadline) - time.monotonic())
            enough = max(1, len(pending) // _ONE_IN)
            done, pending = ray.wait(pending, num_returns=enough, timeout=min(SLICE_S, left_s))
            late = []  # Ray has it and does not hand it over: no end of a process, and no answer before the deadline
            for ref in done:
                try:
                    values[ref] = ray.get(ref, timeout=_GET_S)
                except RayError as error:
                    if isinstance(error, GetTimeoutError) and not isinstance(error, RayTaskError):
                        late.append(ref)
                        continue
                    failure = meaning_of(error, self._ranks[ref], self.running.name)
                    failures.append((self._ranks[ref], failure))
                    if _ends_rank(error, failure):
                        self.running.abort_collectives([rank for rank, _ in failures])
                    # nothing explains an end but the end itself
                    grace_s = 0.0 if isinstance(failure, WorkerDied) else GRACE_S
                    give_up = min(give_up, time.monotonic() + grace_s)
            pending += late
            if left_s == 0.0 and len(done) == len(late):
                if failures:
                    break
                if current is self.running:
                    raise current.overdue([self._ranks[ref] for ref in pending], [self._ranks[ref] for ref in late])
                if not current.has_ended():
                    raise current.overdue(list(current.pending.values()))
            elif not failures and time.monotonic() - looked >= SLICE_S:
                looked = time.monotonic()
                require_cluster()
                current.look()
        if failures:
            raise _root_cause(failures)
        self.running.pending = {}
        return values[self._refs[0]] if self._first_only else [values[ref] for ref in self._refs]


def meaning_of(error: RayError, rank: int, call: str) -> Exception:
    """Returns what a rank raised, or the typed error for Ray's own error."""
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    if isinstance(cause, RayError) and type(cause) is not RayTaskError:
        return explained(cause, rank, call)
    return cause


def _ends_rank(error: RayError, failure: Exception) -> bool:
    """Returns whether the process of a failed rank has ended or will end, so that its peers wait in vain.

    Args:
        failure: the `meaning_of` the error.
    """
    raised = error.cause if isinstance(error, RayTaskError) else failure
    # with an error that is none of ours the rank ends, whatever is made of it here
    return raised.ends_rank if isinstance(raised, SlimeError) else True


class Running:
    """The part of a call that later calls need to know: which ranks are at work on it. It holds no results."""

    def __init__(
        self,
        name: str,
        pending: dict[Any, int],
        timeout_s: float,
        watchdog: Watchdog | None,
        since: float | Running | None,
        setting: str,
    ) -> None:
        self.name = name
        self.pending = pending  # ref -> rank, of those that had not answered when last looked
        self.hung: WorkerHung | None = None  # what was said when it was last waited for
        self._has_aborted = False
        self._timeout_s = timeout_s
        self._watchdog = watchdog
        self._began = since if isinstance(since, float) else time.monotonic()
        self._behind = since if isinstance(since, Running) else None
        self._setting = setting

    @property
    def deadline(self) -> float:
        """When the call is overdue, of `time.monotonic`; it counts for the first call in line alone."""
        return self._began + self._timeout_s

    def has_ended(self) -> bool:
        """Returns whether all ranks have answered, whatever they said; waits for none."""
        if pending := self.pending:
            done = ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False)[0]
            ended = set(done)
            self.pending = {ref: rank for ref, rank in pending.items() if ref not in ended}
        return not self.pending

    def current(self) -> Running:
        """Returns the call that the ranks are at: this one, or one before it that has not ended."""
        current = self
        while (behind := current._behind) is not None:  # another thread may find at the same time that it has ended
            if behind.has_ended():
                current._behind, current._began = None, time.monotonic()
            else:
                current = behind
        return current

    def first_in_line(self) -> Running:
        """Returns the call that the ranks are at.

        Raises:
            WorkerHung: that is one before it, which hung when somebody waited for it, and is there still.
        """
        current = self.current()
        if current is not self:
            current.require_moving(self.name)
        return current

    def require_moving(self, name: str) -> None:
        """Refuses a later call while the ranks hang in this one.

        Raises:
            WorkerHung: this one hung and has not ended.
        """
        if self.hung is None or self.has_ended():
            return
        error = WorkerHung(
            f"{name} has to wait for {self.name}, which hung: {self.hung.message}",
            field=self.hung.field,
            hint="shut the group down and launch a new one, as actors.fault_tolerance does by itself",
            rank=self.hung.rank,
            call=self.hung.call,
        )
        error.stack = self.hung.stack
        raise error

    def look(self) -> None:
        """Makes the watchdog look at the ranks that have not answered.

        Raises:
            WorkerHung: one of them hangs.
        """
        if self._watchdog is None or self.has_ended():
            return
        try:
            self._watchdog.look(Waiting(self.name, list(self.pending.values()), self._began))
        except WorkerHung as error:
            self.hung = error
            raise

    def abort_collectives(self, lost: Collection[int]) -> None:
        """Makes the ranks that are left abort their collectives, which a loss alone may not end; once a call."""
        if self._watchdog is not None and not self._has_aborted:
            self._has_aborted = True
            self._watchdog.abort_collectives(lost)

    def overdue(self, ranks: Sequence[int], late: Sequence[int] = ()) -> WorkerHung:
        """Returns the error of this call when its deadline has passed.

        Args:
            ranks: that have not answered, as far as is known.
            late: those of them whose answers Ray has and did not hand over.
        """
        if self._watchdog is not None:
            self.hung = self._watchdog.overdue(Waiting(self.name, ranks, self._began), self._timeout_s, self._setting)
        else:
            self.hung = WorkerHung(
                f"{self.name} did not finish within {self._timeout_s:g} s",
                field=self._setting,
                hint="look at the rank's log, or raise the timeout",
                rank=ranks[0],
                call=self.name,
            )
        if late:
            answered = ", ".join(map(str, late))
            self.hung.others += (f"rank {answered} has answered, and Ray's object store does not hand the answer over",)
        return self.hung


class QueuedCall(Awaitable):
    """A call that a `Dispatcher` begins when it is its turn."""

    def __init__(self, begun: Begun[Any]) -> None:
        self._begun = begun

    def __repr__(self) -> str:
        if not self._begun.done():
            return "QueuedCall(it waits for its turn)"
        error = self._begun.exception()
        return f"QueuedCall({repr(self._begun.result()) if error is None else f'not begun: {error}'})"

    def result(self) -> Any:
        """Waits until the call has begun and ended; returns its result.

        Raises:
            Exception: with which it could not be begun; no rank has seen it then.
        """
        return self._begun.result().result()


class Dispatcher:
    """Begins calls one after another, in the order in which they were made, while their callers go on.

    Calls may be in lanes: those of a lane keep their order, and lanes take turns, a call each. So that a lane which
    comes later has its turn, no more than two calls are begun and not ended then.

    Its thread is there while there is something to begin. It is a daemon: what waits in it must not keep a program that
    ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # lane -> its calls; the lane whose turn is next comes first, and only those with calls are there
        self._waiting: OrderedDict[str | None, deque[tuple[Callable[[], Any], Begun[Any]]]] = OrderedDict()
        self._has_lanes = False
        self._unended: deque[Any] = deque()  # of the calls that were begun, where there are lanes
        self._thread: threading.Thread | None = None  # that begins them; any other has to end

    def submit(self, begin: Callable[[], Any], lane: str | None = None) -> QueuedCall:
        """Queues a call and returns at once.

        Args:
            begin: prepares a call, begins it and returns what it is waited for by, with a `has_ended`.
            lane: None is one, too.
        """
        return QueuedCall(self._put(begin, lane))

    def drain(self, timeout_s: float) -> None:
        """Waits until all calls that were made so far have begun, or failed to.

        Raises:
            TimeoutError: they have not in this time.
        """
        end = time.monotonic() + timeout_s
        with self._lock:
            lanes = [None, *(lane for lane in self._waiting if lane is not None)]
        for lane in lanes:
            self._put(lambda: None, lane).result(max(0.0, end - time.monotonic()))

    def _put(self, begin: Callable[[], Any], lane: str | None) -> Begun[Any]:
        begun: Begun[Any] = Begun()
        with self._lock:
            self._has_lanes |= lane is not None
            if self._thread is None:
                try:
                    self._thread = threading.Thread(target=self._run, name="slimefsdp-calls", daemon=True)
                    self._thread.start()
                except BaseException:  # no more threads, or Ctrl-C, after which it may be there all the same
                    self._thread = None
                    raise
            self._waiting.setdefault(lane, deque()).append((begin, begun))
        return begun

    def _run(self) -> None:
        while True:
            if self._has_lanes:
                self._wait_for_a_turn()
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if not self._waiting:
                    self._thread = None
                    return
                lane, calls = self._waiting.popitem(last=False)
                begin, begun = calls.popleft()
                if calls:
                    self._waiting[lane] = calls
            try:
                begun.set_result(found := begin())
                if self._has_lanes and found is not None:
                    self._unended.append(found)
                del found
            except BaseException as error:  # for whoever waits for it; the calls behind it have their turn
                begun.set_exception(error)
            del begin, begun  # they hold the batch

    def _wait_for_a_turn(self) -> None:
        while len(self._unended) > 1:
            try:
                has_ended = self._unended[0].has_ended()
            except Exception:  # Ray is gone, which whoever waits for the call is told
                has_ended = True
            if has_ended:
                self._unended.popleft()
            else:
                time.sleep(_TURN_S)


class CallQueue:
    """Gives calls to one set of actors, all in one order, whichever threads make them.

    Args:
        dispatcher: shared with another set of actors, so that the calls of both sets start in one order.
    """

    def __init__(self, dispatcher: Dispatcher | None = None) -> None:
        self.dispatcher = dispatcher or Dispatcher()
        self._lock = threading.Lock()  # calls in another order on another rank would have their collectives meet
        self._newest: Running | None = None

    def require_moving(self, name: str) -> None:
        """Refuses a call while the actors hang in an earlier one.

        Raises:
            WorkerHung: the actors hang in an earlier one.
        """
        if self._newest is not None:
            self._newest.current().require_moving(name)

    def begin(
        self,
        start: Callable[[], Sequence[Any]],
        *,
        name: str,
        timeout_s: float,
        first_only: bool,
        watchdog: Watchdog | None = None,
        counts_from_now: bool = False,
        setting: str = "cluster.call_timeout_s",
    ) -> CallFuture:
        """Makes a call.

        Args:
            start: gives it to all actors; returns one reference per rank.
            counts_from_now: the timeout, and not from when the calls before it have ended.
            setting: that the timeout is from.

        Raises:
            WorkerHung: the actors hang in an earlier one; they have not been given this one.
        """
        with self._lock:
            self.require_moving(name)
            behind = None if self._newest is None or self._newest.has_ended() else self._newest
            future = CallFuture(
                start(),
                name=name,
                timeout_s=timeout_s,
                first_only=first_only,
                watchdog=watchdog,
                since=None if counts_from_now else behind,
                setting=setting,
            )
            self._newest = future.running
            return future


def _root_cause(failures: list[tuple[int, Exception]]) -> Exception:
    """Returns the error to report of several ranks: a death first, then a typed error, any other, a lost peer.

    A typed one gets what the others said besides.
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
            if error is not cause and _words(error) != _words(cause):
                others.setdefault(_words(error), []).append(str(rank))
        cause.others += tuple(f"rank {', '.join(ranks)}: {words}" for words, ranks in others.items())
    return cause


def _words(error: Exception) -> str:
    """Returns the error's words in one line, without the rank."""
    said = error.message if isinstance(error, SlimeError) else str(error.args[0] if error.args else "")
    return f"{type(error).__name__}: {said.strip().partition(chr(10))[0]}"
