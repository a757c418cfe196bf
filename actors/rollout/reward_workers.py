"""Rewards outside the driver: processes that call the reward function, each call with a deadline."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from actors.cluster.ray_errors import end_processes, require_cluster
from actors.rollout.rewards import Outcome, Response, RewardScorer, Scoring, driver_scorer, failed_reward, overdue
from actors.startup import answered, stage
from actors.workers.futures import SLICE_S
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError, SlimeError, StateError, portable

# A plain function is called for one response after another until so long has passed; then the worker hands over what it
# has. Short enough that workers end a step together, long enough that a cheap function is not one message a response.
TURN_S = 0.2
_GET_S = 10.0  # for an answer that Ray says is here
LATE_S = 2.0  # for the answer itself, on a busy machine


class RewardWorker:
    """One process that calls the reward function; a Ray actor.

    Args:
        search_path: the driver's sys.path, where the function was found there.
    """

    def __init__(self, name: str, timeout_s: float, concurrency: int, search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        self._scorer = RewardScorer(name, timeout_s=timeout_s, concurrency=concurrency)

    def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """The outcomes of the first responses, one or more, as many as fit into a turn."""
        outcomes = self._scorer.score(responses, time.monotonic() + TURN_S)
        return [portable(one) if isinstance(one, SlimeError) else one for one in outcomes]  # type: ignore[misc]


@dataclass(slots=True)
class _Worker:
    """One worker as the driver knows it."""

    actor: Any
    ref: Any  # of what it does: coming up, or a call
    places: list[int] = field(default_factory=list)  # of the responses that it was given
    scoring: Any = None  # whose responses these are
    began: float = field(default_factory=time.monotonic)


class RewardWorkers:
    """The processes that score a run's responses, replaced where they hang or end; with none of them, the driver does.

    Args:
        config: with `rollout.reward`.
    """

    def __init__(self, config: RunConfig) -> None:
        settings = config.rollout
        assert settings.reward is not None
        self._name, self._timeout_s = settings.reward, settings.reward_timeout_s
        self._concurrency = settings.reward_concurrency
        self._launch_timeout_s = config.cluster.launch_timeout_s
        # also where workers call it: a name that leads nowhere is an error here, and not in each of them
        self._scorer = driver_scorer(settings)
        self._workers = [self._started() for _ in range(settings.reward_workers)]
        self._lock = threading.Lock()  # of what workers are known to do

    @classmethod
    def launch(cls, config: RunConfig) -> RewardWorkers:
        """Starts `rollout.reward_workers` processes and waits for them.

        Raises:
            ConfigError: the function cannot be imported. ResourceError: a process did not come up.
        """
        workers = cls(config)
        try:
            refs = [worker.ref for worker in workers._workers]
            with stage(f"starting {len(refs)} reward workers", answered(refs), is_short=True):
                for worker in workers._workers:
                    workers._wait_until_up(worker)
        except BaseException:
            workers.shutdown()
            raise
        return workers

    def score(self, responses: Sequence[Response]) -> list[Outcome]:
        """What the reward function returned for each response, in their order, or the error that it is instead.

        Raises:
            ResourceError: as `scoring`.
        """
        scoring = self.scoring()
        for response in responses:
            scoring.add(response)
        return scoring.finish()

    def scoring(self) -> Scoring:
        """For responses that come one after another: workers score the first while others are still sampled.

        A process that ends or does not return in time is replaced. What it had been given is then asked for one by one,
        so that the error names the response at fault.

        Raises:
            ResourceError: of its methods: a process that was to replace another did not come up, or Ray is gone.
        """
        return _Scoring(self) if self._workers else self._scorer.scoring()

    def shutdown(self) -> None:
        """Ends the processes; idempotent."""
        end_processes([worker.actor for worker in self._workers])
        self._workers = []

    def _allowed_s(self, worker: _Worker) -> float:
        return self._timeout_s + TURN_S + LATE_S if worker.places else self._launch_timeout_s

    def _started(self) -> _Worker:
        # no CPU of the cluster's is counted for it: ranks and engines have theirs, and a judge mostly waits
        options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor: Any = (
            ray.remote(RewardWorker).options(**options).remote(self._name, self._timeout_s, self._concurrency, sys.path)
        )
        return _Worker(actor, actor.__ray_ready__.remote())

    def _replace(self, worker: _Worker) -> None:
        end_processes([worker.actor])
        new = self._started()
        worker.actor, worker.ref, worker.places, worker.began = new.actor, new.ref, [], new.began

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
            raise self._did_not_come_up(f"({_said(error)})") from error
        worker.ref = None

    def _did_not_come_up(self, how: str) -> ResourceError:
        return ResourceError(
            f"a process that calls {self._name} did not come up {how}",
            field="rollout.reward_workers",
            hint="look at its log; module, data and packages of the function must be there on every node",
        )


class _Scoring:
    """Responses that the workers score, beside those of other scorings."""

    def __init__(self, workers: RewardWorkers) -> None:
        self._all = workers
        self._responses: list[Response] = []
        self._waiting: deque[int] = deque()  # places of responses that no worker has
        self._alone: set[int] = set()  # of these one is at fault
        self._outcomes: dict[int, Outcome] = {}
        self._is_complete = False

    def add(self, response: Response) -> None:
        """As `Scoring`."""
        self._waiting.append(len(self._responses))
        self._responses.append(response)
        self._advance(0.0)

    def finish(self) -> list[Outcome]:
        """As `Scoring`."""
        self._is_complete = True
        while len(self._outcomes) < len(self._responses):
            if not self._all._workers:
                raise StateError(
                    "the reward workers were shut down", field="rollout.reward_workers", hint="launch others"
                )
            self._advance(SLICE_S)
        return [self._outcomes[place] for place in range(len(self._responses))]

    def _advance(self, wait_s: float) -> None:
        """Takes in what workers have done, waiting so long for something, and gives them more to do.

        What belongs to another scoring is handed over to that one, which may wait on another thread.
        """
        require_cluster()
        workers = self._all._workers
        with self._all._lock:
            for worker in workers:
                if worker.ref is None and self._waiting:
                    worker.places, worker.began, worker.scoring = self._next_places(), time.monotonic(), self
                    worker.ref = worker.actor.score.remote([self._responses[place] for place in worker.places])
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
                worker.scoring._is_lost(places, None)

    def _take_in(self, worker: _Worker) -> None:
        ref, places = worker.ref, worker.places
        worker.ref, worker.places = None, []
        try:
            found = ray.get(ref, timeout=_GET_S)
        except RayError as error:
            require_cluster()
            if not places:
                raise self._all._did_not_come_up(f"({_said(error)})") from error
            self._all._replace(worker)
            worker.scoring._is_lost(places, f"ended its process ({_said(error)})")
            return
        if places:
            worker.scoring._outcomes.update(zip(places, found, strict=False))
            worker.scoring._waiting.extendleft(reversed(places[len(found) :]))

    def _next_places(self) -> list[int]:
        """What a worker is given now: less and less, so that all of them have something to do until the end."""
        if self._waiting[0] in self._alone:
            return [self._waiting.popleft()]
        share = -(-len(self._waiting) // len(self._all._workers))
        if self._all._scorer.is_async:
            share = min(share, self._all._concurrency)
        elif self._is_complete:
            share = -(-share // 2)
        places = [self._waiting.popleft()]
        while len(places) < share and self._waiting[0] not in self._alone:
            places.append(self._waiting.popleft())
        return places

    def _is_lost(self, places: list[int], how: str | None) -> None:
        """A worker has not come back with these. Of several responses one was at fault: they are asked one by one.

        Args:
            how: it was lost; None: it did not return in time.
        """
        if len(places) > 1:
            self._waiting.extendleft(reversed(places))
            self._alone.update(places)
            return
        name, response = self._all._name, self._responses[places[0]]
        self._outcomes[places[0]] = (
            overdue(name, response, self._all._timeout_s)
            if how is None
            else failed_reward(f"{name} {how}", response.record, "correct it, or look at the memory of its node")
        )


def _said(error: RayError) -> str:
    if getattr(error, "actor_init_failed", False):  # what its constructor raised is the last line
        return str(error).strip().splitlines()[-1]
    return next(iter(str(error).splitlines()), type(error).__name__)
