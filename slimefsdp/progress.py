"""How far this process is: what it does, and when it last got on. Whoever watches it compares that with the clock.

A process is one rank, or one engine, and has one call at a time, so this belongs to the process and not to an object
that all code would have to be handed. It takes no lock that a stuck thread could hold, and a tick costs less than a
microsecond.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

LAUNCH = "launch"
"""The phase of a process that is not ready yet."""
IDLE = "idle"
"""The phase of one that has no call."""
_BETWEEN = ("/torch/_ops.py", "/threading.py", "/concurrent/futures/_base.py")  # files whose frames tell nothing
# files in which a thread that only waits for other ranks, or for the save behind it, has the innermost of the others
_WAITING = ("/torch/distributed/", "/slimefsdp/attention/wire.py", "/slimefsdp/checkpoint/background.py")


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a process is at one moment."""

    phase: str
    ticks: int
    still_s: float  # since the last tick
    longest_s: float | None  # between two ticks of such a phase, as far as one ended in this process; None: none did
    place: str  # in the code, of the thread that has the call
    waits: bool  # that thread waits for others, as far as its frame tells


class Progress:
    """What `enter` and `tick` keep.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase = LAUNCH
        self._ticks = 0
        self._last = clock()
        self._gaps: dict[str, float] = {}  # phase -> the longest between two ticks
        self._ended: set[str] = set()  # not those that only gave way to a phase inside of them
        self._thread = threading.get_ident()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The calling thread is in a phase, and then in the one before again; also a decorator."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
            self._ended.add(phase)

    def enter(self, phase: str) -> None:
        """The calling thread begins a phase, which lasts until the next one; counts as a tick of the one before."""
        self.tick()
        self._phase = phase
        self._thread = threading.get_ident()

    def tick(self) -> None:
        """A unit of work is done, in any thread."""
        now = self._clock()
        gap, phase = now - self._last, self._phase
        if gap > self._gaps.get(phase, -1.0):
            self._gaps[phase] = gap
        self._last = now
        self._ticks += 1

    def standing(self) -> Standing:
        """How far this process is, asked from another thread."""
        phase, ticks, still_s = self._phase, self._ticks, self._clock() - self._last
        # what came for the first time, such as compiling or the first save, is no measure before it is over
        longest_s = self._gaps[phase] if phase in self._ended else None
        frame = sys._current_frames().get(self._thread)
        while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
            frame = frame.f_back
        return Standing(phase, ticks, still_s, longest_s, _place(frame), _waits(frame))


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "nowhere in Python"
    path = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({'/'.join(path.parts[-2:])}:{frame.f_lineno})"


def _waits(frame: FrameType | None) -> bool:
    return frame is not None and any(part in frame.f_code.co_filename for part in _WAITING)


_of_this_process = Progress()
during = _of_this_process.during
enter = _of_this_process.enter
tick = _of_this_process.tick
standing = _of_this_process.standing
