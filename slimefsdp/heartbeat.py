"""Records the progress of this process for a watchdog: its current activity, and the time of its last tick.

An activity is what the process is doing, such as a call. A tick records that the process has done a unit of work.

A process is one rank or one engine and runs one call at a time, so its progress is a global variable. Ticks take no
lock that a stuck thread could hold, and cost less than a microsecond. Ticks of background work, such as an asynchronous
save, do not count as progress of the call.
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

LAUNCH = "launch"  # activity of a process that is starting
IDLE = "idle"  # activity of a process without a call
_frames_lock = threading.Lock()  # serialises switching the garbage collector off and on
_REMEMBERED = 9  # durations kept per activity; their median ignores a few delayed ones
_SKIPPED = ("/torch/_ops.py", "/threading.py", "/concurrent/futures/_base.py")  # files whose frames are uninformative
# a thread whose innermost frame that is not skipped is in these files only waits, for other ranks or for a save
_WAITING = ("/torch/distributed/", "/slimefsdp/attention/cp_comm.py", "/slimefsdp/checkpoint/save_load.py")


@dataclass(frozen=True, slots=True)
class ProgressSnapshot:
    activity: str
    ticks: int
    since_tick_s: float  # seconds since the last tick
    # longest time between two ticks of this activity, as a median over its last completions; None if it never completed
    usual_gap_s: float | None
    place: str  # position in the code of the thread that runs the call
    waits: bool  # whether this thread, according to its frame, waits for other ranks
    collectives: int = 0  # number of collectives begun, if `count_collectives` was called


class Progress:
    """Records what this process is doing (its activity), and when it last finished a unit of work (a tick).

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._activity = LAUNCH
        self._ticks = 0
        self._last = clock()
        self._longest_s = 0.0  # longest time between two ticks of the current activity, outside of nested activities
        self._earlier: dict[str, deque[float]] = {}  # activity -> `_longest_s` of each of its last completions
        self._usual: dict[str, float] = {}  # activity -> median of its entry in `_earlier`
        self._thread = threading.get_ident()
        self._own = threading.local()  # `is_aside` is True in threads that do background work
        self._joined = False
        self.collectives: Callable[[], int] = lambda: 0  # number of collectives begun; set by `count_collectives`

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Runs the block as an activity of the calling thread, then resumes the one before; can be a decorator."""
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
        """Ticks, and begins an activity of the calling thread, which lasts until the next activity begins."""
        self.tick()
        self._activity = activity
        self._longest_s = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Marks the block as background work, whose ticks count only while the call waits in a `joined` block."""
        self._own.is_aside = True
        try:
            yield
        finally:
            self._own.is_aside = False

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Marks the block as waiting for background work; the ticks of that work then count for the call."""
        self._joined = True
        try:
            yield
        finally:
            self._joined = False

    def tick(self) -> None:
        """Records that a unit of work is done; ignored in background work."""
        if getattr(self._own, "is_aside", False) and not self._joined:
            return
        now = self._clock()
        self._longest_s = max(self._longest_s, now - self._last)
        self._last = now
        self._ticks += 1

    def snapshot(self) -> ProgressSnapshot:
        """Returns the current progress; may be called from any thread."""
        activity, ticks, since_tick_s = self._activity, self._ticks, self._clock() - self._last
        # None until the activity has completed once: a first time, e.g. with compilation, has no usual gap
        usual_gap_s = self._usual.get(activity)
        frame = _current_frames().get(self._thread)
        while frame is not None and frame.f_code.co_filename.endswith(_SKIPPED):
            frame = frame.f_back
        return ProgressSnapshot(
            activity, ticks, since_tick_s, usual_gap_s, _place(frame), _waits(frame), self.collectives()
        )


def _current_frames() -> dict[int, FrameType]:
    """Returns sys._current_frames(), called with the garbage collector off.

    In Python 3.11.7 and similar, a collection during this call can deadlock with a thread that starts or ends
    (https://github.com/python/cpython/issues/106883).
    """
    with _frames_lock:
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
    """Sets the function that returns a snapshot's `collectives`; `snapshot` calls this function from any thread."""
    _of_this_process.collectives = begun


_of_this_process = Progress()
during = _of_this_process.during
enter = _of_this_process.enter
tick = _of_this_process.tick
aside = _of_this_process.aside
joined = _of_this_process.joined
snapshot = _of_this_process.snapshot
