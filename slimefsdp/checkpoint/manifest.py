"""The manifest of a checkpoint: it lists the checkpoint's files with size and sha256, and carries its own digest.

Every writer hashes its own files as it writes them, so that no file is reread for the manifest. Nothing that is read
here is trusted: names, sizes and types are checked before they are used.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import (
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
_PART_NAME = re.compile(rf"([a-z]{{1,20}})/{re.escape(MANIFEST)}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Describes a file of a checkpoint: name, size in bytes, sha256 in hex. Of a part only the manifest is listed."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Lists the content of a committed checkpoint; `info` is the caller's JSON."""

    step: int
    info: dict[str, Any]
    files: tuple[FileRecord, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The folders inside of the checkpoint, each of which has a manifest of its own."""
        return tuple(match[1] for record in self.files if (match := _PART_NAME.fullmatch(record.name)))


def record_of(path: Path) -> FileRecord:
    """Reads a finished file and returns its record."""
    checksum = checksum_of(path)
    return FileRecord(path.name, checksum.bytes, checksum.sha256)


def write_manifest(folder: Path, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> None:
    """Lists the files of a folder and the manifests of the folders in it, as its whole content.

    Args:
        info: plain JSON. A part has the same `save_id` and step.
        files: the records of all files, from whoever wrote them.

    Raises:
        CheckpointError: the folder does not hold these files, a part is of another save, or `info` would not come back
            equal. OSError: the disk refuses.
    """
    json_bytes(info, "info")
    listed = (*sorted(files, key=lambda record: record.name), *_parts_of(folder, step, info))
    _check_names(folder, listed)
    for record in files:
        path = folder / record.name
        if path.stat().st_size != record.bytes:
            raise CheckpointError(
                f"{path} has changed after it was written",
                field=record.name,
                hint="keep other programs out of the folder",
                call="save",
            )
    write_synced(folder / MANIFEST, _render(Manifest(step, info, listed)))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a committed folder; its files are not looked at (`check_files`).

    Raises:
        CheckpointError: it cannot be parsed, was altered, is of a newer schema, or lists what is no plain file name.
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
        is_name = _PLAIN_NAME.fullmatch(record.name) or _PART_NAME.fullmatch(record.name)
        if not is_name or record.name == MANIFEST or not _SHA256.fullmatch(record.sha256):
            raise damaged(path, f"lists {record.name!r}, which is no plain file name with a sha256")
    return manifest


def check_files(
    folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1, only_part: str | None = None
) -> None:
    """Rereads the files and compares them with the manifest, also those of parts.

    Names and sizes are those of all files; of the bytes, `share` out of `shares` is reread, about as many in each.

    Args:
        only_part: rereads the bytes of this part alone.

    Raises:
        CheckpointError: names the first bad file: missing, surplus, not a plain file, wrong size or sha256.
        OSError: the disk refuses.
    """
    listed = _listed(folder, manifest)
    for record in listed:
        found = (folder / record.name).lstat()
        if not stat.S_ISREG(found.st_mode):
            raise damaged(folder / record.name, "is not a plain file")
        if found.st_size != record.bytes:
            raise damaged(folder / record.name, f"has {found.st_size} bytes, not {record.bytes}")
    reread = [record for record in listed if only_part is None or record.name.startswith(f"{only_part}/")]
    # hashing lets go of the interpreter lock, so threads use the idle cores
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        mine = _shares_of(reread, shares)[share]
        checksums = list(pool.map(checksum_of, (folder / record.name for record in mine)))
    for record, checksum in zip(mine, checksums, strict=True):
        if checksum.sha256 != record.sha256:
            raise damaged(folder / record.name, "does not have the sha256 it was saved with")


def _listed(folder: Path, manifest: Manifest) -> list[FileRecord]:
    """Returns the files of a checkpoint and of its parts, by names relative to `folder`.

    Raises:
        CheckpointError: what is there is not what the manifests list, or a part's manifest cannot be read.
    """
    _check_names(folder, manifest.files)
    listed = list(manifest.files)
    for part in manifest.parts:
        if (folder / part).is_symlink() or not (folder / part).is_dir():
            raise damaged(folder / part, "is not a folder")
        inside = read_manifest(folder / part)
        if inside.parts:
            raise damaged(folder / part / MANIFEST, "lists parts, though it is of a part")
        listed += [replace(record, name=f"{part}/{record.name}") for record in _listed(folder / part, inside)]
    return listed


def _check_names(folder: Path, files: Sequence[FileRecord]) -> None:
    """
    Raises:
        CheckpointError: a folder does not have these files and parts, or has others.
    """
    # NFS keeps what was removed while it was open as .nfs*
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".nfs")} - {MANIFEST}
    if odd := sorted(present ^ {record.name.removesuffix(f"/{MANIFEST}") for record in files}):
        raise damaged(folder / odd[0], "is not in the manifest" if odd[0] in present else "is missing")


def _parts_of(folder: Path, step: int, info: dict[str, Any]) -> Iterator[FileRecord]:
    """Yields a record of each part's manifest, which lists the part's files."""
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        manifest, name = read_manifest(part), f"{part.name}/{MANIFEST}"
        same_save = (manifest.step, manifest.info.get("save_id")) == (step, info.get("save_id"))
        if not same_save or not _PART_NAME.fullmatch(name):
            raise CheckpointError(
                f"{part} is no part of this save",
                field=part.name,
                hint="keep other programs out of the folder, and save again",
                call="save",
            )
        yield replace(record_of(part / MANIFEST), name=name)


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
