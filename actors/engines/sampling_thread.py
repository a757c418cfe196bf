"""Provides an engine's thread that draws all tokens, and makes every change to the model between two tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from slimefsdp import heartbeat

Result = TypeVar("Result")
_LOOK_S = 1.0  # interval of checks while the thread is idle


class SamplingThread:
    """Draws token after token while there are samples; between two tokens the thread calls functions passed to `do`.

    Args:
        step: draws a token for every running sample, and hands over the samples that have ended.
        is_idle: returns whether `step` has nothing to draw.
        activity: the name under which the heartbeat reports the drawing of tokens.
        is_on_cpu: whether the model is on CPU; torch then computes with one thread, as in ranks.
    """

    def __init__(
        self, step: Callable[[], None], is_idle: Callable[[], bool], *, activity: str, is_on_cpu: bool
    ) -> None:
        self._step, self._is_idle, self._activity, self._is_on_cpu = step, is_idle, activity, is_on_cpu
        self._changed = threading.Condition()  # its lock guards the next two attributes
        self._between: list[Callable[[], None]] = []  # functions to call between two tokens, in order
        self.end: Exception | None = None
        """The error that `do` raises after the thread has ended; None means that the thread runs."""
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        heartbeat.enter(heartbeat.IDLE)
        self._thread.start()

    def do(self, function: Callable[[], Result]) -> Future[Result]:
        """Has the thread call a function between two tokens; returns the future of its result.

        Raises:
            Exception: `end`, if the thread has ended. If the thread ends before the call, the future raises `end`.
        """
        future: Future[Result] = Future()

        def call() -> None:
            try:
                if self.end is not None:
                    raise self.end
                settle(future, function())
            except Exception as error:
                settle(future, error)

        with self._changed:
            if self.end is not None:
                raise self.end
            self._between.append(call)
            self._changed.notify()
        return future

    def stop(self, error: Exception) -> None:
        """Ends the thread, and waits for its end; functions that were not called yet fail with `error`. Idempotent."""
        with self._changed:
            self.end = self.end or error
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        if self._is_on_cpu:
            use_one_thread()
        try:
            while self.end is None:
                self._call_waiting_functions()
                if self._is_idle():
                    continue
                with heartbeat.during(self._activity):
                    while self.end is None and not self._is_idle():
                        self._step()
                        self._call_waiting_functions()
        except Exception as error:
            self.end = error
        finally:
            with self._changed:
                calls, self._between = self._between, []
            for call in calls:
                call()

    def _call_waiting_functions(self) -> None:
        with self._changed:
            while self._is_idle() and not self._between and self.end is None:
                self._changed.wait(_LOOK_S)
            calls, self._between = self._between, []
        for call in calls:
            call()


def settle(future: Future[Result], outcome: Result | Exception) -> None:
    """Sets a future's result or error, unless it was cancelled."""
    with suppress(Exception):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def use_one_thread() -> None:
    """Has torch compute with one thread in the calling thread."""
    import torch

    torch.set_num_threads(1)
