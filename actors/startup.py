"""What a command does, said on stderr: a line a stage until its first step, and how far it is while it lasts; of steps
only how far one is that takes long.

Nobody hears of it in a program of one's own: `reporting` is what the command line does.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

HEARTBEATS_S = (5.0, 15.0, 30.0, 60.0)  # after which a stage that lasts has a line in a log file; then every minute
REFRESH_S = 1.0  # of the one line on a terminal
WAITING_S = 30.0  # until a step says how far it is, and between its lines
_reporter: Reporter | None = None
_waited_for: Callable[[], str] | None = None


class Reporter:
    """Writes the stages of one command.

    Args:
        stream: on a terminal the line of a stage is rewritten while it lasts.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_live = stream.isatty()
        self._began = time.monotonic()

    @contextmanager
    def stage(self, what: str, progress: Callable[[], str], *, is_short: bool) -> Iterator[None]:
        """Says what is done, and again with its progress, or for how long, as long as the block lasts."""
        over, began = threading.Event(), time.monotonic()

        def tell() -> None:
            pauses = itertools.repeat(REFRESH_S) if self._is_live else _pauses()
            while not over.wait(next(pauses)):
                self._say(what, progress() or f"for {time.monotonic() - began:.0f} s")

        if self._is_live or not is_short:
            self._say(what, "")
        thread = threading.Thread(target=tell, name="startup", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=5)
            if self._is_live:
                print(file=self._stream, flush=True)

    @contextmanager
    def waiting(self, what: str, progress: Callable[[], str]) -> Iterator[None]:
        """Says how far it is now and then, on lines of their own: those of a table stand before and after them."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(WAITING_S):
                print(f"[{time.monotonic() - self._began:4.0f} s] {what}: {progress()}", file=self._stream, flush=True)

        thread = threading.Thread(target=tell, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(timeout=5)

    def _say(self, what: str, progress: str) -> None:
        line = f"[{time.monotonic() - self._began:4.0f} s] {what}{f': {progress}' if progress else ''}"
        if self._is_live:
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


def _pauses() -> Iterator[float]:
    """Seconds between a stage's lines in a log file."""
    yield from (later - earlier for earlier, later in itertools.pairwise((0.0, *HEARTBEATS_S)))
    yield from itertools.repeat(60.0)


@contextmanager
def reporting(stream: TextIO | None = None) -> Iterator[None]:
    """Stages of this process are written inside, to the standard error of the moment if there is no other stream."""
    global _reporter
    before, _reporter = _reporter, Reporter(stream or sys.stderr)
    try:
        yield
    finally:
        _reporter = before


@contextmanager
def stage(what: str, progress: Callable[[], str] = lambda: "", *, is_short: bool = False) -> Iterator[None]:
    """A stage of the start, where somebody reports it; else nothing.

    Args:
        progress: how far it is, asked from another thread; empty where nothing tells.
        is_short: has no line of its own in a log file, unless it lasts.
    """
    if _reporter is None:
        yield
        return
    with _reporter.stage(what, progress, is_short=is_short):
        yield


@contextmanager
def waiting(what: str, progress: Callable[[], str]) -> Iterator[None]:
    """Names what a step waits for; its progress is printed only if it takes long and reports any.

    Args:
        progress: how far it is, asked from another thread.
    """
    global _waited_for
    before, _waited_for = _waited_for, lambda: f"{what}: {progress()}"
    try:
        with nullcontext() if _reporter is None else _reporter.waiting(what, progress):
            yield
    finally:
        _waited_for = before


def waited_for() -> str:
    """Returns what is waited for at the moment and how far it is; empty where nothing is."""
    asked = _waited_for
    return "" if asked is None else asked()


def is_reporting() -> bool:
    """Whether somebody hears of stages."""
    return _reporter is not None


def answered(refs: Sequence[Any]) -> Callable[[], str]:
    """Progress of a stage that waits for these answers of Ray actors."""

    def progress() -> str:
        import ray

        try:
            done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0, fetch_local=False)
        except Exception:  # the cluster is gone, which whoever waits for the answers reports
            return "no answer from Ray"
        return f"{len(done)} of {len(refs)} ready"

    return progress
