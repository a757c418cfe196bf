"""SIGTERM and SIGINT as requests: the run ends after the step that it is in, with a checkpoint.

A thread reads the signals from a pipe into which Python's C handler writes them, so that they are heard while the main
thread is inside of a call that does not return, and whatever handler Ray puts in place meanwhile.
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

# signals this soon after the first are the same request: `timeout`, shells and schedulers send one to the process and
# again to its group
ONE_REQUEST_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STOP = b"\0"  # the number of no signal
_handlers_before: dict[signal.Signals, Any] = {}  # of this process, while it listens


class Interrupts:
    """Whether the run is asked to end. The loop asks once a step; `listening` has signals be such requests."""

    def __init__(self) -> None:
        self._first: float | None = None  # when the request came, on the monotonic clock
        self._in_steps = False
        self._is_done = False
        self._timer: threading.Timer | None = None
        self._grace_s = 0.0
        self._step = self._steps = 0  # that is being made, and the run's last
        self._lock = threading.Lock()  # what a request is told and what the loop then does are one decision

    @property
    def requested(self) -> bool:
        """Whether somebody asked for an end."""
        return self._first is not None

    def steps_begin(self, step: int, steps: int) -> None:
        """Lets requests wait for the end of a step from now on; before, a checkpoint would have nothing to keep.

        Args:
            step: the first, which begins now.
            steps: the number of the last one.
        """
        with self._lock:
            self._in_steps, self._step, self._steps = True, step, steps

    def step_done(self, step: int) -> bool:
        """Returns whether the run ends after this step, which is done but for its checkpoint."""
        with self._lock:
            if self._first is None:
                self._step = step + 1
            return self._first is not None

    def done(self) -> None:
        """Ends the grace period, since the checkpoint is on disk; a second signal still ends the run."""
        self._is_done = True

    @contextmanager
    def listening(self, grace_s: float) -> Iterator[Self]:
        """Takes SIGTERM and SIGINT from here on, other than those that this process ignores; for the main thread.

        The first signal is a request, or ends this process at once where no step has begun. A second one ends it with
        128 + its number, as does the grace period with the exit status of `Interrupted`. An end at once runs no
        `finally`: what was committed to disk stands, and the cleanup process ends the cluster.

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
            os.write(write_end, _STOP)  # closing it would not do where a forked process has it open, too
            thread.join(timeout=5)  # it does nothing that takes long
            os.close(write_end)
            if self._timer is not None:
                self._timer.cancel()

    def _listen(self, pipe: int) -> None:
        with open(pipe, "rb", buffering=0) as signals:
            while (received := signals.read(1)) != _STOP:
                if received[0] in _SIGNALS:  # every signal with a handler comes here
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
            now_at = f" It waits now for {said}." if (said := waited_for()) else ""
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
    """Ends this process from whatever thread, without asking the main one, which may be stuck."""
    _say(f"error [{Interrupted.code}]: {message}\n  hint:  {hint}\n")
    os._exit(exit_code)


def _say(text: str) -> None:
    # not through sys.stderr, whose lock the main thread may hold; and an end must not wait for who reads it
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode())


def _leave_it_to_the_thread(number: int, frame: Any) -> None:
    """A handler of Python's own must be there for the C handler to write into the pipe."""


def _restore_handlers() -> None:
    for number, handler in _handlers_before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _handlers_before.clear()


# A forked process shares the pipe: ending it by SIGTERM, as pools do, would be a request to the driver. It forgets the
# pipe, and until it has, signals wait.
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
