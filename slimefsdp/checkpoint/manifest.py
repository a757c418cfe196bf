"""What a checkpoint says about its own files: a checksum file beside each, then one manifest of them all.

Every writer hashes its own files as it writes them and leaves the digest in `<file>.sha256`; `write_manifest` collects
the digests in manifest.json, so that no file is reread for it. The manifest also carries its own
digest. Nothing that is read here is trusted: names, sizes and types are checked before they are used.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import (
    CHECKSUM_LINE,
    SIDECAR,
    checksum_of,
    damaged,
    json_bytes,
    read_json,
    whole,
    write_synced,
)

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


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


def write_manifest(folder: Path, step: int, info: dict[str, Any]) -> None:
    """Make the folder's files with checksums, and nothing else, its content. `info` is plain JSON.

    CheckpointError if a file has no checksum or changed size since, or if `info` would not come back equal; OSError.
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
        checksums = list(pool.map(checksum_of, (folder / record.name for record in mine)))
    for record, checksum in zip(mine, checksums, strict=True):
        if checksum.sha256 != record.sha256:
            raise damaged(folder / record.name, "does not have the sha256 it was saved with")


def _collect_digests(folder: Path) -> tuple[FileRecord, ...]:
    """Returns one record per file with a checksum, and removes the checksum files."""
    records = []
    for name in sorted({path.name.removesuffix(SIDECAR) for path in folder.iterdir()}):
        if name.startswith(".nfs"):
            continue  # what NFS keeps of a file that was removed while open
        if not _PLAIN_NAME.fullmatch(name) or name == MANIFEST:
            raise CheckpointError(
                f"{folder / name} was put there by somebody else",
                field=name,
                hint="keep other programs out of the folder",
                call="save",
            )
        path, sidecar = folder / name, folder / (name + SIDECAR)
        checksum = CHECKSUM_LINE.fullmatch(sidecar.read_text() if sidecar.exists() else "")
        if not checksum or int(checksum[2]) != path.stat().st_size:
            raise CheckpointError(
                f"{path} has no checksum file, or changed after it was written",
                field=name,
                hint="call write_checksum for every finished file, on the rank that wrote it",
                call="save",
            )
        records.append(FileRecord(name, int(checksum[2]), checksum[1]))
    for sidecar in folder.glob(f"*{SIDECAR}"):
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
