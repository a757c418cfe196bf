"""Runs the user's code in processes with a deadline for each call: one that hangs or ends costs only its own call.

A call contains all responses of its episode so far. It goes to the process that has the episode's environment; if that
process was lost, another one makes the environment again and repeats the episode.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from actors.cluster.ray_errors import end_processes, require_cluster
from actors.rollout.environment import is_async
from actors.rollout.user_code import (
    TURN_S,
    Answer,
    CallsHere,
    CodeHost,
    EpisodeCall,
    EpisodeKey,
    UserCode,
    checked_code,
)
from actors.startup import answered, stage
from actors.workers.futures import SLICE_S
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError, SlimeError, StateError, portable

_GET_S = 10.0  # limit on fetching an answer that Ray reports as ready
_LATE_S = 2.0  # extra time for an answer to arrive on a busy machine


class UserCodeWorker:
    """A Ray actor that runs the user's code in its own process.

    Args:
        search_path: the sys.path with which the driver found the code.
    """

    def __init__(self, code: UserCode, search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        # a member, not a base class: Ray would make an asynchronous actor of a class with coroutines
        self._host = CodeHost(code)

    def run(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        outcomes = self._host.run(calls)
        return [portable(outcome) if isinstance(outcome, SlimeError) else outcome for outcome in outcomes]  # type: ignore[misc]

    def forget(self, number: int) -> None:
        self._host.forget(number)


@dataclass(slots=True)
class _Worker:
    """The driver's record of one process."""

    index: int
    actor: Any
    ref: Any  # the process's start or its running calls; None if it is idle
    indices: list[int] = field(default_factory=list)  # the indices of the calls that it runs
    pending: Any = None  # the `PendingCalls` that these indices belong to
    began: float = field(default_factory=time.monotonic)


