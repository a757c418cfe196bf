"""One writer per folder: a lock that ends with the process, however the process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import warnings
from pathlib import Path

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported

LOCK = ".lock"
_held: dict[Path, int] = {}  # of this process: folder -> open file, which is what holds the lock


class FolderLock:
    """The right of this process to write into a folder; all objects of one process for one folder share it."""

    def __init__(self, path: Path) -> None:
        self._folder = path.resolve()

    def acquire(self) -> None:
        """Takes the lock, and makes the folder where it is missing; nothing happens where this process holds it.

        On a file system without locks there is a warning and no protection.

        Raises:
            CheckpointError: another process holds it (its pid and host are named), or the folder cannot be written.
        """
        file = self._folder / LOCK
        with io_reported(file, "save"):
            if self._folder in _held:
                if file.exists() and os.path.samestat(file.stat(), os.fstat(_held[self._folder])):
                    return
                self.release()  # somebody removed the folder: the lock on what is gone protects nothing
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = _open(file, os.O_CREAT)
            try:
                self._lock(descriptor)
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            except BaseException:
                os.close(descriptor)
                raise
        _held[self._folder] = descriptor

    def require_free(self) -> None:
        """Whether `acquire` would get it now; writes nothing.

        Raises:
            CheckpointError: as `acquire`.
        """
        if self._folder in _held:
            return
        file = self._folder / LOCK
        with io_reported(file, "save"):
            try:
                descriptor = _open(file)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                # shared: where NFS makes it a lock of byte ranges, an exclusive one needs a file open for writing
                self._lock(descriptor, fcntl.LOCK_SH)
            finally:
                os.close(descriptor)

    def release(self) -> None:
        """Gives the lock back; the file stays, since removing it would let two processes in."""
        descriptor = _held.pop(self._folder, None)
        if descriptor is not None:
            os.close(descriptor)

    def _lock(self, descriptor: int, kind: int = fcntl.LOCK_EX) -> None:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._folder} is used by {_holder(os.pread(descriptor, 1000, 0))}",
                field="run.dir",
                hint="end that run, or choose another run.dir",
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            warnings.warn(f"{self._folder} cannot be locked: make sure that one run alone writes it", stacklevel=4)


def _holder(said: bytes) -> str:
    """Who holds the lock, from what `acquire` has left in its file."""
    try:
        found = json.loads(said)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, TypeError, KeyError):  # not written yet, or damaged
        return "a process that has just started"


def _open(file: Path, flags: int = 0) -> int:
    """The lock's file, never a link's target; a pipe would wait for somebody to open its other end."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(file))
    return descriptor


def _forget_in_child() -> None:
    """A forked process shares the open files, and would keep the locks alive after their owner."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
