"""A client's training run: an adapter, and its requests, done once each in the order of their numbers."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.service.results import Answer, Result, Results
from actors.workers.group_calls import AdapterCalls
from slimefsdp.errors import SlimeError, StateError

RequestKind = Literal["forward", "forward_backward", "optim_step", "save", "load"]
_REMEMBERED = 4096  # answered numbers whose request, sent again, gets its answer again
_GAP = 4096  # numbers that may be missing before one that was sent


@dataclass(slots=True)
class _Request:
    kind: RequestKind
    do: Callable[[AdapterCalls], Answer]
    result: Result


@dataclass(slots=True, eq=False)
class TrainingRun:
    """One run; its thread does what its client asks for.

    Args:
        id: as clients know it.
        owner: the id of the user whose client made it.
        calls: of the group, for the run's adapter.
        next_number: of the request that is to be done next.
    """

    id: str
    session: str
    owner: str
    rank: int
    calls: AdapterCalls
    results: Results
    user_metadata: dict[str, Any] = field(default_factory=dict)
    next_number: int = 1
    updates: int = 0
    tokens: int = 0
    last_request: float = field(default_factory=time.time)
    incomplete: Exception | None = None  # why the gradients gathered so far are not what was asked for
    has_gradients: bool = False  # that no update was made of
    _early: dict[int, _Request] = field(default_factory=dict)
    _by_number: OrderedDict[int, Result] = field(default_factory=OrderedDict)
    _queue: queue.SimpleQueue[_Request | None] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _thread: threading.Thread | None = None

    def submit(self, number: int, kind: RequestKind, do: Callable[[AdapterCalls], Answer]) -> Result:
        """Takes a request; one whose number was seen before is the same request, and is not done again.

        Args:
            number: of the request in the run, from 1; it waits for those before it.
            do: what is done, with the calls of the run's adapter.

        Raises:
            StateError: the run has ended, or the number is too old or too far ahead.
        """
        with self._lock:
            self.last_request = time.time()
            if (known := self._by_number.get(number)) is not None:
                return known
            if self._is_closed:
                raise StateError(f"{self.id} has ended", field="model_id", hint="create another training client")
            if not self.next_number <= number < self.next_number + _GAP:
                problem = f"seq_id={number}, and the next one to be done is {self.next_number}"
                raise StateError(problem, field="seq_id", hint="number requests 1, 2, 3, ..")
            result = self._by_number[number] = self.results.new(self.owner)
            self._early[number] = _Request(kind, do, result)
            while (ready := self._early.pop(self.next_number, None)) is not None:
                self.next_number += 1
                self._queue.put(ready)
            while len(self._by_number) > _REMEMBERED and next(iter(self._by_number)) < self.next_number:
                self._by_number.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"run {self.id}", daemon=True)
                self._thread.start()
        return result

    @property
    def waiting(self) -> int:
        """Requests that are taken and not begun."""
        return self._queue.qsize() + len(self._early)

    def close(self, *, finishes: bool = False) -> None:
        """Takes no more requests, and returns when none is being done.

        Args:
            finishes: what waits is done first, but for requests before which others are missing; else it fails.
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
            try:
                request.result.set(self._done(request))
            except SlimeError as error:
                request.result.fail(error)
            except Exception as error:  # a defect of ours: the client is told, and others go on
                print(f"{self.id}: {request.kind}: {error!r}", file=sys.stderr, flush=True)
                request.result.fail(error)

    def _done(self, request: _Request) -> Answer:
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
        if request.kind == "optim_step":
            self.updates += 1
        if request.kind in ("optim_step", "forward_backward", "load"):
            self.has_gradients = request.kind == "forward_backward"
        return answer
