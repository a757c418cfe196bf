"""Treats SIGTERM and SIGINT as requests to end the run after the step in progress, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, Self

from actors.startup import waited_for
from slimefsdp.errors import Interrupted

# Signals within this time after the first belong to the same request, since `timeout`, shells and schedulers signal the
# process and then its process group.
ONE_REQUEST_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_GO_ON = "go on from its newest checkpoint, if there is one, with checkpoint.resume=true"


class Interrupts:
    """Records requests to end the run: `listening` receives them as signals, and the loop checks once per step."""

    def __init__(self) -> None:
        self._first: float | None = None  # time of the first request, by `time.monotonic`
        self._in_steps = False
        self._is_done = False
        self._grace_s = 0.0
        self._step = self._steps = 0  # numbers of the step in progress and of the run's last step

    @property
    def requested(self) -> bool:
        return self._first is not None

    def steps_begin(self, step: int, steps: int) -> None:
        """Marks the begin of the first step: from now on, a request ends the run only after a step.

        Args:
            step: the number of the step that begins now.
            steps: the number of the last step.
        """
        self._in_steps, self._step, self._steps = True, step, steps

    def step_done(self, step: int) -> bool:
        """Returns whether the run was asked to end, so that the run ends after this step's checkpoint."""
        is_requested = self.requested
        self._step = step if is_requested else step + 1
        return is_requested

    def done(self) -> None:
        """Ends the grace period, since the checkpoint is on disk; a second signal still ends the run at once."""
        self._is_done = True

    @contextmanager
    def listening(self, grace_s: float) -> Iterator[Self]:
        """Handles SIGTERM and SIGINT, unless this process ignores them; call it in the main thread.

        The first signal asks the run to end after its step and checkpoint; before the first step it ends this process
        at once. A second signal ends the process with status 128 + the signal's number. If the grace period passes
        first, the process ends with the status of `Interrupted`. Such an immediate end skips all `finally` blocks: what
        was committed to disk is valid, and the cleanup process ends the cluster.

        Args:
            grace_s: seconds between the request and the call of `done`, in which step and checkpoint must be finished.
        """
        self._grace_s = grace_s
        listener, handlers = os.getpid(), {}

        def receive(number: int, frame: Any) -> None:
            if os.getpid() == listener:
                self._receive(signal.Signals(number))
            else:  # this is a forked process: a pool ends its processes by a signal
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                handlers[number] = signal.signal(number, receive)
        try:
            yield self
        finally:
            self._is_done = True
            for number, handler in handlers.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self._in_steps:
            problem = f"{number.name} before the first step: nothing was trained"
            _end(problem, "start it again with the same command", Interrupted.exit_code)
        elif self._first is None:
            self._first = now
            is_soon = self._is_done or self._step > self._steps
            when = "soon" if is_soon else f"after step {self._step}, once that is saved, within {self._grace_s:g} s"
            now_at = f" It waits now for {waiting_for}." if (waiting_for := waited_for()) else ""
            _print(f"{number.name}: the run ends {when}; a second signal ends it at once.{now_at}\n")
            timer = threading.Timer(self._grace_s, self._end_of_grace)
            timer.daemon = True
            timer.start()
        elif now - self._first >= ONE_REQUEST_S:
            _end(f"a second signal, {number.name}, ended the run at once", _GO_ON, 128 + number)

    def _end_of_grace(self) -> None:
        if not self._is_done:
            _end(
                f"step {self._step} and its checkpoint were not done within cluster.grace_s={self._grace_s:g}",
                f"{_GO_ON}; raise cluster.grace_s, or lower checkpoint.interval_steps",
                Interrupted.exit_code,
            )


def _end(message: str, hint: str, exit_code: int) -> NoReturn:
    """Ends this process from any thread, without the main thread, which may be stuck."""
    _print(f"error [{Interrupted.code}]: {message}\n  hint:  {hint}\n")
    os._exit(exit_code)


def _print(text: str) -> None:
    with suppress(OSError):  # sys.stderr is not used, since the interrupted code may be printing to it
        os.write(2, text.encode())


# Python drops a signal that a forked process gets before its interpreter is ready, so signals are blocked until then
_forking = threading.local()


def _block() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_unblock)
