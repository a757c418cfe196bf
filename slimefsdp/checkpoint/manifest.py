"""What a checkpoint says about its own files: a seal beside each one as it is written, then one manifest of them all.

Every writer hashes its own files as it writes them and leaves the digest in `<file>.sha256`; `write_manifest` collects
the digests in manifest.json, so that no file is reread for it. The manifest also carries its own
digest. Nothing that is read here is trusted: names, sizes and types are checked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp import progress
from slimefsdp.errors import CheckpointError
from slimefsdp.strict_json import is_deeper, parse_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
MAX_JSON_BYTES = 64 << 20  # far above any honest index; keeps an altered file from filling the memory
MAX_DEPTH = 64  # of JSON; deeper nesting fails in one library after another, each in its own way
_SIDECAR = ".sha256"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(r"([0-9a-f]{64}) (\d+)\n")


@dataclass(frozen=True, slots=True)
class Seal:
    """What a finished file holds: sha256 in hex, and its size."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint: its plain name, size in bytes and sha256 in hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a committed checkpoint says it holds; `info` is the caller's JSON."""

    step: int
    info: dict[str, Any]
    files: tuple[FileRecord, ...]


@contextmanager
def io_reported(path: Path, phase: str) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror or error}",
            field="run.dir",
            hint="check that the folder exists for every rank, is writable and has free space",
            phase=phase,
        ) from error


def json_bytes(value: Any, what: str) -> bytes:
    """`value` as strict JSON; CheckpointError if it would not come back equal (NaN, tuples, integer keys, tensors)."""
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
    """The parsed file and its bytes; CheckpointError if it is missing, over MAX_JSON_BYTES, or not strictly JSON."""
    with io_reported(path, "load"):
        # lstat: a link could lead out of the folder, a pipe would block
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > MAX_JSON_BYTES:
            raise damaged(path, f"is not a plain file of at most {MAX_JSON_BYTES} bytes")
        raw = path.read_bytes()
    try:
        return parse_json(raw), raw
    except ValueError as error:
        raise damaged(path, f"is not JSON ({error})") from error


def write_synced(path: Path, data: bytes) -> None:
    """Write the file and wait until the disk has it."""
    path.unlink(missing_ok=True)  # what is there may be a link that leads elsewhere
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the disk has a file, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_sealed(path: Path, data: bytes) -> None:
    """Write the file, wait until the disk has it, and seal it."""
    write_synced(path, data)
    leave_seal(path, Seal(hashlib.sha256(data).hexdigest(), len(data)))


def leave_seal(path: Path, seal: Seal) -> None:
    """Leave the digest and size of a file that the disk has beside it, for `write_manifest`."""
    # not synced: it is gone before the folder becomes a checkpoint
    path.with_name(path.name + _SIDECAR).write_text(f"{seal.sha256} {seal.bytes}\n")


