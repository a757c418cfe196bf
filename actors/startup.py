"""What a command does until its first step, said on stderr: a line a stage, and how far it is while it lasts.

Nobody hears of it in a program of one's own: `reporting` is what the command line does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

HEARTBEAT_S = 10.0  # between lines about one stage, in a log file
REFRESH_S = 1.0  # of the one line on a terminal
_reporter: Reporter | None = None


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
        """Says what is done, and again with its progress as long as the block lasts."""
        over = threading.Event()

        def tell() -> None:
            while not over.wait(REFRESH_S if self._is_live else HEARTBEAT_S):
                self._say(what, progress())

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

    def _say(self, what: str, progress: str) -> None:
        line = f"[{time.monotonic() - self._began:4.0f} s] {what}{f': {progress}' if progress else ''}"
        if self._is_live:
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
        else:
            print(line, file=self._stream, flush=True)


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
def stage(what: str, progress: Callable[[], str] = lambda: "going on", *, is_short: bool = False) -> Iterator[None]:
    """A stage of the start, where somebody reports it; else nothing.

    Args:
        progress: how far it is, asked from another thread.
        is_short: has no line of its own in a log file, unless it lasts.
    """
    if _reporter is None:
        yield
        return
    with _reporter.stage(what, progress, is_short=is_short):
        yield


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
