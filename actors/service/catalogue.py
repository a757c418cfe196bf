"""Keeps records, below run.dir, of what clients have saved, and of what the next start of the service continues."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter

from actors.service.users import User
from slimefsdp.checkpoint.store import NAMED, CheckpointStore
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import disk_reported, write_synced

Kind = Literal["weights", "sampler_weights"]
RecordT = TypeVar("RecordT", "Saved", "RunRecord", "SamplerRecord")
_FOLDER = "service"
COPY = "loaded-"  # the copy of a checkpoint that a run has loaded is named by this prefix and a sha256


@dataclass(frozen=True, slots=True)
class Saved:
    """Describes a save: a checkpoint to train from, or weights to sample from.

    Args:
        adapter: the name of the run's adapter in the group, and of the run's folders on disk (`adapter_of`).
        owner: the id of the user whose run wrote the save.
        rank: the rank of the adapter; 0 means all weights of the model.
        time: when saving began, in seconds since 1970.
        expires: when the save may be deleted, in seconds since 1970; None means never.
        request: the number, in the run, of the request that wrote the save.
        is_of_start: whether a start of the service, and not a client, wrote the save in order to continue the run.
    """

    run: str
    adapter: str
    kind: Kind
    name: str
    rank: int
    time: float
    size: int
    expires: float | None = None
    user_metadata: dict[str, Any] | None = None
    owner: str = ""
    request: int = 0
    is_of_start: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the texts from which the names of the save's folders and files are made."""
        return self.run, self.adapter, self.name

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()

    @property
    def file(self) -> str:
        """Returns the name of the file that has this record, without the suffix."""
        return f"{self.adapter}.{self.kind}.{self.name}"

    @property
    def path(self) -> str:
        """Returns the path by which clients name the save."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Describes a run that has not ended, so that the next start can continue it from one of its checkpoints.

    Args:
        is_finished: whether the newest checkpoint covers all requests of the run, because the service ended in order.
    """

    run: str
    session: str
    owner: str
    sdk_version: str
    rank: int
    user_metadata: dict[str, Any]
    is_finished: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return self.run, self.session

    @property
    def file(self) -> str:
        return adapter_of(self.run)


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    """Describes a sampling client whose session has not ended, so that the next start can restore the client.

    Args:
        path: the path of the saved weights; None means the base model.
        version: the name of the weights in the engine, since a later save may have replaced the weights at `path`.
    """

    id: str
    session: str
    owner: str
    sdk_version: str
    path: str | None
    version: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return self.id, self.session

    @property
    def file(self) -> str:
        return adapter_of(self.id)


@dataclass(frozen=True, slots=True)
class Progress:
    """Describes the progress of a run at a checkpoint. The progress is the loop state of the checkpoint.

    Args:
        next_number: the number of the first request after the checkpoint.
        has_gradients: whether the run had gradients that no update had used; a checkpoint does not contain gradients.
    """

    run: str
    next_number: int
    updates: int
    tokens: int
    has_gradients: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run wrote.

    Args:
        name: the name that a client or the service gave the checkpoint; None means that the checkpoint has no name.
        step: the step under which the group saved the checkpoint.
    """

    progress: Progress
    name: str | None
    step: int


def adapter_of(run: str) -> str:
    """Returns the name of a run's adapter: the run's id with dots instead of colons."""
    return run.replace(":", ".")


def is_copy(name: str) -> bool:
    """Returns whether this is the name of a copy of a loaded checkpoint; clients cannot give such long names."""
    return name.startswith(COPY) and len(name) == len(COPY) + 64


def whole_name(run: str, name: str) -> str:
    """Returns the name on disk of a run's checkpoint, if runs train all weights and share a folder of checkpoints."""
    return f"{adapter_of(run)}.{name}"


class Records(Generic[RecordT]):
    """Keeps records of one kind in a folder, each in a JSON file."""

    def __init__(self, folder: Path, kind: type[RecordT]) -> None:
        self._folder = folder
        self._type: TypeAdapter[RecordT] = TypeAdapter(kind)

    def keep(self, record: RecordT) -> None:
        """Writes a record; replaces a record with the same `file`.

        Raises:
            ResourceError: the disk is full or fails; the previous file stays.
        """
        file = self._folder / f"{record.file}.json"
        with disk_reported(file):
            self._folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            write_synced(part, json.dumps(asdict(record)).encode())
            part.replace(file)

    def all(self) -> list[RecordT]:
        """Reads all records. Skips, with a message, a file that is no record or whose names are no plain file names."""
        records = []
        for file in sorted(self._folder.glob("*.json")):
            try:
                if not file.is_file():  # reading a pipe would block
                    raise ValueError("it is no file")
                record = self._type.validate_json(file.read_bytes())
                if not all(map(_is_name, record.names)):
                    raise ValueError("it names another folder")
            except (OSError, ValueError, RecursionError) as error:
                problem = str(error).partition("\n")[0]
                print(f"{file} is no record of a service, and is skipped: {problem}", file=sys.stderr, flush=True)
                continue
            records.append(record)
        return records

    def forget(self, files: str) -> None:
        """Removes the records whose `file` matches a shell-style pattern."""
        for file in self._folder.glob(f"{files}.json"):
            file.unlink(missing_ok=True)


