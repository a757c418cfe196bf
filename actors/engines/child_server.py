"""Starts a server that writes a log, and that ends when its owner, the process that started it, ends for any reason.

This file is also run as a program, the keeper, which is the server's parent. When the server ends, or a pipe shows that
the owner has ended, the keeper ends the rest of the server's process group. The keeper is not a child of the owner,
because Ray kills an actor's children with the actor. The keeper needs only the standard library. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LOOK_EVERY_S = 0.1
_GRACE_S = 10.0  # between SIGTERM and SIGKILL
_TAIL_BYTES = 20_000


class ChildServer:
    """Starts a server in a process group of its own.

    Args:
        command: the program and its arguments.
        environment: the server's environment variables.
        log: the file for the server's stdout and stderr.
        folder: the server's working directory.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path) -> None:
        self.log = log
        started = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(log.absolute()), *command],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(environment),
            cwd=folder,
        )
        assert started.stdin is not None and started.stdout is not None
        self._to_keeper, self._from_keeper = started.stdin, started.stdout
        self._status: int | None = None
        self._reading = threading.Lock()
        self._keeper, self.pid = map(int, self._from_keeper.readline().split() or (0, 0))
        """`pid` is the id of the server's first process; 0 means that the server did not start (the log says why)."""
        started.wait()  # this process only forks the keeper

    def status(self) -> int | None:
        """Returns the server's exit status as in `subprocess.Popen.returncode`; None means that the server runs."""
        self.ends_within(0.0)
        return self._status

    def ends_within(self, seconds: float) -> bool:
        """Waits up to `seconds` for the server's end; returns whether the server has ended."""
        deadline = time.monotonic() + seconds
        while self._status is None:
            with self._reading:
                if self._status is None and select.select([self._from_keeper], [], [], min(seconds, _LOOK_EVERY_S))[0]:
                    status = self._from_keeper.readline()  # empty if the keeper was killed
                    _kill_group(self.pid)
                    self._status = int(status or -signal.SIGKILL)
            if time.monotonic() >= deadline:
                break
        return self._status is not None

    def last_lines(self, count: int) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def end(self) -> None:
        """Ends all processes of the server, and waits for their end; idempotent."""
        with suppress(OSError):
            self._to_keeper.close()
        if not self.ends_within(_GRACE_S + 5):  # the keeper was stopped by a signal
            with suppress(ProcessLookupError):
                os.kill(self._keeper, signal.SIGKILL)
            self.ends_within(_GRACE_S)


def _kill_group(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _end_with_keeper() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep(log: str, command: Sequence[str]) -> None:
    """Runs as the keeper: prints its own pid and the server's pid (0 if the start fails), later the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # schedulers send these signals to all processes of a job
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(log).open("ab") as file:
        try:
            # preexec_fn is safe because the keeper has only one thread
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                preexec_fn=_with_signals_as_usual,
            )  # fmt: skip
        except OSError as error:
            file.write(f"{command[0]} cannot be started: {error}\n".encode())
            file.flush()  # the owner may read the log as soon as it has the line below
            _tell(f"{os.getpid()} 0\n127\n")
            return
    _tell(f"{os.getpid()} {server.pid}\n")
    while server.poll() is None and not select.select([0], [], [], _LOOK_EVERY_S)[0]:
        pass
    if server.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
    _kill_group(server.pid)  # the server's own children may still run
    code = server.wait()
    _reap()
    _tell(f"{code}\n")


def _tell(line: str) -> None:
    with suppress(OSError):  # the reader has ended
        os.write(1, line.encode())


def _reap() -> None:
    """Reaps orphaned processes of the server; in a container there may be no init process that reaps them."""
    deadline = time.monotonic() + 1.0
    with suppress(ChildProcessError):  # there are no children
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def _with_signals_as_usual() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # engines block some signals, and children inherit this
    _end_with_keeper()


if __name__ == "__main__":
    if os.fork() == 0:
        _keep(sys.argv[1], sys.argv[2:])
