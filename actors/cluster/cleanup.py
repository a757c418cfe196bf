"""A small process that ends the local Ray cluster once the driver has ended, in whatever way.

Most of Ray's processes end with the driver, but Ray's agents run for another minute. The cleanup process has its own
session, so that no signal to the driver's terminal or process group reaches it. When the driver ends, a pipe between
them closes. The driver sends the pids of Ray's processes, and the cleanup process finds their descendants in /proc
while these still have their parents. A pid only counts together with a start time, since pids are reused. Processes
that lost their parents between two scans, such as a server that an environment starts in its own session, are found at
the end by an environment variable that they inherited from Ray's processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_LAUNCH_SCAN_S = 0.25  # time between scans while Ray starts, when a new process may soon lose its parent
_SCAN_S = 2.0
_END = b"end\n"
_MARK = "SLIMEFSDP_CLUSTER"  # an environment variable of the cluster's processes
_END_TIMEOUT_S = 10.0  # a process in an uninterruptible system call outlives SIGKILL for a while
Table = dict[int, tuple[int, int]]
"""pid -> (pid of the parent, start time in clock ticks since the machine started)."""


class CleanupProcess:
    """The driver's handle of the cleanup process; Linux only, since it reads /proc.

    Construct it before Ray starts: all processes that the driver starts from then until `watch` count as the cluster's.
    """

    def __init__(self) -> None:
        driver, self._mark = os.getpid(), uuid.uuid4().hex
        others = [pid for pid, (parent, _) in running_processes().items() if parent == driver]
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), self._mark, str(driver)]
        command += map(str, others)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    @contextmanager
    def marking(self) -> Iterator[None]:
        """Marks all processes that start inside the block, and their descendants, as the cluster's."""
        os.environ[_MARK] = self._mark
        try:
            yield
        finally:
            del os.environ[_MARK]

    def watch(self, pids: Sequence[int]) -> None:
        """Names the cluster's processes; only these, their descendants and marked processes will be ended."""
        self._send(" ".join(map(str, pids)).encode() + b"\n")

    def end(self) -> None:
        """Ends the remaining processes of the cluster and the cleanup process; waits until all are gone."""
        self._send(_END)
        with suppress(OSError):
            self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S + 1)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _pipe(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _send(self, message: bytes) -> None:
        with suppress(OSError, ValueError):  # without a cleanup process the driver can continue
            self._pipe.write(message)
            self._pipe.flush()


class ProcessTree:
    """A set of processes and their descendants, by pid and start time."""

    def __init__(self) -> None:
        self._members: dict[int, int] = {}  # pid -> start time

    def __bool__(self) -> bool:
        return bool(self._members)

    def adopt(self, pids: Iterable[int], table: Table) -> None:
        """Makes the processes with these pids part of the tree, as far as the table has them."""
        self._members |= {pid: table[pid][1] for pid in pids if pid in table}

    def update(self, table: Table) -> None:
        """Removes processes that have ended, and adds the children of the remaining processes."""
        self._members = {
            pid: started for pid, started in self._members.items() if pid in table and table[pid][1] == started
        }
        while children := {
            pid: started
            for pid, (parent, started) in table.items()
            if parent in self._members and pid not in self._members
        }:
            self._members |= children

    def end(self) -> None:
        """Kills all processes of the tree, and those that they start meanwhile; gives up after `_END_TIMEOUT_S`."""
        deadline = time.monotonic() + _END_TIMEOUT_S
        self.update(running_processes())
        while self and time.monotonic() < deadline:
            for pid in self._members:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            self.update(running_processes())


def running_processes() -> Table:
    """Returns all processes of this machine except zombies."""
    processes = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # the columns of proc_pid_stat(5) after the program's name, which may contain anything
            columns = file.read_bytes().rpartition(b")")[2].split()
        except OSError:  # the process has ended since it was listed
            continue
        if columns and columns[0] not in b"ZX":
            processes[int(file.parent.name)] = (int(columns[1]), int(columns[19]))
    return processes


def _marked(mark: str) -> set[int]:
    """Returns the pids of processes with this mark in their environment; skips environments that are not readable."""
    pids, wanted = set(), f"{_MARK}={mark}".encode()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # the process is another user's, or has ended since it was listed
            if wanted in file.read_bytes().split(b"\0"):
                pids.add(int(file.parent.name))
    return pids


def _wait_and_clean_up(mark: str, driver: int, others: Sequence[int]) -> None:
    """Waits until the driver ends or asks for the cleanup, then ends the cluster; runs in the cleanup process.

    Args:
        others: pids of children of the driver that are not the cluster's.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send them to all processes of a job
    known = {os.getpid(), *others}

    def started(table: Table) -> set[int]:
        return {pid for pid, (parent, _) in table.items() if parent == driver} - known

    family = ProcessTree()
    is_named = False
    # checks the parent's pid, since a forked child of the driver may keep the pipe open
    while os.getppid() == driver:
        table = running_processes()
        if not is_named:
            family.adopt(started(table), table)
        family.update(table)
        if not select.select([0], [], [], _SCAN_S if is_named else _LAUNCH_SCAN_S)[0]:
            continue
        message = os.read(0, 1 << 16)
        if pids := [int(word) for word in message.split() if word.isdigit()]:
            family, is_named = ProcessTree(), True
            family.adopt(pids, running_processes())
        if not message or message.endswith(_END):
            if not is_named:  # Ray failed to start: processes since the last scan are Ray's, too
                table = running_processes()
                family.adopt(started(table), table)
            break
    deadline = time.monotonic() + _END_TIMEOUT_S
    while True:
        family.adopt(_marked(mark), running_processes())
        if not family or time.monotonic() > deadline:
            break
        family.end()


if __name__ == "__main__":
    _wait_and_clean_up(sys.argv[1], int(sys.argv[2]), [int(pid) for pid in sys.argv[3:]])
