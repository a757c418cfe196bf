"""Treats SIGTERM and SIGINT as requests: the run ends after the step in progress, with a checkpoint.

A thread reads the signals from a pipe into which Python's C handler writes them. It thus gets them while the main
thread is inside of a call that does not return, and whatever handlers Ray installs.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Self

from actors.startup import waited_for
from slimefsdp.errors import Interrupted

# signals within this time after the first count as one: `timeout`, shells and schedulers signal the process, and then
# its group
ONE_REQUEST_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP = b"\0"  # not the number of a signal
_handlers_before: dict[signal.Signals, Any] = {}  # this process's handlers before `listening`


class Interrupts:
    """Tells whether the run is asked to end. The loop asks once per step; `listening` makes signals such requests."""

    def __init__(self) -> None:
        self._first: float | None = None  # when the request came, on the monotonic clock
        self._in_steps = False
        self._is_done = False
        self._timer: threading.Timer | None = None
        self._grace_s = 0.0
        self._step = self._steps = 0  # the step in progress, and the last one of the run
        self._lock = threading.Lock()  # makes the answer to a request agree with what the loop does next

    @property
    def requested(self) -> bool:
        return self._first is not None

    def steps_begin(self, step: int, steps: int) -> None:
        """Makes requests wait for the end of a step from now on; before, there was nothing to save.

        Args:
            step: the first step, which begins now.
            steps: the number of the last step.
        """
        with self._lock:
            self._in_steps, self._step, self._steps = True, step, steps

    def step_done(self, step: int) -> bool:
        """Returns whether the run ends after this step, which lacks only its checkpoint."""
        with self._lock:
            if self._first is None:
                self._step = step + 1
            return self._first is not None

    def done(self) -> None:
        """Ends the grace period, since the checkpoint is on disk; a second signal still ends the run at once."""
        self._is_done = True

    @contextmanager
    def listening(self, grace_s: float) -> Iterator[Self]:
        """Handles SIGTERM and SIGINT, unless this process ignores them; call it in the main thread.

        The first signal is a request, or ends this process at once if no step has begun. A second one ends it with
        status 128 + its number; the end of the grace period ends it with the status of `Interrupted`. An immediate end
        runs no `finally`: what was committed to disk is valid, and the cleanup process ends the cluster.

        Args:
            grace_s: how long the step and its checkpoint may take after the request, until `done`.
        """
        self._grace_s = grace_s
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        _handlers_before.update((number, signal.signal(number, _leave_it_to_the_thread)) for number in heard)
        wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._listen, args=(read_end,), name="interrupts", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            signal.set_wakeup_fd(wakeup_before)
            _restore_handlers()
            os.write(write_end, _STOP)  # closing it would not end the read if a forked process has it open, too
            thread.join(timeout=5)  # a limit that is never reached, since the thread does nothing long
            os.close(write_end)
            if self._timer is not None:
                self._timer.cancel()

    def _listen(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as signals:
            while (received := signals.read(1)) != _STOP:
                if received[0] in _SIGNALS:  # other signals with a handler are written, too
                    with self._lock:
                        self._receive(signal.Signals(received[0]))

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self._in_steps:
            _end(
                f"{number.name} before the first step: nothing was trained",
                "start it again with the same command",
                Interrupted.exit_code,
            )
        if self._first is None:
            self._first = now
            now_at = f" It waits now for {waiting_for}." if (waiting_for := waited_for()) else ""
            _say(f"{number.name}: the run ends {self._when()}; a second signal ends it at once.{now_at}\n")
            self._start_grace()
        elif now - self._first >= ONE_REQUEST_S:
            _end(f"a second signal, {number.name}, ended the run at once", _GO_ON, 128 + number)

    def _when(self) -> str:
        if self._is_done or self._step > self._steps:
            return "soon"
        return f"after step {self._step}, once that is saved, within {self._grace_s:g} s"

    def _start_grace(self) -> None:
        self._timer = threading.Timer(self._grace_s, self._end_of_grace)
        self._timer.daemon = True
        self._timer.start()

    def _end_of_grace(self) -> None:
        if not self._is_done:
            _end(
                f"step {self._step} and its checkpoint were not done within cluster.grace_s={self._grace_s:g}",
                f"{_GO_ON}; raise cluster.grace_s, or lower checkpoint.interval_steps",
                Interrupted.exit_code,
            )


_GO_ON = "go on from its newest checkpoint, if there is one, with checkpoint.resume=true"


def _end(message: str, hint: str, exit_code: int) -> NoReturn:
    """Ends this process from any thread, without the main thread, which may be stuck."""
    _say(f"error [{Interrupted.code}]: {message}\n  hint:  {hint}\n")
    os._exit(exit_code)


def _say(text: str) -> None:
    # not through sys.stderr, whose lock the main thread may hold; must not block on a full pipe either
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """Does nothing; Python only writes a signal into the pipe if it has a handler of Python's own."""


def _restore_handlers() -> None:
    for number, handler in _handlers_before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _handlers_before.clear()


# A forked process shares the pipe, so that a SIGTERM to it, as pools send, would be a request to the driver. The child
# therefore drops the pipe, and signals are blocked until it has.
_forking = threading.local()


def _hold_signals() -> None:
    if _handlers_before:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_signals_come() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _forget_in_child() -> None:
    if _handlers_before:
        signal.set_wakeup_fd(-1)
        _restore_handlers()
    _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_forget_in_child)
