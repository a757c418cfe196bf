"""A server that lives no longer than the process that started it, however that one went; with a log of what it says.

Between the two stands a keeper, which is this file run as a program: it notices the end of either, by a pipe and as the
parent, and ends what is left of the server's process group. It is no child of the process that started it: Ray has an
actor that it ends kill its children first. It needs the standard library alone. Linux only.
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
_GRACE_S = 10.0  # after SIGTERM
_TAIL_BYTES = 20_000


class ChildServer:
    """Starts a server in a process group of its own.

    Args:
        command: the program and its arguments.
        environment: of the server.
        log: where its stdout and stderr go.
        folder: where it runs.
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
        self._held, self._told = started.stdin, started.stdout
        self._status: int | None = None
        self._reading = threading.Lock()
        self._keeper, self.pid = map(int, self._told.readline().split() or (0, 0))
        """Of the server's first process; 0 where it could not be started, which the log explains."""
        started.wait()  # it leaves the keeper behind

    def status(self) -> int | None:
        """Returns how it ended, as `subprocess.Popen.returncode`; None while it runs."""
        self.ends_within(0.0)
        return self._status

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so in that time."""
        deadline = time.monotonic() + seconds
        while self._status is None:
            with self._reading:
                if self._status is None and select.select([self._told], [], [], min(seconds, _LOOK_EVERY_S))[0]:
                    said = self._told.readline()  # of a keeper that was killed nothing comes
                    _kill_group(self.pid)
                    self._status = int(said or -signal.SIGKILL)
            if time.monotonic() >= deadline:
                break
        return self._status is not None

    def last_lines(self, count: int) -> list[str]:
        """Returns the last lines of the server's log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def end(self) -> None:
        """Ends all of its processes; idempotent. Returns when they are gone."""
        with suppress(OSError):
            self._held.close()
        if not self.ends_within(_GRACE_S + 5):  # somebody stopped it
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
    """Runs as the keeper: reports its pid and the server's (0: none), and at the end the exit status."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a scheduler may send them to all processes of a job
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with Path(log).open("ab") as file:
        try:
            # the keeper has one thread, and lives as long as the server is to
            server = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                preexec_fn=_with_signals_as_usual,
            )  # fmt: skip
        except OSError as error:
            file.write(f"{command[0]} cannot be started: {error}\n".encode())
            file.flush()  # whoever hears of it may read this at once
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
    _kill_group(server.pid)  # what the server itself has started may be left
    code = server.wait()
    _reap()
    _tell(f"{code}\n")


def _tell(what: str) -> None:
    with suppress(OSError):  # nobody is there any more
        os.write(1, what.encode())


def _reap() -> None:
    """Takes in what the server has left behind: in a container there may be nobody else who does."""
    deadline = time.monotonic() + 1.0
    with suppress(ChildProcessError):  # there is none
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.02)


def _with_signals_as_usual() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # engines have some blocked, which is inherited
    _end_with_keeper()


if __name__ == "__main__":
    if os.fork() == 0:
        _keep(sys.argv[1], sys.argv[2:])
