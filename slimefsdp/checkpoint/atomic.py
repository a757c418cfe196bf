"""A folder of files that becomes a checkpoint whole or not at all, and is checked byte for byte before anyone loads it.

Layout under the store's root (one writing run per root, one save at a time):

    step_00000012/            a committed checkpoint: its files and manifest.json
    .tmp_step_00000012/       being written, or left by a writer that died; never read
    .replaced_step_00000012/  the earlier save of a step while the new one takes its place; read if the step is gone
    latest                    the name of the folder that was committed last

Every writer hashes and fsyncs its own files (`seal_file`) and leaves the digest in `<file>.sha256`; `commit` collects
the digests in manifest.json, so that no rank rereads what another wrote. The manifest also carries its own digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
LATEST = "latest"
MAX_JSON_BYTES = 64 << 20  # far above any honest index; keeps an altered file from filling the memory
_SIDECAR = ".sha256"
_TMP, _REPLACED = ".tmp_", ".replaced_"
_STEP_NAME = re.compile(r"step_(\d{8,})")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SEAL = re.compile(r"([0-9a-f]{64}) (\d+)\n")


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
            field="checkpoint.root",
            hint="check that the folder exists for every rank, is writable and has free space",
            phase=phase,
        ) from error


def json_bytes(value: Any, what: str) -> bytes:
    """`value` as strict JSON; CheckpointError if it would not come back equal (NaN, tuples, integer keys, tensors)."""
    try:
        text = json.dumps(value, indent=1, allow_nan=False) + "\n"
        survives = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}", field=what, hint="pass plain JSON values") from error
    if not survives:
        raise CheckpointError(f"{what} changes when read back from JSON", field=what, hint="use lists and string keys")
    return text.encode()


def read_json(path: Path) -> tuple[Any, bytes]:
    """The parsed file and its bytes; CheckpointError if it is missing, over MAX_JSON_BYTES, or not JSON."""
    with io_reported(path, "load"):
        # lstat: a link could lead out of the folder, a pipe would block
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > MAX_JSON_BYTES:
            raise _bad(path, f"is not a plain file of at most {MAX_JSON_BYTES} bytes")
        raw = path.read_bytes()
    try:
        return json.loads(raw), raw
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"is not JSON ({error})") from error


def write_synced(path: Path, data: bytes) -> None:
    """Write the file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def seal_file(path: Path) -> None:
    """Wait until the disk has this finished file, and leave its digest and size beside it for `commit`."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    write_synced(path.with_name(path.name + _SIDECAR), f"{digest} {path.stat().st_size}\n".encode())


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 calls `begin`, `commit` and `prune`; any process may read."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, step: int) -> Path:
        """Clear what dead writers left, and make the empty folder that every rank writes step `step` into."""
        temporary = self.temporary_path(step)
        with io_reported(temporary, "save"):
            self.root.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.root.parent)
            for torn in self.root.glob(f"{_TMP}step_*"):
                shutil.rmtree(torn)
            for replaced in self.root.glob(f"{_REPLACED}step_*"):
                final = self.root / replaced.name.removeprefix(_REPLACED)
                if final.exists():
                    shutil.rmtree(replaced)
                else:  # the writer died between moving it aside and moving the new one in
                    replaced.rename(final)
            temporary.mkdir()
        return temporary

    def temporary_path(self, step: int) -> Path:
        """The folder that `begin` makes on rank 0, for the other ranks."""
        return self.root / f"{_TMP}{_step_name(step)}"

    def commit(self, step: int, info: dict[str, Any]) -> Path:
        """Make the sealed files of `begin(step)` the newest checkpoint. Call after every rank has sealed its files.

        An earlier save of the same step stays loadable until the new one is in place. CheckpointError if a file was not
        sealed or changed size since, if `info` is not plain JSON, or if the disk refuses.
        """
        temporary, final = self.temporary_path(step), self.root / _step_name(step)
        replaced = self.root / f"{_REPLACED}{final.name}"
        with io_reported(temporary, "save"):
            json_bytes(info, "info")
            write_synced(temporary / MANIFEST, _render(Manifest(step, info, _collect_digests(temporary))))
            _sync_folder(temporary)
            if final.exists():
                final.rename(replaced)
            temporary.rename(final)
            _sync_folder(self.root)
            pointer = self.root / f".{LATEST}.tmp"
            write_synced(pointer, f"{final.name}\n".encode())
            pointer.replace(self.root / LATEST)
            _sync_folder(self.root)
            if replaced.exists():
                shutil.rmtree(replaced)
        return final

    def steps(self) -> list[int]:
        """Steps with a committed folder, ascending; nothing is verified."""
        return sorted(self._folders())

    def path_of(self, step: int) -> Path:
        """The folder of a committed step; CheckpointError if there is none."""
        folders = self._folders()
        if step not in folders:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.root}", field="step", hint=f"choose one of {sorted(folders)}"
            )
        return folders[step]

    def verify(self, step_folder: Path) -> Manifest:
        """Reread every byte and compare with the manifest.

        CheckpointError names the first bad file: missing, surplus, not a plain file, wrong size or sha256, a manifest
        that cannot be parsed, was altered, is of another step or of a newer schema.
        """
        manifest = _read_manifest(step_folder)
        named = _STEP_NAME.search(step_folder.name)
        if named and int(named[1]) != manifest.step:
            raise _bad(step_folder / MANIFEST, f"is of step {manifest.step}")
        with io_reported(step_folder, "load"):
            present = {path.name for path in step_folder.iterdir()} - {MANIFEST}
            if odd := sorted(present ^ {record.name for record in manifest.files}):
                raise _bad(step_folder / odd[0], "is not in the manifest" if odd[0] in present else "is missing")
            for record in manifest.files:
                found = (step_folder / record.name).lstat()
                if not stat.S_ISREG(found.st_mode):
                    raise _bad(step_folder / record.name, "is not a plain file")
                if found.st_size != record.bytes:
                    raise _bad(step_folder / record.name, f"has {found.st_size} bytes, not {record.bytes}")
            # hashing lets go of the interpreter lock, so threads use the idle cores
            with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
                digests = list(pool.map(_sha256_of, (step_folder / record.name for record in manifest.files)))
        for record, digest in zip(manifest.files, digests, strict=True):
            if digest != record.sha256:
                raise _bad(step_folder / record.name, "does not have the sha256 it was saved with")
        return manifest

    def newest_verified(self) -> tuple[int, Path, list[CheckpointError]]:
        """Step and folder of the newest whole checkpoint, and why each preferred one was passed over: log those loudly.

        Newest means committed last: the one `latest` names, then earlier steps. Later steps (a crash before `latest`
        moved, or the future of a run that was resumed from an earlier step) come after all of those. Without a usable
        `latest` the highest step comes first. CheckpointError if nothing is whole.
        """
        folders = self._folders()
        latest, skipped = self._latest(folders)
        for step in _by_preference(folders, latest):
            try:
                self.verify(folders[step])
            except CheckpointError as error:
                skipped.append(error)
            else:
                return step, folders[step], skipped
        reasons = "; ".join(error.message for error in skipped)
        raise CheckpointError(
            f"no whole checkpoint in {self.root}" + (f" ({reasons})" if reasons else ""),
            field="checkpoint.root",
            hint="point it at the folder of an earlier run, or start a new run in an empty folder",
            phase="load",
        )

    def prune(self, keep_last: int) -> list[int]:
        """Remove all but the `keep_last` checkpoints that `newest_verified` would try first; returns those removed."""
        assert keep_last >= 1
        folders = self._folders()
        removed = _by_preference(folders, self._latest(folders)[0])[keep_last:]
        for step in removed:
            doomed = self.temporary_path(step)  # a kill halfway leaves what the next `begin` clears, not a torn step
            with io_reported(doomed, "prune"):
                if doomed.exists():
                    shutil.rmtree(doomed)
                folders[step].rename(doomed)
                shutil.rmtree(doomed)
        return sorted(removed)

    def _folders(self) -> dict[int, Path]:
        with io_reported(self.root, "load"):
            names = {path.name for path in self.root.iterdir()} if self.root.exists() else set()
        found: dict[int, Path] = {}
        for prefix in (_REPLACED, ""):  # a step moved aside counts only while nothing has taken its place
            for name in names:
                match = _STEP_NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match and match[0] == _step_name(int(match[1])):
                    found[int(match[1])] = self.root / name
        return found

    def _latest(self, folders: dict[int, Path]) -> tuple[int | None, list[CheckpointError]]:
        """The step that `latest` names, None if it names none of `folders`, and what is odd about it."""
        if not folders:
            return None, []
        pointer = self.root / LATEST
        try:
            with pointer.open("rb") as file:
                content = file.read(100).decode(errors="replace").strip()
        except OSError as error:
            return None, [_bad(pointer, f"cannot be read ({error.strerror})")]
        match = _STEP_NAME.fullmatch(content)
        if not match or int(match[1]) not in folders:
            return None, [_bad(pointer, f"names {content!r}, which is no checkpoint here")]
        latest = int(match[1])
        later = [_bad(folders[step], f"is later than latest ({content})") for step in sorted(folders) if step > latest]
        return latest, later


def _step_name(step: int) -> str:
    assert step >= 0
    return f"step_{step:08d}"


def _by_preference(folders: dict[int, Path], latest: int | None) -> list[int]:
    return sorted(folders, key=lambda step: (latest is not None and step > latest, -step))


def _bad(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {problem}",
        field=path.name,
        hint="load another checkpoint, or restore this one from a copy",
        phase="load",
    )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _collect_digests(folder: Path) -> tuple[FileRecord, ...]:
    """One record per sealed file; the digest files themselves are removed, they do not belong to the checkpoint."""
    records = []
    for name in sorted({path.name.removesuffix(_SIDECAR) for path in folder.iterdir()}):
        assert _PLAIN_NAME.fullmatch(name) and name != MANIFEST, name
        path, sidecar = folder / name, folder / (name + _SIDECAR)
        seal = _SEAL.fullmatch(sidecar.read_text() if sidecar.exists() else "")
        if not seal or int(seal[2]) != path.stat().st_size:
            raise CheckpointError(
                f"{path} was not sealed or changed afterwards",
                field=name,
                hint="call seal_file on every finished file, on the rank that wrote it",
                phase="save",
            )
        records.append(FileRecord(name, int(seal[2]), seal[1]))
    for sidecar in folder.glob(f"*{_SIDECAR}"):
        sidecar.unlink()
    return tuple(records)


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


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    document, raw = read_json(path)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if type(version) is int and version > SCHEMA_VERSION:
        raise _bad(path, f"has schema version {version}, this program knows up to {SCHEMA_VERSION}")
    try:
        files = tuple(FileRecord(str(f["name"]), int(f["bytes"]), str(f["sha256"])) for f in document["files"])
        manifest = Manifest(document["step"], document["info"], files)
        is_as_written = _render(manifest) == raw and type(manifest.step) is int and isinstance(manifest.info, dict)
    except (KeyError, TypeError, ValueError, AttributeError, CheckpointError) as error:
        raise _bad(path, f"is not a manifest ({error!r})") from error
    if not is_as_written:
        raise _bad(path, "was altered after it was written")
    for record in files:
        if not _PLAIN_NAME.fullmatch(record.name) or record.name == MANIFEST or not _SHA256.fullmatch(record.sha256):
            raise _bad(path, f"lists {record.name!r}, which is no plain file name with a sha256")
    return manifest
