"""How far this process is: what it does, and when it last got on. Whoever watches it compares that with the clock.

A process is one rank, or one engine, and has one call at a time, so this belongs to the process and not to an object
that all code would have to be handed. It takes no lock that a stuck thread could hold, and a tick costs less than a
microsecond. What goes on beside the call, such as a save in the background, is no progress of the call.
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LAUNCH = "launch"
"""The activity of a process that is not ready yet."""
IDLE = "idle"
"""The activity of one that has no call."""
_looking = threading.Lock()  # or two threads would not agree whether the collector was on
_REMEMBERED = 9  # times of an activity: one that was held up is outvoted by the others, and forgotten after so many
_BETWEEN = ("/torch/_ops.py", "/threading.py", "/concurrent/futures/_base.py")  # files whose frames tell nothing
# files in which a thread that only waits for other ranks, or for the save behind it, has the innermost of the others
_WAITING = ("/torch/distributed/", "/slimefsdp/attention/cp_comm.py", "/slimefsdp/checkpoint/async_save.py")


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    """How far a process is at one moment."""

    activity: str
    ticks: int
    since_tick_s: float  # since the last tick
    # longest between two ticks of such an activity: the median over the last times that it ended; None: it never did
    usual_gap_s: float | None
    place: str  # in the code, of the thread that has the call
    waits: bool  # that thread waits for others, as far as its frame tells
    collectives: int = 0  # that it has begun with others, as far as somebody counts them


class Progress:
    """What `enter` and `tick` keep.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._activity = LAUNCH
        self._ticks = 0
        self._last = clock()
        self._longest_s = 0.0  # between two ticks since the activity began, without activities inside of it
        self._earlier: dict[str, deque[float]] = {}  # activity -> that, of its last times
        self._usual: dict[str, float] = {}
        self._thread = threading.get_ident()
        self._own = threading.local()  # `is_aside`, where a thread's work is none of the call's
        self._joined = False
        self.collectives: Callable[[], int] = lambda: 0  # begun so far; whoever makes process groups sets it

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """The calling thread is in an activity, and then in the one before again; also a decorator."""
        self.tick()
        before, longest_s = self._activity, self._longest_s
        self.enter(activity)
        try:
            yield
            self.tick()
            remembered = self._earlier.setdefault(activity, deque(maxlen=_REMEMBERED))
            remembered.append(self._longest_s)
            self._usual[activity] = statistics.median_low(remembered)
        finally:
            self.enter(before)
            self._longest_s = longest_s

    def enter(self, activity: str) -> None:
        """The calling thread begins an activity, which lasts until the next one; counts as a tick of the one before."""
        self.tick()
        self._activity = activity
        self._longest_s = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Marks what the thread does as background work: its ticks count only while the call has `joined` it."""
        self._own.is_aside = True
        try:
            yield
        finally:
            self._own.is_aside = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """The call waits for what goes on beside it: as long as that gets on, so does the call."""
        self._joined = True
        try:
            yield
        finally:
            self._joined = False

    def tick(self) -> None:
        """A unit of work is done: of the call, unless the calling thread's goes on beside it."""
        if getattr(self._own, "is_aside", False) and not self._joined:
            return
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        self._ticks += 1

    def snapshot(self) -> ProgressSnapshot:
        """Returns how far this process is, asked from another thread."""
        activity, ticks, since_tick_s = self._activity, self._ticks, self._clock() - self._last
        # what came for the first time, such as compiling or the first save, is no measure before it is over
        usual_gap_s = self._usual.get(activity)
        frame = _current_frames().get(self._thread)
        while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
            frame = frame.f_back
        return ProgressSnapshot(
            activity, ticks, since_tick_s, usual_gap_s, _place(frame), _waits(frame), self.collectives()
        )


def _current_frames() -> dict[int, FrameType]:
    """Returns sys._current_frames() with the garbage collector switched off.

    In Python 3.11.7, and others of that series, a collection inside of it can lock the interpreter up with a thread
    that starts or ends (https://github.com/python/cpython/issues/106883).
    """
    with _looking:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_on:
                gc.enable()


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "nowhere in Python"
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})"


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and any(part in frame.f_code.co_filename for part in _WAITING)


def count_collectives(begun: Callable[[], int]) -> None:
    """Has snapshots report the count that `begun` returns; `begun` is called from another thread."""
    _of_this_process.collectives = begun


_of_this_process = Progress()
during = _of_this_process.during
enter = _of_this_process.enter
tick = _of_this_process.tick
aside = _of_this_process.aside
joined = _of_this_process.joined
snapshot = _of_this_process.snapshot
