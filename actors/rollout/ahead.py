"""Collects batches on a background thread while earlier ones are trained on, within a bound on their staleness."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from actors.rollout.collect import Collector
from actors.rollout.scored_groups import Metrics
from slimefsdp.data.rollout_batch import RolloutBatch

_LOOK_S = 1.0  # how long a wait blocks at most, so that the program handles signals in between


@dataclass(frozen=True, slots=True)
class Collected:
    """Holds the batch of one step, and what was measured while it was collected."""

    step: int
    batch: RolloutBatch | None
    metrics: Metrics
    seconds: Metrics
    prompts: dict[str, Any]  # the position in the stream of prompts after this batch


class AheadCollector:
    """Collects the batches of a run's steps in order, on a thread of its own.

    A batch is collected as soon as the batch of the step before it is complete and the engines have weights that are at
    most `max_staleness` steps older than the step.

    Args:
        first_step: the first step to collect; the engines have the weights of this step when it begins.
        steps: the number of steps of the whole run.
    """

    def __init__(self, collector: Collector, *, first_step: int, steps: int, max_staleness: int) -> None:
        self._collector = collector
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._weights_of = first_step  # the number of training steps after which the engines' weights were taken
        self._ready: deque[Collected] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_at_end = False
        self._thread = threading.Thread(target=self._run, args=(first_step, steps), name="collector", daemon=True)
        self._thread.start()

    def next(self) -> Collected:
        """Waits for the batch of the next step and returns it.

        Raises:
            SlimeError: the error with which the collection failed.
        """
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait(_LOOK_S)
            return self._ready.popleft()

    def weights_are_of(self, done: int) -> None:
        """Records that the engines now have the weights after `done` steps."""
        with self._changed:
            self._weights_of = done
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the next batch to be collected and recorded, so that a resumed run can use it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._error is not None or self._is_at_end, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Stops collecting. Waits up to `timeout_s` for the step in progress, which fails once its engines end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _run(self, first_step: int, steps: int) -> None:
        try:
            for step in range(first_step, steps):
                with self._changed:
                    while step > self._weights_of + self._max_staleness and not self._is_closed:
                        self._changed.wait(_LOOK_S)
                    if self._is_closed:
                        return
                seconds: Metrics = {"generate": 0.0, "reward": 0.0}
                batch, metrics = self._collector.collect(step, None, seconds)
                collected = Collected(step, batch, metrics, seconds, self._collector.prompts.state())
                with self._changed:
                    self._ready.append(collected)
                    self._changed.notify_all()
        except BaseException as error:  # next() raises it on the caller's thread
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._is_at_end = True
                self._changed.notify_all()
