"""A client's training run, which performs each request once, in the order of their numbers."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from actors.service.catalogue import Progress, Saved
from actors.service.results import Answer, Result, Results
from actors.workers.group_calls import GroupCalls
from slimefsdp.errors import SlimeError, StateError

RequestKind = Literal["forward", "forward_backward", "optim_step", "save", "save_for_sampler", "load"]
_REMEMBERED = 4096  # answered requests that get the same answer when they are repeated
_GAP = 4096  # numbers that may be missing before a request
_PARALLEL: tuple[RequestKind, ...] = ("forward", "forward_backward")  # clients send the others one after another


def require_same_kind(field: str, number: int, known: str, asked: str) -> None:
    """Refuses a request with the number of an earlier one, unless it can be a repetition of that one.

    Args:
        field: the field that has the number.
        known: the kind of the earlier request.

    Raises:
        StateError: this request is of another kind.
    """
    if known != asked:
        problem = f"{field}={number} was the number of a {known}, and is now that of a {asked}"
        raise StateError(problem, field=field, hint="give each request a number of its own")


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
        owner: the id of the user whose client made it.
        rank: the rank of its adapter; 0: it trains all weights.
        calls: the group's calls for this run.
        next_number: the number of the next request to accept.
        begun: the number of the request that was begun last.
        incomplete: the error because of which the gradients so far are incomplete.
        has_gradients: whether there are gradients that no update has used.
        redone: (time, number) of a resumed run: requests from this number on may have been done before this time, in an
            earlier start, and are done again.
        resumed_at: the path of the checkpoint from which a start resumed the run, until it is known whether requests
            were lost.
        is_ending: is set as soon as the run is to end; `close` may have to wait.
        is_made: is set once the run was made, or could not be.
        lost: the first and last number of lost requests, and `resumed_at`, until the client loads a checkpoint.
    """

    id: str
    session: str
    owner: str
    rank: int
    calls: GroupCalls
    results: Results
    user_metadata: dict[str, Any] = field(default_factory=dict)
    next_number: int = 1
    updates: int = 0
    tokens: int = 0
    last_request: float = field(default_factory=time.time)
    begun: int = 0
    incomplete: Exception | None = None
    has_gradients: bool = False
    redone: tuple[float, int] | None = None
    resumed_at: str | None = None
    lost: tuple[int, int, str] | None = None
    is_ending: bool = False
    is_made: threading.Event = field(default_factory=threading.Event)
    _early: dict[int, _Request] = field(default_factory=dict)
    _early_since: float = 0.0  # when the newest of them came, by time.monotonic
    _by_number: OrderedDict[int, tuple[RequestKind, Result]] = field(default_factory=OrderedDict)
    _queue: queue.SimpleQueue[_Request | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _is_busy: bool = False
    _thread: threading.Thread | None = None

    def submit(self, number: int, kind: RequestKind, do: Callable[[GroupCalls], Answer], size: int = 0) -> Result:
        """Accepts a request; one with a known number is a repetition, and is not done again.

        Args:
            number: the number of the request in the run, from 1; it waits for the requests before it.
            do: performs the request with the run's calls.
            size: bytes of its body.

        Raises:
            StateError: the run has ended, or the number is too old, too far ahead, or that of another kind of request.
            ResourceError: there is no room for it. An idle run accepts its next request in any case, since the requests
                that fill the room may be waiting for it.
        """
        with self._lock:
            self.last_request = time.time()
            if (known := self._by_number.get(number)) is not None:
                require_same_kind("seq_id", number, known[0], kind)
                return known[1]
            if self._is_closed:
                raise StateError(f"{self.id} has ended", field="model_id", hint="create another training client")
            if self.resumed_at is not None and kind not in _PARALLEL and number >= self.next_number:
                self._skip_lost(number)
            if not self.next_number <= number < self.next_number + _GAP:
                problem = f"seq_id={number}, and the next one to be done is {self.next_number}"
                raise StateError(problem, field="seq_id", hint="number requests 1, 2, 3, ..")
            is_idle = not self._is_busy and self._queue.empty()
            result = self.results.new(self.owner, size, is_needed=is_idle and number == self.next_number)
            self._by_number[number] = kind, result
            self._early[number] = _Request(number, kind, do, result)
            self._early_since = time.monotonic()
            self._queue_ready()
            while len(self._by_number) > _REMEMBERED and next(iter(self._by_number)) < self.next_number:
                self._by_number.popitem(last=False)
        return result

    def resume(self, progress: Progress) -> None:
        """Continues after a checkpoint that was just loaded."""
        self.next_number, self.begun = progress.next_number, progress.next_number - 1
        self.updates, self.tokens = progress.updates, progress.tokens
        self.redone = time.time(), progress.next_number
        if progress.has_gradients:
            self.incomplete = StateError("the server was started anew", field="forward_backward")

    def was_lost(self, saved: Saved) -> bool:
        """Returns whether the request that saved it was lost with an earlier start, so that it may be repeated."""
        return self.redone is not None and saved.time < self.redone[0] and saved.request >= self.redone[1]

    def save(self, name: str | None = None, *, overwrite: bool = False) -> None:
        """Writes a checkpoint with the run's progress up to the request that was begun last.

        Args:
            name: writes it under this name, besides those by step.

        Raises:
            CheckpointError: the name is taken, or it cannot be written.
        """
        has_gradients = self.has_gradients or self.incomplete is not None
        progress = Progress(self.id, self.begun + 1, self.updates, self.tokens, has_gradients)
        self.calls.save(self.updates, asdict(progress), name, overwrite)

    def refuse_behind_lost(self, after_s: float) -> None:
        """Fails requests that wait too long for lost ones; it is to be called every few seconds.

        A client sends the parts of a forward_backward at the same time, so that a part may overtake earlier ones. The
        earlier ones can only be missing for good after a start that resumed from a checkpoint.
        """
        with self._lock:
            if self.resumed_at is not None and self._early and time.monotonic() - self._early_since >= after_s:
                self._skip_lost(min(self._early))
                self._queue_ready()

    def _skip_lost(self, number: int) -> None:
        """Continues with the request of this number; those that are missing before it were lost."""
        if number > self.next_number and self.resumed_at is not None:
            self.lost = (self.next_number, min(self._early, default=number) - 1, self.resumed_at)
            for early in [waiting for waiting in self._early if waiting < number]:
                self._early.pop(early).result.fail(self._of_lost(self.lost))
            self.next_number = number
        self.resumed_at = None

    def _of_lost(self, lost: tuple[int, int, str]) -> StateError:
        first, last, path = lost
        return StateError(
            f"requests {first} to {last} of {self.id} were lost when the server ended, and it is where it was after "
            f"update {self.updates}",
            field="seq_id",
            hint=f"load {path} into it, or create a training client from that, and go on from there",
        )

    def _queue_ready(self) -> None:
        while (ready := self._early.pop(self.next_number, None)) is not None:
            self.next_number += 1
            self._queue.put(ready)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"run {self.id}", daemon=True)
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Returns the number of requests that were accepted and not begun."""
        return self._queue.qsize() + len(self._early)

    def close(self, *, finishes: bool = False) -> None:
        """Accepts no more requests, and returns when none is being done.

        Args:
            finishes: performs waiting requests first, unless earlier ones are missing; otherwise they fail.
        """
        with self._lock:
            self._is_closed = True
            left = list(self._early.values())
            self._early = {}
            while not finishes and not self._queue.empty():
                if (request := self._queue.get()) is not None:
                    left.append(request)
        gone = StateError(f"{self.id} has ended", field="model_id", hint="create another training client")
        for request in left:
            request.result.fail(gone)
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (request := self._queue.get()) is not None:
            self._is_busy = True
            try:
                request.result.set(self._done(request))
            except SlimeError as error:
                request.result.fail(error)
            except Exception as error:  # a bug of ours: the client gets it, and the run goes on
                print(f"{self.id}: {request.kind}: {error!r}", file=sys.stderr, flush=True)
                request.result.fail(error)
            self._is_busy = False
            del request  # its body may be large, and the next request may come much later

    def _done(self, request: _Request) -> Answer:
        self.begun = request.number
        if self.lost is not None and request.kind != "load":
            raise self._of_lost(self.lost)
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
