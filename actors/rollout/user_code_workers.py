"""Runs the user's code in processes with a deadline for each call; a process that hangs or ends fails only one call.

A call contains all responses of its episode so far. It goes to the process that has the episode's environment. If that
process was lost, another process constructs the environment again and repeats the episode.
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
        # a member, not a base class: Ray makes asynchronous actors of classes with coroutines
        self._host = CodeHost(code)

    def run(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        outcomes = self._host.run(calls)
        return [portable(outcome) if isinstance(outcome, SlimeError) else outcome for outcome in outcomes]  # type: ignore[misc]

    def forget(self, number: int) -> None:
        self._host.forget(number)


@dataclass(slots=True, eq=False)
class _Queued:
    """A call to run, and its outcome once there is one."""

    call: EpisodeCall
    outcome: Answer | SlimeError | None = None
    is_alone: bool = False  # whether to run the call without other calls, since it may have ended a process


@dataclass(slots=True)
class _Worker:
    """The driver's record of one process."""

    actor: Any
    ref: Any  # reference to the process's start or to its running calls; None means that the process is idle
    waiting: deque[_Queued] = field(default_factory=deque)  # calls that only this process may run
    running: list[_Queued] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)


class UserCodeWorkers:
    """Runs the user's code in processes, which are replaced if they hang or end, or in the driver itself.

    Args:
        config: names the environment or the reward function; with rollout.reward_workers=0, the driver runs the code.
        in_driver: whether the driver runs the code, whatever rollout.reward_workers is.

    Raises:
        ConfigError: as in `checked_code`, so that a wrong name is one error instead of one for each process.
    """

    def __init__(self, config: RunConfig, *, in_driver: bool = False) -> None:
        self.code, environment = checked_code(config)
        self._launch_timeout_s = config.cluster.launch_timeout_s
        self._calls_at_once = self.code.concurrency if is_async(environment) else None
        self._more_s = self.code.close_s(environment) + TURN_S + _LATE_S
        self._kept_by: dict[EpisodeKey, Any] = {}  # episode -> the actor that answered last, and has its environment
        self._waiting: deque[_Queued] = deque()  # calls that any process may run
        self._lock = threading.Lock()  # guards the queues, the workers and `_kept_by`
        count = 0 if in_driver else self.code.workers
        self._host = None if count else CodeHost(self.code)
        self._workers = [_Worker(*self._started()) for _ in range(count)]

    @classmethod
    def launch(cls, config: RunConfig) -> UserCodeWorkers:
        """Starts the processes and waits for them.

        Raises:
            ConfigError: as in the constructor. ResourceError: a process did not start; all processes are ended.
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

    def pending(self) -> PendingCalls:
        """Returns an object to which calls are added one by one; processes run calls while others are being added.

        A process that ends or does not return in time is replaced. The calls that it was running are then run one by
        one, so that the error names the call at fault.

        Raises:
            ResourceError: from the object's methods, if a replacement did not start, or the Ray cluster is gone.
        """
        return PendingCalls(self)

    def forget(self, number: int) -> None:
        """Drops the waiting calls of run `number` (see `EpisodeKey`), and has processes close its environments."""
        with self._lock:  # other episodes may be running on another thread
            for waiting in (self._waiting, *(worker.waiting for worker in self._workers)):
                kept = [queued for queued in waiting if queued.call.key[0] != number]
                waiting.clear()
                waiting.extend(kept)
            self._kept_by = {key: actor for key, actor in self._kept_by.items() if key[0] != number}
        if self.code.is_reward:
            return
        if self._host is not None:
            self._host.forget(number)
        with suppress(Exception):  # if the Ray cluster is gone, the next wait for an answer reports it
            for worker in self._workers:
                worker.actor.forget.remote(number)

    def shutdown(self) -> None:
        end_processes([worker.actor for worker in self._workers])
        self._workers = []

    # ------------------------------------------------------------------ running calls

    def queue(self, call: EpisodeCall) -> _Queued:
        """Queues a call, and starts it if a process is idle. If the driver runs the code, `advance` runs the call."""
        self._require_running()
        queued = _Queued(call)
        with self._lock:
            self._queue_of(call).append(queued)
        if self._host is None:
            self.advance(0.0)
        return queued

    def advance(self, wait_s: float) -> None:
        """Starts queued calls, whichever thread queued them; waits up to `wait_s` for outcomes, and collects them."""
        self._require_running()
        if self._host is not None:
            with self._lock:
                waiting = list(self._waiting)
                outcomes = self._host.run([queued.call for queued in waiting])
                for queued, outcome in zip(waiting, outcomes, strict=False):
                    queued.outcome = outcome
                    self._waiting.popleft()
            return
        require_cluster()
        with self._lock:
            for worker in self._workers:
                if worker.ref is None and (worker.waiting or self._waiting):
                    worker.running, worker.began = self._next(worker), time.monotonic()
                    worker.ref = worker.actor.run.remote([queued.call for queued in worker.running])
            busy = [worker.ref for worker in self._workers if worker.ref is not None]
        done = ray.wait(busy, num_returns=1, timeout=wait_s)[0] if busy else []
        with self._lock:
            for worker in self._workers:
                if worker.ref is not None and worker.ref in done:
                    self._take(worker)
            for worker in self._workers:
                if worker.ref is None or time.monotonic() - worker.began <= self._allowed_s(worker):
                    continue
                if not worker.running:
                    raise self._did_not_come_up(f"within {self._launch_timeout_s:g} s")
                self._replace(worker, None)

    def _require_running(self) -> None:
        if self._host is None and not self._workers:
            problem = f"the processes that call {self.code.name} were shut down"
            raise StateError(problem, field="rollout.reward_workers", hint="launch others")

    def _queue_of(self, call: EpisodeCall) -> deque[_Queued]:
        """Returns the queue of the episode's process; for a reward function, which has no state, the common queue."""
        _, index, number = call.key
        if self._host is not None or self.code.is_reward:
            return self._waiting
        return self._workers[(index + number) % len(self._workers)].waiting

    def _next(self, worker: _Worker) -> list[_Queued]:
        """Returns the next calls of a process. A shorter queue gives fewer calls, so that all processes stay busy."""
        waiting = worker.waiting or self._waiting
        share = len(waiting) if waiting is worker.waiting else -(-len(waiting) // len(self._workers))
        if self._calls_at_once is not None:
            share = min(share, self._calls_at_once)
        elif waiting is self._waiting:
            share = -(-share // 2)
        calls = [waiting.popleft()]
        while len(calls) < share and not calls[0].is_alone and not waiting[0].is_alone:
            calls.append(waiting.popleft())
        return calls

    def _take(self, worker: _Worker) -> None:
        """Collects the outcomes that a process returned; replaces the process if it ended instead."""
        try:
            outcomes = ray.get(worker.ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            if not worker.running:
                raise self._did_not_come_up(f"({_reason_of(error)})") from error
            is_of_memory = isinstance(error, OutOfMemoryError)  # another process may have used the memory
            by_ray = "lost its process, which Ray ended for want of memory on its machine,"
            self._replace(worker, by_ray if is_of_memory else f"ended its process ({_reason_of(error)})")
            return
        running, worker.ref, worker.running = worker.running, None, []
        if running:  # otherwise the reference was that of the process's start
            for queued, outcome in zip(running, outcomes, strict=False):
                queued.outcome = outcome
                if not self.code.is_reward:
                    self._kept_by[queued.call.key] = worker.actor
            self._give_back(running[len(outcomes) :])

    def _give_back(self, calls: Sequence[_Queued]) -> None:
        for queued in reversed(calls):
            self._queue_of(queued.call).appendleft(queued)

    def _allowed_s(self, worker: _Worker) -> float:
        """Returns the limit in seconds on the start of a process, or on its running calls."""
        if not worker.running:
            return self._launch_timeout_s
        runs = max(self._most_runs(worker, queued.call) for queued in worker.running)
        return self.code.timeout_s * runs + self._more_s

    def _most_runs(self, worker: _Worker, call: EpisodeCall) -> int:
        """Returns how often one call may run the user's code: once, or once for each part of an episode to repeat."""
        has_environment = self.code.is_reward or self._kept_by.get(call.key) is worker.actor
        return 1 if has_environment else call.turn + 2  # the constructor, the prompt, and each turn

    def _started(self) -> tuple[Any, Any]:
        """Starts a process; returns its actor, and a reference that becomes ready when the process has started."""
        # no CPU is reserved, since ranks and engines reserve CPUs, and the user's code mostly waits
        options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor: Any = ray.remote(UserCodeWorker).options(**options).remote(self.code, sys.path)
        return actor, actor.__ray_ready__.remote()

    def _replace(self, worker: _Worker, reason: str | None) -> None:
        """Replaces a lost process. If it ran a single call, the call fails; several calls are run again one by one.

        Args:
            reason: how the process ended; None means that it did not return in time.
        """
        end_processes([worker.actor])
        lost, worker.running = worker.running, []
        worker.actor, worker.ref = self._started()
        worker.began = time.monotonic()
        if len(lost) > 1:
            for queued in lost:
                queued.is_alone = True
            self._give_back(lost)
            return
        (queued,), code = lost, self.code
        if reason is None:
            what = "" if code.is_reward else ", or its close(),"
            queued.outcome = code.overdue(queued.call, queued.call.turn, what)
        else:
            hint = f"{code.correct_it}, or look at the memory of its node"
            queued.outcome = code.failure(f"{code.name} {reason}", queued.call, queued.call.turn, hint)

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
    """Holds calls whose outcomes are collected together; several threads may use objects of their own at once."""

    def __init__(self, workers: UserCodeWorkers) -> None:
        self._workers = workers
        self.calls: list[EpisodeCall] = []
        self._queued: list[_Queued] = []

    def add(self, call: EpisodeCall) -> None:
        """Adds a call to run, without waiting for it."""
        self._queued.append(self._workers.queue(call))
        self.calls.append(call)

    def finish(self) -> list[Answer | SlimeError]:
        """Waits for all calls and returns their outcomes in the order in which the calls were added."""
        while any(queued.outcome is None for queued in self._queued):
            self._workers.advance(SLICE_S)
        return [queued.outcome for queued in self._queued if queued.outcome is not None]


def _reason_of(error: RayError) -> str:
    # an exception of the process is the last line, below its traceback
    if getattr(error, "actor_init_failed", False) or isinstance(error, RayTaskError):
        return str(error).strip().splitlines()[-1]
    return next(iter(str(error).splitlines()), type(error).__name__)
