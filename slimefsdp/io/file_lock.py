"""Lets only one process write to a folder; the lock ends with that process, however it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported
from slimefsdp.io.user_files import refuse_unless_plain

LOCK = ".lock"
_held: dict[Path, tuple[FileLock, os.stat_result]] = {}  # this process's locks by folder, with the stat of the file


class FolderLock:
    """The lock on writing to a folder; all objects of a process for one folder share it."""

    def __init__(self, path: Path) -> None:
        self._folder = path.resolve()
        self._file = self._folder / LOCK

    def acquire(self) -> None:
        """Takes the lock and makes a missing folder; does nothing if this process has the lock already.

        On a file system without locks it only warns, and there is no protection.

        Raises:
            CheckpointError: another process has the lock (the error names its pid and host), or the folder cannot be
                written.
        """
        with io_reported(self._file, "save"):
            if self._folder in _held:
                if self._file.exists() and os.path.samestat(self._file.stat(), _held[self._folder][1]):
                    return
                self.release()  # the folder was replaced, and the lock on its old file protects nothing
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = self._locked()
            self._file.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            _held[self._folder] = lock, self._file.stat()

    def require_free(self) -> None:
        """Checks that `acquire` would succeed now; writes nothing.

        Raises:
            CheckpointError: as in `acquire`.
        """
        if self._folder not in _held and self._folder.is_dir() and os.path.lexists(self._file):
            with io_reported(self._file, "save"):
                self._locked().release()

    def release(self) -> None:
        """Releases the lock; the file stays, since removing it could let two processes in."""
        if self._folder in _held:
            _held.pop(self._folder)[0].release()

    def _locked(self) -> FileLock:
        refuse_unless_plain(self._file)  # flock would accept a pipe; filelock itself follows no links
        lock = FileLock(self._file, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise CheckpointError(
                f"{self._folder} is used by {self._holder()}",
                field="run.dir",
                hint="end that run, or choose another run.dir",
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            warnings.warn(f"{self._folder} cannot be locked: make sure that one run alone writes it", stacklevel=4)
        return lock

    def _holder(self) -> str:
        try:
            holder = json.loads(self._file.read_text())
            return f"process {holder['pid']} on {holder['host']}"
        except (OSError, ValueError, TypeError, KeyError):  # the file was not written yet, or is damaged
            return "a process that has just started"
