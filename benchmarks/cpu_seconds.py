"""CPU-seconds of a command and of all processes that come of it, while it runs.

    python benchmarks/cpu_seconds.py COMMAND ARGUMENT...

runs a command as the reaper of its orphans: a daemon that leaves its session and its parent is still below this
process. `CpuMeter` of another process adds up what /proc says of all below it. A process that has ended counts in
its parent once that has waited for it; where the parent ignores SIGCHLD, as Ray's raylet does, nobody does, and
the meter keeps what it saw last.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PR_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_END_S = 30.0  # for what a command leaves behind to end by itself


@dataclass(frozen=True, slots=True)
class _Process:
    parent: int
    seconds: float  # its own, and of children that it has waited for
    forgets_children: bool


class CpuMeter:
    """Samples the CPU-seconds of all processes below one, in a thread of its own; a context manager.

    Args:
        root: a process that adopts orphans, which is not counted itself.
        interval_s: of what ends in a process that forgets its children, this much may be missed.
    """

    def __init__(self, root: int, interval_s: float = 0.2) -> None:
        self._root = root
        self._interval_s = interval_s
        self._last: dict[tuple[int, int], _Process] = {}  # by pid and start, in ticks: a pid may be used again
        self._forgotten = 0.0  # seconds of ended processes that no parent counts
        self._times: list[float] = []  # since the epoch
        self._seconds: list[float] = []
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(self._interval_s):
            self.sample()

    def sample(self) -> float:
        """CPU-seconds so far."""
        with self._lock:
            try:
                waited_for = None
                while waited_for != (now := self._waited_for()):  # whoever ended meanwhile may have been counted twice
                    waited_for, found = now, _below(self._root)
            except OSError:  # it has ended, and with it the account
                return self._seconds[-1]
            self._forgotten += sum(
                process.seconds
                for name, process in self._last.items()
                if name not in found and self._is_forgotten(process)
            )
            self._last = found
            self._times.append(time.time())
            self._seconds.append(waited_for + self._forgotten + sum(one.seconds for one in found.values()))
            return self._seconds[-1]

    def _waited_for(self) -> float:
        return sum(map(int, _fields(self._root)[13:15])) * _TICK_S

    def _is_forgotten(self, process: _Process) -> bool:
        """Whether an ended process is in nobody's count: its parent, as last seen, does not wait for children."""
        parents = [one for (pid, _), one in self._last.items() if pid == process.parent]
        return any(parent.forgets_children for parent in parents)

    def at(self, moment: float) -> float:
        """CPU-seconds until a moment, in seconds since the epoch, between two samples in proportion."""
        with self._lock:
            after = bisect_right(self._times, moment)
            if after == 0:
                return 0.0
            if after == len(self._times):
                return self._seconds[-1]
            before, behind = self._times[after - 1], self._times[after]
            share = (moment - before) / (behind - before)
            return self._seconds[after - 1] + share * (self._seconds[after] - self._seconds[after - 1])


def _below(root: int) -> dict[tuple[int, int], _Process]:
    """All processes that a process has started, and those have, as they are now."""
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # it is gone
                fields = _fields(int(entry.name))
                children.setdefault(int(fields[1]), []).append((int(entry.name), fields))
    found, left = {}, [root]
    while left:
        parent = left.pop()
        for pid, fields in children.get(parent, ()):
            started, seconds = int(fields[19]), sum(map(int, fields[11:15])) * _TICK_S
            found[pid, started] = _Process(parent, seconds, _forgets_children(pid))
            left.append(pid)
    return found


def _forgets_children(pid: int) -> bool:
    """Whether a process ignores SIGCHLD: the kernel then adds the time of its children to nobody's."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigIgn:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)
    return False


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def adopt_orphans() -> None:
    """From now on whoever loses its parent below this process becomes a child of it.

    Raises:
        OSError: the system has no such thing; Linux has.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run_and_reap(command: Sequence[str]) -> int:
    """Runs a command to its end and waits for all that it leaves behind; returns its exit status.

    What has not ended by itself 30 seconds after the command is killed.
    """
    adopt_orphans()
    # a Popen would reap its own child behind our back
    main = subprocess.Popen(command).pid
    status, deadline = -1, float("inf")
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == main:
            status, deadline = os.waitstatus_to_exitcode(ended), time.monotonic() + _END_S
        elif pid == 0:
            if time.monotonic() > deadline:
                for below, _ in _below(os.getpid()):
                    with suppress(ProcessLookupError):
                        os.kill(below, signal.SIGKILL)
            time.sleep(0.05)


def main() -> int:
    """Writes the CPU-seconds of everything that was waited for, as the kernel counts them, behind the last line."""
    status = run_and_reap(sys.argv[1:])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps({"cpu_s": used.ru_utime + used.ru_stime}), flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
