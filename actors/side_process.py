"""Calls functions of this project in a separate Python process, for code that may hang or end its process.

The process runs `python -m actors.side_process`. It has the caller's module search path and its own session, and ends
with the caller. Processes that the called code has started are ended after the call.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from slimefsdp.errors import ResourceError, SlimeError, portable

T = TypeVar("T")
LONGEST_WAIT_S = 2e6  # limit on a wait for a process: the milliseconds have to fit into 32 bits
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_answer_stream = -1  # in a side process: the file descriptor for its answer


class SideProcessError(Exception):
    """A side process gave no answer.

    Args:
        reason: how the process ended, for an error message.
        printed: the output of the process, of which the end is shown.
        is_overdue: whether the process was ended at its time limit.
    """

    def __init__(self, reason: str, printed: bytes, *, is_overdue: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.is_overdue = reason, is_overdue
        self.printed = " ".join(printed.decode(errors="replace").split())[-500:] or "nothing"

    def reported(self, work: str, limit: str, field: str) -> ResourceError:
        """Returns the typed error for the user.

        Args:
            work: what the process did, for the message.
            limit: the setting that limits the process's time; the error names this setting if the process was overdue.
            field: the setting that the error names if the process ended by itself.
        """
        if self.is_overdue:
            return ResourceError(f"{work} {self.reason}", field=limit, hint=f"raise {limit}")
        problem = f"the process for {work} {self.reason}; it printed {self.printed}"
        return ResourceError(problem, field=field, hint="look at what it printed, and at the memory that is left")


def call(function: Callable[..., T], *args: Any, timeout_s: float) -> T:
    """Calls a function in a side process and returns its value.

    Args:
        function: a function of a module; the process imports that module.
        args: the function's arguments; these and the value are pickled.

    Raises:
        SlimeError: the function raised it.
        SideProcessError: the process ended without an answer, or did not answer within `timeout_s`.
    """
    # import the package that contains this file, not one in the current folder
    paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    request = pickle.dumps(sys.path) + pickle.dumps((function, args))
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answered, tempfile.TemporaryFile() as printed:
        asked.write(request)
        asked.seek(0)
        # files instead of pipes, since processes that the user's code starts inherit them and could keep a pipe open
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "actors.side_process", str(answered.fileno())],
            stdin=asked,
            stdout=printed,
            stderr=printed,
            pass_fds=[answered.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        try:
            status = process.wait(min(timeout_s, LONGEST_WAIT_S))
        except subprocess.TimeoutExpired:
            raise SideProcessError(f"took more than {timeout_s:g} s", _content(printed), is_overdue=True) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends processes that the called code has started
            process.wait()
        try:
            value, error = pickle.loads(_content(answered))
        except (EOFError, pickle.UnpicklingError):
            raise SideProcessError(f"ended with status {status}", _content(printed)) from None
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


def answer(value: Any, error: SlimeError | None = None) -> NoReturn:
    """Sends the answer to the caller and ends this side process, without waiting for threads that still run."""
    with os.fdopen(_answer_stream, "wb") as stream:
        stream.write(pickle.dumps((value, error and portable(error))))
    os._exit(0)


def end_with_parent() -> None:
    """Has the kernel end this process when its parent ends, even if the parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _main() -> None:
    global _answer_stream
    end_with_parent()
    _answer_stream = int(sys.argv[1])
    os.set_inheritable(_answer_stream, False)
    sys.path += [folder for folder in pickle.load(sys.stdin.buffer) if folder not in sys.path]
    function, args = pickle.load(sys.stdin.buffer)
    try:
        value = function(*args)
    except SlimeError as error:
        answer(None, error)
    answer(value)


if __name__ == "__main__":
    from actors import side_process  # functions import this module by its name, and not this copy, `__main__`

    side_process._main()
