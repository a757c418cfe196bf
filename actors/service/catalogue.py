"""Keeps records of what clients have saved: the names, and the folders below run.dir."""

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
COPY = "loaded-"  # prefix, before a sha256, of the copies of checkpoints that runs have loaded


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved checkpoint to train from, or saved weights to sample from.

    Args:
        adapter: the run's name in the group and on disk.
        owner: the id of the user whose run saved it.
        rank: the rank of the adapter; 0 for all weights of the model.
        time: when saving began, in seconds since 1970.
        expires: when it may be deleted, in seconds since 1970; None means never.
        request: the number of the run's request that saved it.
        is_of_start: whether a start of the service saved it to continue the run, and not a client.
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
        """Returns the parts of the names of its folders and files."""
        return self.run, self.adapter, self.name

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires < time.time()

    @property
    def file(self) -> str:
        """Returns the name of its record's file, without the suffix."""
        return f"{self.adapter}.{self.kind}.{self.name}"

    @property
    def path(self) -> str:
        """Returns the path by which clients name it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has not ended, for the next start of the service; its progress is in its checkpoints.

    Args:
        is_finished: whether the service ended in order, and the newest checkpoint covers all requests of the run.
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
    """A sampling client whose session has not ended, for the next start of the service.

    Args:
        path: the path of the saved weights; None for the base model.
        version: the name of the weights in the engine; other weights may have been saved under the path since.
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
    """The progress of a run at a checkpoint. It is the checkpoint's loop state, so that both are always of one time.

    Args:
        next_number: the number of the first request after the checkpoint.
        has_gradients: whether there were gradients without an update; a checkpoint does not contain gradients.
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
        name: the name that the client or the service gave the checkpoint; None if it only has a step.
        step: the step of the save in the group.
    """

    progress: Progress
    name: str | None
    step: int


def adapter_of(run: str) -> str:
    """Returns the name of a run's adapter in the group, which may not contain the colons of a run's id."""
    return run.replace(":", ".")


def is_copy(name: str) -> bool:
    """Returns whether a checkpoint is the copy of a loaded checkpoint; clients cannot give such long names."""
    return name.startswith(COPY) and len(name) == len(COPY) + 64


def whole_name(run: str, name: str) -> str:
    """Returns the name of a checkpoint of all weights; the checkpoints of all runs share one folder."""
    return f"{adapter_of(run)}.{name}"


class Records(Generic[RecordT]):
    """Records of one kind, each a JSON file in a folder."""

    def __init__(self, folder: Path, kind: type[RecordT]) -> None:
        self._folder = folder
        self._type: TypeAdapter[RecordT] = TypeAdapter(kind)

    def keep(self, record: RecordT) -> None:
        """Writes a record; replaces a record of the same name.

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
        """Reads all records; prints and skips files that are not records, or that name another folder."""
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
                print(f"{file} is no record of a service, and passed over: {problem}", file=sys.stderr, flush=True)
                continue
            records.append(record)
        return records

    def forget(self, files: str) -> None:
        """Removes the records whose files match a pattern."""
        for file in self._folder.glob(f"{files}.json"):
            file.unlink(missing_ok=True)


class Catalogue:
    """Knows what was saved in a run.dir, by this and earlier starts of the service, and what the next start continues.

    `runs` and `samplers` have the records of runs and sampling clients that have not ended.
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
        """Returns the folder of a save; each save of weights to sample from has a folder of its own."""
        if saved.kind == "sampler_weights":
            return self._run_dir / _FOLDER / "sampler_weights" / saved.adapter / f"{saved.name}@{saved.time!r}"
        return self.folder_of(saved.run, saved.rank, saved.name)

    def folder_of(self, run: str, rank: int, name: str) -> Path:
        """Returns the folder of a run's checkpoint of this name, which may not exist yet."""
        if rank == 0:
            return CheckpointStore.of_run(self._run_dir).named(whole_name(run, name)).root
        return CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run)).named(name).root

    def add(self, saved: Saved) -> None:
        """Records a save whose folder exists; it replaces an earlier save with the same path."""
        with self._lock:
            before = self._saved.get(saved.path)
            self._records.keep(saved)
            self._saved[saved.path] = saved
        if before is not None and self.folder(before) != self.folder(saved):
            shutil.rmtree(self.folder(before), ignore_errors=True)

    def get(self, path: str, user: User) -> Saved:
        """Returns the save with this path.

        Raises:
            CheckpointError: the user has no save with this path, or it has expired.
        """
        saved = self._saved.get(path)
        if saved is None or not user.owns(saved.owner) or saved.is_expired:
            raise CheckpointError(f"there is no checkpoint {path}", field="path", hint="list those of the run")
        return saved

    def find(self, path: str) -> Saved | None:
        """Returns the save with this path, whoever owns it, or None."""
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
        """Removes the checkpoints that starts of the service saved for a run, once no error names them any more.

        Args:
            but: the path of the checkpoint to keep.
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
        """Returns the run's checkpoints whose files exist, the newest first, without verifying them.

        Of two checkpoints with equal progress, one without a name comes first, since a client cannot delete it.
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
