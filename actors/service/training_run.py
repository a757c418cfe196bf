"""A training run, whose thread performs each request of the client once, in the order of the requests' numbers."""

from __future__ import annotations

import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.service.catalogue import Progress, Saved
from actors.service.results import Answer, Result, Results, require_same_kind
from actors.workers.group_calls import GroupCalls
from slimefsdp.errors import SlimeError, StateError

RequestKind = Literal["make", "forward", "forward_backward", "optim_step", "save", "save_for_sampler", "load"]
MAKE = 0  # the number of the request that creates a run; clients number their requests from 1
_REMEMBERED = 4096  # number of the newest requests that get the same answer when they are repeated
_GAP = 4096  # how far the number of a request may be ahead of the next request to perform
_PARALLEL: tuple[RequestKind, ...] = ("forward", "forward_backward")  # clients send only these kinds in parallel


@dataclass(slots=True)
class _Request:
    number: int
    kind: RequestKind
    do: Callable[[GroupCalls], Answer]
    result: Result


@dataclass(slots=True, eq=False)
class TrainingRun:
    """A training run; its thread performs the client's requests.

    Args:
        id: the run's id in the clients' API.
        owner: the id of the user whose client created the run.
        rank: the rank of the run's adapter; 0 means all weights of the model.
        calls: the group's calls for this run.
        made_by: (kind, result) of the request that created the run; None if an earlier start of the server created it.
        next_number: the number of the next request to perform.
        incomplete: the error of a failed forward_backward, after which gradients are incomplete; None if none failed.
        has_gradients: whether there are gradients that no update has used.
        redone: for a resumed run, (time of the server's start, number of a request). Requests from this number on may
            have been performed before the start; they are performed again.
        resumed_at: the path of the checkpoint from which the run was resumed, until it is known whether requests were
            lost; then None.
        lost: the first and last number of lost requests, and the path of the checkpoint to go back to, until the client
            has loaded a checkpoint; then None.
        is_ending: whether the client has ended the run or its session.
    """

    id: str
    session: str
    owner: str
    rank: int
    calls: GroupCalls
    results: Results
    user_metadata: dict[str, Any] = field(default_factory=dict)
    made_by: tuple[str, Result] | None = None
    next_number: int = 1
    updates: int = 0
    tokens: int = 0
    last_request: float = field(default_factory=time.time)
    incomplete: Exception | None = None
    has_gradients: bool = False
    redone: tuple[float, int] | None = None
    resumed_at: str | None = None
    lost: tuple[int, int, str] | None = None
    is_ending: bool = False
    _waiting: dict[int, _Request] = field(default_factory=dict)
    _newest: float = 0.0  # the time.monotonic() at which the newest request arrived
    _by_number: OrderedDict[int, tuple[RequestKind, Result]] = field(default_factory=OrderedDict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _is_busy: bool = False
    _is_stopped: bool = False
    _at_end: Callable[[], None] | None = None
    _thread: threading.Thread | None = None

    def submit(self, number: int, kind: RequestKind, do: Callable[[GroupCalls], Answer], size: int = 0) -> Result:
        """Accepts a request; a request with a known number is a repetition, and is not performed again.

        Args:
            number: the number of the request in the run; the request waits for all earlier numbers.
            do: performs the request with the run's calls.
            size: bytes of the request's body.

        Raises:
            StateError: the run has ended, or the number is too old, too far ahead, or that of another kind of request.
            ResourceError: too many requests wait. An idle run always accepts its next request, since the waiting
                requests may need it.
        """
        with self._changed:
            self.last_request = time.time()
            if (known := self._by_number.get(number)) is not None:
                require_same_kind("seq_id", number, known[0], kind)
                return known[1]
            if self._is_stopped:
                raise self._ended_error()
            if self.resumed_at is not None and kind not in _PARALLEL and number >= self.next_number:
                self._skip_lost(number)
            if not self.next_number <= number < self.next_number + _GAP:
                problem = f"seq_id={number}, and the next request to perform is {self.next_number}"
                raise StateError(problem, field="seq_id", hint="number requests 1, 2, 3, ..")
            is_needed = not self._is_busy and number == self.next_number
            result = self.results.new(self.owner, size, is_needed=is_needed, model_id=self.id)
            self._by_number[number] = kind, result
            self._waiting[number] = _Request(number, kind, do, result)
            self._newest = time.monotonic()
            while len(self._by_number) > _REMEMBERED and next(iter(self._by_number)) < self.next_number:
                self._by_number.popitem(last=False)
            self._wake()
        return result

    @property
    def waiting(self) -> int:
        """Returns how many accepted requests have not begun."""
        return len(self._waiting)

    @property
    def begun(self) -> int:
        """Returns the number of the last request that has begun."""
        return self.next_number - 1

    def resume(self, progress: Progress) -> None:
        """Sets the run's progress to the progress at a checkpoint, which was just loaded."""
        self.next_number = progress.next_number
        self.updates, self.tokens = progress.updates, progress.tokens
        self.redone = time.time(), progress.next_number
        if progress.has_gradients:
            self.incomplete = StateError("the server was restarted", field="forward_backward")

    def was_lost(self, saved: Saved) -> bool:
        """Returns whether a request after the checkpoint from which the run was resumed wrote this save."""
        return self.redone is not None and saved.time < self.redone[0] and saved.request >= self.redone[1]

    def refuse_behind_lost(self, after_s: float) -> None:
        """Fails requests that have waited for `after_s` for missing requests; must be called every few seconds.

        A client sends the parts of a forward_backward at the same time, so a part may overtake earlier parts. Earlier
        parts that never arrive were lost before the run was resumed from a checkpoint.
        """
        with self._changed:
            if self.resumed_at is not None and time.monotonic() - self._newest >= after_s:
                missing = self._first_missing()
                if late := [number for number in self._waiting if number > missing]:
                    self._skip_lost(min(late))
                    self._wake()

    def stop(self, at_end: Callable[[], None] | None = None, *, finishes: bool = False) -> None:
        """Makes the run refuse new requests, and returns at once. The run's thread ends after the request in progress.

        Args:
            at_end: a function that the run's thread calls at its end.
            finishes: whether waiting requests are performed first, up to the first missing number; otherwise they fail.
        """
        with self._changed:
            if not self._is_stopped:
                self._is_stopped, self._at_end = True, at_end
                if not finishes:
                    self._fail_waiting()
                self._wake()

    def join(self) -> None:
        """Waits for the thread of a stopped run to end."""
        if self._thread is not None:
            self._thread.join()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run_thread, name=f"run {self.id}", daemon=True)
            self._thread.start()
        self._changed.notify()

    def _first_missing(self) -> int:
        number = self.next_number
        while number in self._waiting:
            number += 1
        return number

    def _skip_lost(self, number: int) -> None:
        """Makes the request `number` the next request; missing requests before it are lost, waiting requests fail."""
        missing = self._first_missing()
        if number > missing and self.resumed_at is not None:
            last = min([number, *(waiting for waiting in self._waiting if waiting > missing)]) - 1
            self.lost = missing, last, self.resumed_at
            for early in [waiting for waiting in self._waiting if waiting < number]:
                self._waiting.pop(early).result.fail(self._lost_error(self.lost))
            self.next_number = number
        self.resumed_at = None

    def _lost_error(self, lost: tuple[int, int, str]) -> StateError:
        first, last, path = lost
        return StateError(
            f"requests {first} to {last} of {self.id} were lost when the server ended, and the run is as it was "
            f"after update {self.updates}",
            field="seq_id",
            hint=f"load {path} into the run, or create a training client from it, and continue from there",
        )

    def _ended_error(self) -> StateError:
        return StateError(f"{self.id} has ended", field="model_id", hint="create another training client")

    def _fail_waiting(self) -> None:
        for request in self._waiting.values():
            request.result.fail(self._ended_error())
        self._waiting.clear()

    def _next(self) -> _Request | None:
        """Waits for the next request; returns None at the end of a stopped run."""
        with self._changed:
            self._is_busy = False
            while (request := self._waiting.pop(self.next_number, None)) is None:
                if self._is_stopped:
                    self._fail_waiting()  # the remaining requests wait for a missing number
                    return None
                self._changed.wait()
            self.next_number += 1
            self._is_busy = True
            return request

    def _run_thread(self) -> None:
        while (request := self._next()) is not None:
            try:
                request.result.set(self._perform(request))
            except Exception as error:
                if not isinstance(error, SlimeError):  # a bug of ours: the client gets the error, and the run continues
                    print(f"{self.id}: {request.kind}: {error!r}", file=sys.stderr, flush=True)
                request.result.fail(error)
            del request  # its body may be large, and the next request may come much later
        if self._at_end is not None:
            self._at_end()

    def _perform(self, request: _Request) -> Answer:
        if self.lost is not None and request.kind != "load":
            raise self._lost_error(self.lost)
        if request.kind == "optim_step" and self.incomplete is not None:
            why, self.incomplete, self.has_gradients = self.incomplete, None, False
            self.calls.zero_grad()
            raise StateError(
                f"no update was made, since a forward_backward before it failed: {why}",
                field="optim_step",
                hint="the gradients were dropped: send the whole batch again",
            )
        try:
            answer = request.do(self.calls)
        except Exception as error:
            if request.kind == "forward_backward":
                self.incomplete = self.incomplete or error
            raise
        if request.kind == "forward_backward":
            self.has_gradients = True
        if request.kind == "load":  # a load drops gradients
            self.has_gradients, self.incomplete, self.lost = False, None, None
        return answer