class Catalogue:
    """Keeps the records of a run.dir: what this and earlier starts have saved, and what the next start continues.

    `runs` and `samplers` have the records of the runs and sampling clients that have not ended.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.runs = Records(run_dir / _FOLDER / "runs", RunRecord)
        self.samplers = Records(run_dir / _FOLDER / "samplers", SamplerRecord)
        self._records = Records(run_dir / _FOLDER / "saved", Saved)
        self._lock = threading.Lock()
        self._saved: dict[str, Saved] = {}
        for saved in self._records.all():
            if self.folder(saved).exists():
                self._saved[saved.path] = saved

    def remove_unknown(self) -> None:
        """Removes weights to sample from that no client can name; called once at a start.

        Such weights were saved without a name, or the service ended before it recorded them.
        """
        known = {self.folder(saved) for saved in self._saved.values()}
        for folder in (self._run_dir / _FOLDER / "sampler_weights").glob("*/*@*"):
            if folder not in known and not folder.parent.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, saved: Saved) -> Path:
        """Returns the folder of a save. Each save of weights to sample from has a folder of its own."""
        if saved.kind == "sampler_weights":
            return self._run_dir / _FOLDER / "sampler_weights" / saved.adapter / f"{saved.name}@{saved.time!r}"
        return self.folder_of(saved.run, saved.rank, saved.name)

    def folder_of(self, run: str, rank: int, name: str) -> Path:
        """Returns the folder of a run's checkpoint of this name; the folder may not exist yet."""
        if rank == 0:
            return CheckpointStore.of_run(self._run_dir).named(whole_name(run, name)).root
        return CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run)).named(name).root

    def add(self, saved: Saved) -> None:
        """Records a save whose folder exists. This save replaces an earlier save with the same path."""
        with self._lock:
            before = self._saved.get(saved.path)
            self._records.keep(saved)
            self._saved[saved.path] = saved
        if before is not None and self.folder(before) != self.folder(saved):
            shutil.rmtree(self.folder(before), ignore_errors=True)

    def get(self, path: str, user: User) -> Saved:
        """Returns the save with this path.

        Raises:
            CheckpointError: the user has no save with this path, or the save has expired.
        """
        saved = self._saved.get(path)
        if saved is None or not user.owns(saved.owner) or saved.is_expired:
            raise CheckpointError(f"there is no checkpoint {path}", field="path", hint="list the run's checkpoints")
        return saved

    def find(self, path: str) -> Saved | None:
        """Returns the save with this path, of any owner; None if there is none."""
        return self._saved.get(path)

    def listed(self, user: User, run: str | None = None) -> list[Saved]:
        """Returns the saves of a user, or of one of their runs, oldest first."""
        owned = [saved for saved in list(self._saved.values()) if user.owns(saved.owner) and run in (None, saved.run)]
        return sorted(owned, key=lambda saved: saved.time)

    def remove(self, path: str, user: User) -> None:
        """Deletes a save from the disk.

        Raises:
            CheckpointError: as in `get`.
        """
        self._remove(self.get(path, user))

    def _remove(self, saved: Saved) -> None:
        with self._lock:
            if self._saved.get(saved.path) is not saved:  # replaced by a newer save, which may be in the same folder
                return
            del self._saved[saved.path]
            self._records.forget(saved.file)
        shutil.rmtree(self.folder(saved), ignore_errors=True)

    def remove_made_at_starts(self, run: str, but: str | None = None) -> None:
        """Removes the checkpoints that starts of the service saved for a run, when no error names them any more.

        Args:
            but: the path of a checkpoint to keep.
        """
        for saved in list(self._saved.values()):
            if saved.run == run and saved.is_of_start and saved.path != but:
                self._remove(saved)

    def remove_expired(self) -> None:
        """Removes expired saves; must be called every few seconds."""
        for saved in list(self._saved.values()):
            if saved.is_expired:
                self._remove(saved)

    def checkpoints_of(self, run: str, rank: int) -> list[Checkpoint]:
        """Returns the run's checkpoints, the newest first, without verifying their files.

        If two checkpoints have equal progress, a checkpoint without a name comes first, since no client can delete it.
        """
        store, prefix = CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run)), ""
        if rank == 0:
            store, prefix = CheckpointStore.of_run(self._run_dir), whole_name(run, "")
        folders = (store.root / NAMED).glob(f"{prefix}[!.]*")
        names = [None, *(folder.name for folder in folders if not is_copy(folder.name))]
        checkpoints = []
        for name in names:
            source = store if name is None else store.named(name)
            for step in source.steps():
                try:
                    state = source.manifest_of(source.path_of(step)).info["loop_state"]
                except CheckpointError:
                    continue  # incomplete or damaged; treated as missing
                if state.get("run") == run:
                    checkpoints.append(Checkpoint(Progress(**state), name and name.removeprefix(prefix), step))
        return sorted(
            checkpoints,
            key=lambda checkpoint: (checkpoint.progress.next_number, checkpoint.name is None, checkpoint.name or ""),
            reverse=True,
        )


def _is_name(text: str) -> bool:
    """Returns whether the text is a plain file name, which cannot lead out of its folder."""
    return "/" not in text and "\0" not in text and not text.startswith(".") and text != ""


def bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
