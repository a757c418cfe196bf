"""A server that lives no longer than the process that started it, however that one went; with a log of what it says.

Between the two stands a keeper, which is this file run as a program: it notices the end of either, by a pipe and as the
parent, and ends what is left of the server's process group. It needs the standard library alone. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
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
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(log.absolute()), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=dict(environment),
            cwd=folder,
        )
        assert self._keeper.stdout is not None
        with self._keeper.stdout as told:
            self.pid = int(told.readline() or 0)
        """Of the server's first process; 0 where it could not be started, which the log explains."""

    def status(self) -> int | None:
        """How it ended, as `subprocess.Popen.returncode`; None while it runs."""
        code = self._keeper.poll()
        return code if code is None or code < 128 else 128 - code

    def ends_within(self, seconds: float) -> bool:
        """Whether it has ended, or does so in that time."""
        try:
            self._keeper.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self, count: int) -> list[str]:
        """Of its log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        return [line for line in text.splitlines() if line.strip()][-count:]

    def end(self) -> None:
        """Ends all of its processes; idempotent. Returns when they are gone."""
        assert self._keeper.stdin is not None
        with suppress(OSError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(_GRACE_S + 5)
        except subprocess.TimeoutExpired:  # somebody stopped it
            self._keeper.kill()
            self._keeper.wait()
            _kill_group(self.pid)


def _kill_group(pid: int) -> None:
    if pid:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _end_with_keeper() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _keep(log: str, command: Sequence[str]) -> int:
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
            return 127
    with suppress(OSError):
        os.write(1, f"{server.pid}\n".encode())
    os.close(1)
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
    return code if code >= 0 else 128 - code


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
    _end_with_keeper()


if __name__ == "__main__":
    sys.exit(_keep(sys.argv[1], sys.argv[2:]))