class UserCodeWorkers:
    """Runs the user's code in processes, which are replaced if they hang or end, or in the driver itself.

    Args:
        config: names the environment or the reward function; the driver runs it if `rollout.reward_workers` is 0.
        in_driver: the driver runs the code whatever the settings say.

    Raises:
        ConfigError: as in `checked_code`; it is raised here, so that a wrong name is one error, not one per process.
    """

    def __init__(self, config: RunConfig, *, in_driver: bool = False) -> None:
        self.code, environment = checked_code(config)
        self._launch_timeout_s = config.cluster.launch_timeout_s
        self._calls_at_once = self.code.concurrency if is_async(environment) else None
        self._more_s = self.code.close_s(environment) + TURN_S + _LATE_S
        self._kept_by: dict[EpisodeKey, Any] = {}  # the process that answered last in an episode, and has its state
        self._lock = threading.Lock()  # guards `_workers` and `_kept_by`
        count = 0 if in_driver else self.code.workers
        self._host = None if count else CodeHost(self.code)
        self._workers = [_Worker(index, *self._started()) for index in range(count)]

    @classmethod
    def launch(cls, config: RunConfig) -> UserCodeWorkers:
        """Starts the processes and waits for them.

        Raises:
            ConfigError: as in the constructor. ResourceError: a process did not come up; all are ended.
        """
        workers = cls(config)
        try:
            refs = [worker.ref for worker in workers._workers]
            what = f"{len(refs)} processes for {'the reward' if workers.code.is_reward else 'environments'}"
            with stage(f"starting {what}", answered(refs), is_short=True):
                for worker in workers._workers:
                    workers._wait_until_up(worker)
        except BaseException:
            workers.shutdown()
            raise
        return workers

    def pending(self) -> PendingCalls | CallsHere:
        """Returns an object to which calls are added one by one; the first run while others are still being added.

        A process that ends or does not return in time is replaced. The calls that it was running are then run one by
        one, so that the error names the call at fault.

        Raises:
            ResourceError: (by the methods of the object) a replacement did not come up, or Ray is gone.
        """
        return PendingCalls(self) if self._host is None else CallsHere(self._host)

    def forget(self, number: int) -> None:
        """Has the processes close the environments that remain of one call of the driver."""
        if self.code.is_reward:
            return
        if self._host is not None:
            self._host.forget(number)
        with self._lock:  # other episodes may be running on another thread
            self._kept_by = {key: actor for key, actor in self._kept_by.items() if key[0] != number}
        with suppress(Exception):  # if Ray is gone, the next wait for an answer reports it
            for worker in self._workers:
                worker.actor.forget.remote(number)

    def shutdown(self) -> None:
        """Ends the processes; may be called more than once."""
        end_processes([worker.actor for worker in self._workers])
        self._workers = []

    def _home(self, call: EpisodeCall) -> int | None:
        """Returns the index of the process that has the episode; None: any process can run the call."""
        _, index, number = call.key
        return None if self.code.is_reward else (index + number) % len(self._workers)

    def _allowed_s(self, worker: _Worker) -> float:
        """Returns the seconds within which a process has to start, or to answer its calls."""
        if not worker.indices:
            return self._launch_timeout_s
        runs = max(self._most_runs(worker, worker.pending.calls[index]) for index in worker.indices)
        return self.code.timeout_s * runs + self._more_s

    def _most_runs(self, worker: _Worker, call: EpisodeCall) -> int:
        """Returns how often the code runs for one call: once, or to make the object, its prompt and each turn again."""
        is_one = self.code.is_reward or self._kept_by.get(call.key) is worker.actor
        return 1 if is_one else call.turn + 2

    def _lost(self, call: EpisodeCall, reason: str | None) -> SlimeError:
        """Returns the outcome of a call whose process was lost; `how` says how it ended, None if it hung."""
        if reason is None:
            return self.code.overdue(call, call.turn, "" if self.code.is_reward else ", or its close(),")
        hint = f"{self.code.correct_it}, or look at the memory of its node"
        return self.code.failure(f"{self.code.name} {reason}", call, call.turn, hint)

    def _started(self) -> tuple[Any, Any]:
        """Starts a process; returns its actor, and a reference that becomes ready once the process has started."""
        # it reserves no CPU: ranks and engines reserve theirs, and the user's code mostly waits
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(UserCodeWorker).options(**options).remote(self.code, sys.path)
        return actor, actor.__ray_ready__.remote()

    def _replace(self, worker: _Worker) -> None:
        end_processes([worker.actor])
        worker.actor, worker.ref = self._started()
        worker.indices, worker.began = [], time.monotonic()

    def _wait_until_up(self, worker: _Worker) -> None:
        deadline = worker.began + self._launch_timeout_s
        while not ray.wait([worker.ref], timeout=SLICE_S)[0]:
            require_cluster()
            if time.monotonic() > deadline:
                raise self._did_not_come_up(f"within {self._launch_timeout_s:g} s")
        try:
            ray.get(worker.ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            raise self._did_not_come_up(f"({_reason_of(error)})") from error
        worker.ref = None

    def _did_not_come_up(self, reason: str) -> ResourceError:
        return ResourceError(
            f"a process that calls {self.code.name} did not come up {reason}",
            field="rollout.reward_workers",
            hint="look at its log; module, data and packages must be there on every node",
        )


class PendingCalls:
    """Calls for the processes to run; several objects may be in use at once, on different threads."""

    def __init__(self, workers: UserCodeWorkers) -> None:
        self._all = workers
        self.calls: list[EpisodeCall] = []
        # indices of the calls that no process runs yet: by process, and those for any process
        self._of_worker: dict[int, deque[int]] = {worker.index: deque() for worker in workers._workers}
        self._of_any: deque[int] = deque()
        self._alone: set[int] = set()  # calls that are run one by one, since a process was lost with them
        self._outcomes: dict[int, Answer | SlimeError] = {}
        self._is_complete = False

    def add(self, call: EpisodeCall) -> None:
        """Adds a call to run; does not wait for it."""
        self._require_workers()
        self._queue_of(call).append(len(self.calls))
        self.calls.append(call)
        self._advance(0.0)

    def finish(self) -> list[Answer | SlimeError]:
        """Waits for all calls and returns their outcomes in the order in which the calls were added."""
        self._is_complete = True
        while len(self._outcomes) < len(self.calls):
            self._require_workers()
            self._advance(SLICE_S)
        return [self._outcomes[index] for index in range(len(self.calls))]

    def _require_workers(self) -> None:
        if not self._all._workers:
            problem = f"the processes that call {self._all.code.name} were shut down"
            raise StateError(problem, field="rollout.reward_workers", hint="launch others")

    def _queue_of(self, call: EpisodeCall) -> deque[int]:
        home = self._all._home(call)
        return self._of_any if home is None else self._of_worker[home]

    def _advance(self, wait_s: float) -> None:
        """Collects outcomes of processes, waiting up to `wait_s` seconds for one, and starts more calls.

        Outcomes of other `PendingCalls` are stored in these; another thread may be waiting for them.
        """
        require_cluster()
        workers = self._all._workers
        with self._all._lock:
            for worker in workers:
                if worker.ref is None and (self._of_worker[worker.index] or self._of_any):
                    worker.indices, worker.began, worker.pending = self._next_indices(worker), time.monotonic(), self
                    worker.ref = worker.actor.run.remote([self.calls[index] for index in worker.indices])
            busy = [worker.ref for worker in workers if worker.ref is not None]
        done = ray.wait(busy, num_returns=1, timeout=wait_s)[0] if busy else []
        with self._all._lock:
            for worker in workers:
                if worker.ref is not None and worker.ref in done:
                    self._take(worker)
            for worker in workers:
                if worker.ref is None or time.monotonic() - worker.began <= self._all._allowed_s(worker):
                    continue
                if not worker.indices:
                    raise self._all._did_not_come_up(f"within {self._all._launch_timeout_s:g} s")
                indices = worker.indices
                self._all._replace(worker)
                worker.pending._are_lost(indices, None)

    def _take(self, worker: _Worker) -> None:
        """Collects what a process returned; replaces the process if it ended instead."""
        ref, indices = worker.ref, worker.indices
        worker.ref, worker.indices = None, []
        try:
            outcomes = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            if not indices:
                raise self._all._did_not_come_up(f"({_reason_of(error)})") from error
            self._all._replace(worker)
            is_of_memory = isinstance(error, OutOfMemoryError)  # another process may have used the memory
            ended = "lost its process, which Ray ended for want of memory on its machine,"
            worker.pending._are_lost(indices, ended if is_of_memory else f"ended its process ({_reason_of(error)})")
            return
        if indices:
            for index, outcome in zip(indices, outcomes, strict=False):
                worker.pending._outcomes[index] = outcome
                if not self._all.code.is_reward:
                    self._all._kept_by[worker.pending.calls[index].key] = worker.actor
            worker.pending._give_back(indices[len(outcomes) :])

    def _give_back(self, indices: Sequence[int]) -> None:
        for index in reversed(indices):
            self._queue_of(self.calls[index]).appendleft(index)

    def _next_indices(self, worker: _Worker) -> list[int]:
        """Returns the calls for a process to run; fewer towards the end, so that all processes stay busy."""
        own, shared = self._of_worker[worker.index], self._of_any
        queue = own or shared
        if queue[0] in self._alone:
            return [queue.popleft()]
        share = len(own) or -(-len(shared) // len(self._all._workers))
        if self._all._calls_at_once is not None:
            share = min(share, self._all._calls_at_once)
        elif self._is_complete and queue is shared:
            share = -(-share // 2)
        indices = [queue.popleft()]
        while len(indices) < share and queue[0] not in self._alone:
            indices.append(queue.popleft())
        return indices

    def _are_lost(self, indices: list[int], reason: str | None) -> None:
        """Handles calls that a process did not return; if there are several, they are run again one by one.

        Args:
            how: how the process ended; None: it did not return in time.
        """
        if len(indices) > 1:
            self._give_back(indices)
            self._alone.update(indices)
            return
        self._outcomes[indices[0]] = self._all._lost(self.calls[indices[0]], reason)


def _reason_of(error: RayError) -> str:
    """Returns the line of an error that says what happened."""
    # what the process raised is the last line, below its traceback
    if getattr(error, "actor_init_failed", False) or isinstance(error, RayTaskError):
        return str(error).strip().splitlines()[-1]
    return next(iter(str(error).splitlines()), type(error).__name__)