def write_manifest(folder: Path, step: int, info: dict[str, Any]) -> None:
    """Make the folder's sealed files, and nothing else, its content. `info` is plain JSON.

    CheckpointError if a file was not sealed or changed size since, or if `info` would not come back equal; OSError.
    """
    json_bytes(info, "info")
    write_synced(folder / MANIFEST, _render(Manifest(step, info, _collect_digests(folder))))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a committed folder; its files are not looked at (`check_files`).

    CheckpointError if it cannot be parsed, was altered, is of a newer schema, or lists what is no plain file name.
    """
    path = folder / MANIFEST
    document, raw = read_json(path)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise damaged(path, f"has schema version {version}, this program knows up to {SCHEMA_VERSION}")
    try:
        files = tuple(FileRecord(str(f["name"]), whole(f["bytes"]), str(f["sha256"])) for f in document["files"])
        manifest = Manifest(document["step"], document["info"], files)
        is_as_written = _render(manifest) == raw and type(manifest.step) is int and isinstance(manifest.info, dict)
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise damaged(path, f"is not a manifest ({error!r})") from error
    if not is_as_written:
        raise damaged(path, "was altered after it was written")
    for record in files:
        if not _PLAIN_NAME.fullmatch(record.name) or record.name == MANIFEST or not _SHA256.fullmatch(record.sha256):
            raise damaged(path, f"lists {record.name!r}, which is no plain file name with a sha256")
    return manifest


def check_files(folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Reread the files and compare with the manifest.

    Names and sizes are those of all files; of the bytes, `share` out of `shares` is reread, about as many in each.

    CheckpointError names the first bad file: missing, surplus, not a plain file, wrong size or sha256. OSError.
    """
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".nfs")} - {MANIFEST}
    if odd := sorted(present ^ {record.name for record in manifest.files}):
        raise damaged(folder / odd[0], "is not in the manifest" if odd[0] in present else "is missing")
    for record in manifest.files:
        found = (folder / record.name).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise damaged(folder / record.name, "is not a plain file")
        if found.st_size != record.bytes:
            raise damaged(folder / record.name, f"has {found.st_size} bytes, not {record.bytes}")
    # hashing lets go of the interpreter lock, so threads use the idle cores
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        mine = _shares_of(manifest.files, shares)[share]
        digests = list(pool.map(_sha256_of, (folder / record.name for record in mine)))
    for record, digest in zip(mine, digests, strict=True):
        if digest != record.sha256:
            raise damaged(folder / record.name, "does not have the sha256 it was saved with")


def whole(value: Any) -> int:
    """A size or count that JSON holds; ValueError if it is none."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.100} is no whole number from 0 to 2^63")
    return value


def damaged(path: Path, problem: str) -> CheckpointError:
    """The error that a file of the store is not what was saved."""
    return CheckpointError(
        f"{path} {problem}",
        field=path.name,
        hint="load another checkpoint, or restore this one from a copy",
        phase="load",
    )


def _collect_digests(folder: Path) -> tuple[FileRecord, ...]:
    """One record per sealed file; the digest files themselves are removed, they do not belong to the checkpoint."""
    records = []
    for name in sorted({path.name.removesuffix(_SIDECAR) for path in folder.iterdir()}):
        if name.startswith(".nfs"):
            continue  # what NFS keeps of a file that was removed while open
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(
                f"{folder / name} was put there by somebody else",
                field=name,
                hint="keep other programs out of the folder",
                phase="save",
            )
        path, sidecar = folder / name, folder / (name + _SIDECAR)
        seal = _SEAL.fullmatch(sidecar.read_text() if sidecar.exists() else "")
        if not seal or int(seal[2]) != path.stat().st_size:
            raise CheckpointError(
                f"{path} was not sealed or changed afterwards",
                field=name,
                hint="call leave_seal for every finished file, on the rank that wrote it",
                phase="save",
            )
        records.append(FileRecord(name, int(seal[2]), seal[1]))
    for sidecar in folder.glob(f"*{_SIDECAR}"):
        sidecar.unlink()
    return tuple(records)


def _shares_of(files: Sequence[FileRecord], shares: int) -> list[list[FileRecord]]:
    """The largest files first, each to the share that has the fewest bytes so far."""
    parts: list[list[FileRecord]] = [[] for _ in range(shares)]
    sizes = [0] * shares
    for record in sorted(files, key=lambda record: (-record.bytes, record.name)):
        least = sizes.index(min(sizes))
        parts[least].append(record)
        sizes[least] += record.bytes
    return parts


def _render(manifest: Manifest) -> bytes:
    """The manifest's one possible text: any other byte in the file shows that it was altered."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "step": manifest.step,
        "info": manifest.info,
        "files": [asdict(record) for record in manifest.files],
    }
    digest = hashlib.sha256(json_bytes(document, MANIFEST)).hexdigest()
    return json_bytes(document | {"sha256": digest}, MANIFEST)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    progress.tick()
    return digest
