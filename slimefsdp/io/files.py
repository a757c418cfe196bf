"""Writes files and folders completely or not at all, with checksums and locks on folders."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from slimefsdp import heartbeat
from slimefsdp.errors import CheckpointError, ResourceError
from slimefsdp.io.user_files import can_keep_files, is_deeper, parse_json, refuse_unless_plain

MAX_JSON_BYTES = 64 << 20  # far above any real index, so that a manipulated file cannot fill the memory
MAX_DEPTH = 64  # levels of nesting in JSON; libraries fail differently on deeper values
LOCK = ".lock"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Describes a file: name, size in bytes, and the sha256 of its content in hex."""

    name: str
    bytes: int
    sha256: str


def record_of(path: Path) -> FileRecord:
    """Reads a whole file and returns its record; releases the interpreter lock while hashing."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            heartbeat.tick()
    return FileRecord(path.name, size, digest.hexdigest())


def link_or_copy(source: str, target: str) -> None:
    """Makes a hard link to a file that will not be changed, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def io_reported(path: Path, call: str) -> Iterator[None]:
    """Turns an OSError inside the block into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror or error}",
            field="run.dir",
            hint="check that the folder exists for every rank, is writable and has free space",
            call=call,
        ) from error


@contextmanager
def disk_reported(path: Path) -> Iterator[None]:
    """Turns an OSError inside the block, such as a full disk, into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{error.filename or path}: {error.strerror or error}",
            field="run.dir",
            hint="make room there, or choose a folder that is writable and has free space",
        ) from error


def json_bytes(value: Any, what: str) -> bytes:
    """Returns `value` as strict JSON; raises a CheckpointError for values that JSON changes, such as NaN and tuples."""

    def refused(problem: str, hint: str) -> CheckpointError:
        return CheckpointError(f"{what} {problem}", field=what, hint=hint)

    if is_deeper(value, MAX_DEPTH):
        raise refused(f"is nested more than {MAX_DEPTH} deep", "keep it flat: lists and dicts of values")
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
        survives = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(f"is not JSON: {error}", "pass plain JSON values") from error
    if not survives:
        raise refused("changes when read back from JSON", "use lists and string keys")
    if len(raw := text.encode()) > MAX_JSON_BYTES:
        problem = f"is {len(raw)} bytes of JSON, {MAX_JSON_BYTES} are the limit"
        raise refused(problem, "keep large data in files of its own, and their names here")
    return raw


def read_json(path: Path) -> tuple[Any, bytes]:
    """Returns (parsed file, its bytes); raises a CheckpointError if it is missing, too large or not strict JSON."""
    with io_reported(path, "load"):
        # lstat, since a link could lead out of the folder; reading a pipe would block
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"is not a plain file of at most {MAX_JSON_BYTES} bytes")
        raw = path.read_bytes()
    try:
        return parse_json(raw), raw
    except ValueError as error:
        raise damaged(path, f"is not JSON ({error})") from error


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on disk."""
    path.unlink(missing_ok=True)  # the file may be a link to another place
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the list of a folder's entries, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole(value: Any) -> int:
    """Returns a size or count from JSON; raises a ValueError if it is not an integer in [0, 2^63)."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is no whole number from 0 to 2^63")
    return value


def damaged(path: Path, problem: str) -> CheckpointError:
    """Returns the error for a file of a checkpoint whose content is not the saved one."""
    hint = "load another checkpoint, or restore this one from a copy"
    return CheckpointError(f"{path} {problem}", field=path.name, hint=hint, call="load")


# ---------------------------------------------------------------------- folders that are written once


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder to write files into; at the end of the block it is renamed to `path`.

    Missing parents are made.

    Raises:
        CheckpointError: `path` is taken, or the disk is full or fails. After any error, also one of the block, neither
            `path` nor the temporary folder exists.
    """
    target = _resolved(path)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        require_free_folder(target)
        partial.mkdir(parents=True)
        yield partial
        for file in [*partial.iterdir(), partial]:
            sync(file)
        partial.rename(target)  # fails if the target has been filled in the meantime; replaces an empty folder
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error}", field="path", hint="check the space and the permissions there"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # does nothing after the rename


def require_free_folder(path: str | Path, *, field: str = "path") -> None:
    """Checks that `path` is an empty folder or can be created; existing files are never overwritten.

    Args:
        field: the setting or argument with this path, for the error.

    Raises:
        CheckpointError: the path is taken, or no folder can be created there.
    """
    target = _resolved(path, field)
    problem = None
    if not can_keep_files(target):
        problem = "is in a folder that keeps no files"
    elif target.is_dir():
        if (taken := next(target.iterdir(), None)) is not None:
            problem = f"is not empty (it holds {taken.name!r})"
        elif target.is_mount():  # such as a volume of a container; nothing can be renamed onto it
            problem = "is a mount point, which cannot be replaced"
    elif target.exists():
        problem = "is a file"
    elif not (existing := next(parent for parent in target.parents if parent.exists())).is_dir():
        problem = f"cannot be made in {existing}, which is a file"
    if problem is not None:
        raise CheckpointError(f"{target} {problem}", field=field, hint="choose another folder, or one inside it")


def _resolved(path: str | Path, field: str = "path") -> Path:
    try:
        target = Path(path).expanduser().resolve()
        target.exists()  # raises for a name that is too long
        return target
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user, a loop of links, a zero byte
        raise CheckpointError(f"{str(path)!r} is no path: {error}", field=field, hint="name a folder") from error


def remove(path: Path) -> None:
    """Removes a file, a folder with its content, or a link, whose target stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# ---------------------------------------------------------------------- one writer of a folder

_held: dict[Path, tuple[FileLock, os.stat_result]] = {}  # folder -> this process's lock, and the lock file's stat


class FolderLock:
    """A lock that lets only one process write to a folder.

    The lock is released when the process ends. All `FolderLock` objects that a process has for a folder share one lock.
    """

    def __init__(self, path: Path) -> None:
        self._folder = path.resolve()
        self._file = self._folder / LOCK

    def acquire(self) -> None:
        """Takes the lock, and creates the folder if it is missing; does nothing if this process has the lock already.

        On a file system without locks this only warns, and other processes can write, too.

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
        """Checks, without writing, that `acquire` would succeed now; raises the CheckpointError of `acquire`."""
        if self._folder not in _held and self._folder.is_dir() and os.path.lexists(self._file):
            with io_reported(self._file, "save"):
                self._locked().release()

    def release(self) -> None:
        """Releases the lock; its file stays, since its removal could let two processes have a lock."""
        if self._folder in _held:
            _held.pop(self._folder)[0].release()

    def _locked(self) -> FileLock:
        refuse_unless_plain(self._file)  # flock would accept a pipe; filelock refuses links itself
        lock = FileLock(self._file, thread_local=False)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            try:
                holder = json.loads(self._file.read_text())
                user = f"process {holder['pid']} on {holder['host']}"
            except (OSError, ValueError, TypeError, KeyError):  # the file is damaged or not written yet
                user = "a process that has just started"
            hint = "end that run, or choose another run.dir"
            raise CheckpointError(f"{self._folder} is used by {user}", field="run.dir", hint=hint) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP):
                raise
            warnings.warn(f"{self._folder} cannot be locked: make sure that one run alone writes it", stacklevel=4)
        return lock
