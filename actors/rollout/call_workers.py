"""Processes that run the user's own code, each call with a deadline: one that hangs or ends costs its call alone."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from actors.cluster.ray_errors import end_processes, require_cluster
from actors.startup import answered, stage
from actors.workers.futures import SLICE_S
from slimefsdp.errors import ResourceError, SlimeError, StateError

# A worker runs plain code for one call after another until so long has passed; then it hands over what it has. Short
# enough that workers end a step together, long enough that cheap code is not one message a call.
TURN_S = 0.2
_GET_S = 10.0  # for an answer that Ray says is here
LATE_S = 2.0  # for the answer itself, on a busy machine

CallT = TypeVar("CallT")
OutcomeT = TypeVar("OutcomeT")


@dataclass(slots=True)
class Worker:
    """One process as the driver knows it."""

    index: int
    actor: Any
    ref: Any  # of what it does: coming up, or calls
    places: list[int] = field(default_factory=list)  # of the calls that it was given
    pending: Any = None  # whose calls these are
    began: float = field(default_factory=time.monotonic)


class CallWorkers(ABC, Generic[CallT, OutcomeT]):
    """The processes, replaced where they hang or end.

    An actor that a subclass starts has `run(calls)`, which returns the outcomes of the first of them, one or more; what
    the user's code raised is such an outcome.

    Args:
        count: of processes.
        name: of the code that they run, for people; `setting` says how many there are.
        timeout_s: for each call. more_s: for what else it does before it answers.
        calls_at_once: in one process; None: one after another.
    """

    def __init__(
        self,
        count: int,
        *,
        name: str,
        setting: str,
        timeout_s: float,
        launch_timeout_s: float,
        calls_at_once: int | None,
        more_s: float = 0.0,
    ) -> None:
        self.name, self.setting = name, setting
        self._timeout_s, self._launch_timeout_s = timeout_s, launch_timeout_s
        self._calls_at_once = calls_at_once
        self._more_s = more_s + TURN_S + LATE_S
        self._workers = [Worker(index, *self._started()) for index in range(count)]
        self._lock = threading.Lock()  # of what workers are known to do

    @abstractmethod
    def _actor(self, options: dict[str, Any]) -> Any:
        """A new process."""

    @abstractmethod
    def _lost(self, call: CallT, how: str | None) -> SlimeError:
        """The outcome of a call whose process ended (how it did) or did not return in time (None)."""

    def _home(self, call: CallT) -> int | None:
        """The index of the worker that is to run it; None: any."""
        return None

    def _most_runs(self, worker: Worker, call: CallT) -> int:
        """How often the user's code may run for one call, each time within the deadline."""
        return 1

    def _answered(self, worker: Worker, call: CallT) -> None:
        """Told of each outcome that came back."""

    def wait_until_up(self, what: str) -> None:
        """
        Raises:
            ResourceError: a process did not come up; all are ended.
        """
        try:
            refs = [worker.ref for worker in self._workers]
            with stage(f"starting {len(refs)} {what}", answered(refs), is_short=True):
                for worker in self._workers:
                    self._wait_until_up(worker)
        except BaseException:
            self.shutdown()
            raise

    def pending(self) -> PendingCalls[CallT, OutcomeT]:
        """For calls that come one after another: workers run the first while others are still to come.

        A process that ends or does not return in time is replaced. What it had been given is then asked for one by one,
        so that the error names the call at fault.

        Raises:
            ResourceError: of its methods: a process that was to replace another did not come up, or Ray is gone.
        """
        return PendingCalls(self)

    def shutdown(self) -> None:
        """Ends the processes; idempotent."""
        end_processes([worker.actor for worker in self._workers])
        self._workers = []

    def _allowed_s(self, worker: Worker) -> float:
        if not worker.places:
            return self._launch_timeout_s
        runs = max(self._most_runs(worker, worker.pending.calls[place]) for place in worker.places)
        return self._timeout_s * runs + self._more_s

    def _started(self) -> tuple[Any, Any]:
        # no CPU of the cluster's is counted for it: ranks and engines have theirs, and what it runs mostly waits
        actor = self._actor({"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"})
        return actor, actor.__ray_ready__.remote()

    def _replace(self, worker: Worker) -> None:
        end_processes([worker.actor])
        worker.actor, worker.ref = self._started()
        worker.places, worker.began = [], time.monotonic()

    def _wait_until_up(self, worker: Worker) -> None:
        deadline = worker.began + self._launch_timeout_s
        while not ray.wait([worker.ref], timeout=SLICE_S)[0]:
            require_cluster()
            if time.monotonic() > deadline:
                raise self._did_not_come_up(f"within {self._launch_timeout_s:g} s")
        try:
            ray.get(worker.ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            raise self._did_not_come_up(f"({_said(error)})") from error
        worker.ref = None

    def _did_not_come_up(self, how: str) -> ResourceError:
        return ResourceError(
            f"a process that calls {self.name} did not come up {how}",
            field=self.setting,
            hint="look at its log; module, data and packages must be there on every node",
        )


class PendingCalls(Generic[CallT, OutcomeT]):
    """Calls that the workers run, beside those of others."""

    def __init__(self, workers: CallWorkers[CallT, OutcomeT]) -> None:
        self._all = workers
        self.calls: list[CallT] = []
        # places of calls that no worker has: those that one of them is to run, and those that any may
        self._of_worker: dict[int, deque[int]] = {worker.index: deque() for worker in workers._workers}
        self._of_any: deque[int] = deque()
        self._alone: set[int] = set()  # of these one is at fault
        self._outcomes: dict[int, OutcomeT | SlimeError] = {}
        self._is_complete = False

    def add(self, call: CallT) -> None:
        """Has one more run; does not wait for it."""
        self._require_workers()
        self._queue_of(call).append(len(self.calls))
        self.calls.append(call)
        self._advance(0.0)

    def finish(self) -> list[OutcomeT | SlimeError]:
        """Waits for all; the outcomes in the order in which calls were added."""
        self._is_complete = True
        while len(self._outcomes) < len(self.calls):
            self._require_workers()
            self._advance(SLICE_S)
        return [self._outcomes[place] for place in range(len(self.calls))]

    def _require_workers(self) -> None:
        if not self._all._workers:
            problem = f"the processes that call {self._all.name} were shut down"
            raise StateError(problem, field=self._all.setting, hint="launch others")

    def _queue_of(self, call: CallT) -> deque[int]:
        home = self._all._home(call)
        return self._of_any if home is None else self._of_worker[home]

    def _advance(self, wait_s: float) -> None:
        """Takes in what workers have done, waiting so long for something, and gives them more to do.

        What belongs to other pending calls is handed over to those, which may be waited for on another thread.
        """
        require_cluster()
        workers = self._all._workers
        with self._all._lock:
            for worker in workers:
                if worker.ref is None and (self._of_worker[worker.index] or self._of_any):
                    worker.places, worker.began, worker.pending = self._next_places(worker), time.monotonic(), self
                    worker.ref = worker.actor.run.remote([self.calls[place] for place in worker.places])
            busy = [worker.ref for worker in workers if worker.ref is not None]
        done = ray.wait(busy, num_returns=1, timeout=wait_s)[0] if busy else []
        with self._all._lock:
            for worker in workers:
                if worker.ref is not None and worker.ref in done:
                    self._take_in(worker)
            for worker in workers:
                if worker.ref is None or time.monotonic() - worker.began <= self._all._allowed_s(worker):
                    continue
                if not worker.places:
                    raise self._all._did_not_come_up(f"within {self._all._launch_timeout_s:g} s")
                places = worker.places
                self._all._replace(worker)
                worker.pending._are_lost(places, None)

    def _take_in(self, worker: Worker) -> None:
        ref, places = worker.ref, worker.places
        worker.ref, worker.places = None, []
        try:
            found = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            if not places:
                raise self._all._did_not_come_up(f"({_said(error)})") from error
            self._all._replace(worker)
            is_of_memory = isinstance(error, OutOfMemoryError)  # which need not be the fault of what ran there
            ended = "lost its process, which Ray ended for want of memory on its machine,"
            worker.pending._are_lost(places, ended if is_of_memory else f"ended its process ({_said(error)})")
            return
        if places:
            for place, outcome in zip(places, found, strict=False):
                worker.pending._outcomes[place] = outcome
                self._all._answered(worker, worker.pending.calls[place])
            worker.pending._give_back(places[len(found) :])

    def _give_back(self, places: Sequence[int]) -> None:
        for place in reversed(places):
            self._queue_of(self.calls[place]).appendleft(place)

    def _next_places(self, worker: Worker) -> list[int]:
        """What a worker is given now: less and less, so that all of them have something to do until the end."""
        own, shared = self._of_worker[worker.index], self._of_any
        queue = own or shared
        if queue[0] in self._alone:
            return [queue.popleft()]
        share = len(own) or -(-len(shared) // len(self._all._workers))
        if self._all._calls_at_once is not None:
            share = min(share, self._all._calls_at_once)
        elif self._is_complete and queue is shared:
            share = -(-share // 2)
        places = [queue.popleft()]
        while len(places) < share and queue[0] not in self._alone:
            places.append(queue.popleft())
        return places

    def _are_lost(self, places: list[int], how: str | None) -> None:
        """A worker has not come back with these. Of several calls one was at fault: they are asked for one by one.

        Args:
            how: it was lost; None: it did not return in time.
        """
        if len(places) > 1:
            self._give_back(places)
            self._alone.update(places)
            return
        self._outcomes[places[0]] = self._all._lost(self.calls[places[0]], how)


def _said(error: RayError) -> str:
    # what was raised in it is the last line, below where
    if getattr(error, "actor_init_failed", False) or isinstance(error, RayTaskError):
        return str(error).strip().splitlines()[-1]
    return next(iter(str(error).splitlines()), type(error).__name__)
