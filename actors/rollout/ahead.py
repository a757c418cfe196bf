"""Batches that are collected while earlier ones are trained on, on a thread of its own, within a bound of staleness."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from actors.rollout.collect import Collector, Metrics
from slimefsdp.data.rollout_batch import RolloutBatch

_LOOK_S = 1.0  # of who waits: a signal to the program is handled in between


@dataclass(frozen=True, slots=True)
class Collected:
    """What a step trains on."""

    step: int
    batch: RolloutBatch | None
    metrics: Metrics
    seconds: Metrics
    prompts: dict[str, Any]  # where the stream of prompts stands behind it


class AheadCollector:
    """The batches of the steps from one on, in order.

    The batch of a step begins to be collected once the engines have the weights of `max_staleness` steps before it, or
    newer ones, and that of the step before it is there.

    Args:
        first_step: the engines have the weights that it begins with.
        steps: of the run.
    """

    def __init__(self, collector: Collector, *, first_step: int, steps: int, max_staleness: int) -> None:
        self._collector = collector
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._weights_of = first_step  # steps done, of whose weights the engines are
        self._ready: deque[Collected] = deque()
        self._error: BaseException | None = None
        self._is_closed = False
        self._is_at_end = False
        self._thread = threading.Thread(target=self._run, args=(first_step, steps), name="collector", daemon=True)
        self._thread.start()

    def next(self) -> Collected:
        """Waits for the batch of the next step and returns it.

        Raises:
            SlimeError: with which it could not be collected.
        """
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait(_LOOK_S)
            return self._ready.popleft()

    def weights_are_of(self, done: int) -> None:
        """The engines have the weights after so many steps now."""
        with self._changed:
            self._weights_of = done
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """Waits so long for the batch of the next step, which is recorded then for a run that goes on with it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ready) or self._error is not None or self._is_at_end, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Collects nothing more. Waits so long for what is being collected, which ends with its engines."""
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
                found = Collected(step, batch, metrics, seconds, self._collector.prompts.state())
                with self._changed:
                    self._ready.append(found)
                    self._changed.notify_all()
        except BaseException as error:  # for whoever waits for the batch
            with self._changed:
                self._error = error
        finally:
            with self._changed:
                self._is_at_end = True
                self._changed.notify_all()
