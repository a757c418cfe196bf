"""Reports the stages of a start: one line per stage until the first step, and the progress of long waits.

A command writes these lines to stderr (`reporting`). A user's own program gets only the lines of stages that may take
long, as messages of the logger `slimefsdp`.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TextIO

HEARTBEATS_S = (5.0, 15.0, 30.0, 60.0)  # ages at which a stage writes one more line to a log file; later once a minute
REFRESH_S = 1.0  # interval in which a stage's line on a terminal is updated
WAITING_S = 30.0  # interval in which a step reports its progress
_logger = logging.getLogger("slimefsdp")
_reporter: Reporter | None = None
_waited_for: Callable[[], str] | None = None


class Reporter:
    """Writes the stages of one command.

    Args:
        stream: if it is a terminal, the line of a stage is updated in place.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_live = stream.isatty()
        self._began = time.monotonic()

    @contextmanager
    def stage(self, what: str, progress: Callable[[], str], *, is_short: bool) -> Iterator[None]:
        """Reports a stage, and repeatedly its progress or duration while the block runs."""
        began, pauses = time.monotonic(), itertools.repeat(REFRESH_S) if self._is_live else _pauses()
        if self._is_live or not is_short:
            self._say(what, "")
        try:
            with _repeated(lambda: self._say(what, progress() or f"for {time.monotonic() - began:.0f} s"), pauses):
                yield
        finally:
            if self._is_live:
                print(file=self._stream, flush=True)

    def waiting(self, what: str, progress: Callable[[], str]) -> AbstractContextManager[None]:
        """Reports progress every `WAITING_S` seconds while a block runs, each time on a new line."""

        def report() -> None:
            print(f"[{time.monotonic() - self._began:4.0f} s] {what}: {progress()}", file=self._stream, flush=True)

        return _repeated(report, itertools.repeat(WAITING_S))

    def _say(self, what: str, progress: str) -> None:
        line = f"[{time.monotonic() - self._began:4.0f} s] {what}{f': {progress}' if progress else ''}"
        if self._is_live:
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


@contextmanager
def _repeated(report: Callable[[], None], pauses: Iterator[float]) -> Iterator[None]:
    """Calls `report` in a thread while the block runs, after each of these pauses, which are in seconds."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(next(pauses)):
            report()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def _pauses() -> Iterator[float]:
    """Yields the seconds between a stage's lines in a log file."""
    yield from (later - earlier for earlier, later in itertools.pairwise((0.0, *HEARTBEATS_S)))
    yield from itertools.repeat(60.0)


@contextmanager
def reporting(stream: TextIO | None = None) -> Iterator[None]:
    """Writes the stages of this process that begin inside the block, to `stream` or the current standard error."""
    global _reporter
    before, _reporter = _reporter, Reporter(stream or sys.stderr)
    try:
        yield
    finally:
        _reporter = before


@contextmanager
def stage(what: str, progress: Callable[[], str] = lambda: "", *, is_short: bool = False) -> Iterator[None]:
    """Reports a stage of a start while the block runs; outside of `reporting` it is logged once.

    Args:
        progress: returns a text about the stage's progress, or ""; called from another thread.
        is_short: whether the stage is left out of a log file unless it takes long.
    """
    if _reporter is not None:
        with _reporter.stage(what, progress, is_short=is_short):
            yield
        return
    if not is_short:
        _log(what)
    yield


def _log(message: str) -> None:
    """Logs a message, which is printed to stderr unless the program has handlers or a level of its own for logging."""
    if not _logger.hasHandlers() and _logger.level == logging.NOTSET:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        _logger.addHandler(handler)
        _logger.setLevel(logging.INFO)
    _logger.info(message)


@contextmanager
def waiting(what: str, progress: Callable[[], str]) -> Iterator[None]:
    """Names the work that a step waits for while the block runs; prints progress only if the work takes long.

    Args:
        progress: returns a text about the progress of the work; called from another thread.
    """
    global _waited_for
    before, _waited_for = _waited_for, lambda: f"{what}: {progress()}"
    try:
        with nullcontext() if _reporter is None else _reporter.waiting(what, progress):
            yield
    finally:
        _waited_for = before


def waited_for() -> str:
    """Returns the name and the progress of the work in the current `waiting` block; "" outside of such blocks."""
    describe = _waited_for
    return "" if describe is None else describe()


def is_reporting() -> bool:
    """Returns whether this process reports the stages of a start (inside of `reporting`)."""
    return _reporter is not None


def answered(refs: Sequence[Any]) -> Callable[[], str]:
    """Returns a progress function for a stage that waits for answers of Ray actors, which `refs` refer to."""

    def progress() -> str:
        import ray

        try:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        except Exception:  # the cluster is gone, which the waiting caller reports
            return "no answer from Ray"
        return f"{len(done)} of {len(refs)} ready"

    return progress
