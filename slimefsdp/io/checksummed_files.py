"""Writes files with a wait for the disk, computes their checksums, and reads strict JSON."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimefsdp import heartbeat
from slimefsdp.errors import CheckpointError, ResourceError
from slimefsdp.io.user_files import is_deeper, parse_json

MAX_JSON_BYTES = 64 << 20  # far above any real index; keeps a manipulated file from filling the memory
MAX_DEPTH = 64  # nesting of JSON; libraries fail in different ways on deeper values
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checksum:
    """The sha256 of a file's content, in hex, and its size."""

    sha256: str
    bytes: int


def checksum_of(path: Path) -> Checksum:
    """Reads a whole file and returns its checksum; releases the interpreter lock while hashing. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            heartbeat.tick()
    return Checksum(digest.hexdigest(), size)


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
    """Turns an OSError inside the block, such as of a full disk, into a ResourceError that names the file."""
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"{error.filename or path}: {error.strerror or error}",
            field="run.dir",
            hint="make room there, or choose a folder that is writable and has free space",
        ) from error


def json_bytes(value: Any, what: str) -> bytes:
    """Returns `value` as strict JSON; CheckpointError if it would not be read back equal (NaN, tuples, tensors, ..)."""
    if is_deeper(value, MAX_DEPTH):
        raise CheckpointError(
            f"{what} is nested more than {MAX_DEPTH} deep", field=what, hint="keep it flat: lists and dicts of values"
        )
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
        survives = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}", field=what, hint="pass plain JSON values") from error
    if not survives:
        raise CheckpointError(f"{what} changes when read back from JSON", field=what, hint="use lists and string keys")
    if len(raw := text.encode()) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{what} is {len(raw)} bytes of JSON, {MAX_JSON_BYTES} are the limit",
            field=what,
            hint="keep large data in files of its own, and their names here",
        )
    return raw


def read_json(path: Path) -> tuple[Any, bytes]:
    """Returns a parsed file and its bytes; CheckpointError if it is missing, over MAX_JSON_BYTES or not strict JSON."""
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
    path.unlink(missing_ok=True)  # it may be a link that leads elsewhere
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whole(value: Any) -> int:
    """Returns a size or count read from JSON; ValueError if it is not an integer from 0 to 2^63."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is no whole number from 0 to 2^63")
    return value


def damaged(path: Path, problem: str) -> CheckpointError:
    """Returns the error for a file of the store that is not what was saved."""
    return CheckpointError(
        f"{path} {problem}",
        field=path.name,
        hint="load another checkpoint, or restore this one from a copy",
        call="load",
    )
