"""What clients have saved: its names, and where it lies below run.dir."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter

from actors.service.users import User
from slimefsdp.checkpoint.store import NAMED, CheckpointStore
from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import disk_reported, write_synced

Kind = Literal["weights", "sampler_weights"]
RecordT = TypeVar("RecordT", "Saved", "RunRecord", "SamplerRecord")
_FOLDER = "service"
COPY = "loaded-"  # what copies of checkpoints that runs have loaded are called, before a sha256


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint to train from, or weights to sample from.

    Args:
        adapter: the run's name in the group and on the disk.
        owner: the id of the user whose run wrote it.
        rank: 0: all weights of the model.
        time: when its writing began, in seconds since 1970.
        expires: the same of when it may go; None: never.
        request: the number of the run's request that it is of.
        is_of_start: no client gave it its name, but a start that went on from there.
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
        """The parts of the names of its folders and files."""
        return self.run, self.adapter, self.name

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"tinker://{self.run}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has not ended, for the next start; how far it is, its checkpoints say.

    Args:
        is_finished: the service ended in order, and all that the run was asked for is in its newest checkpoint.
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
        """The parts of the names of its folders and files."""
        return self.run, self.session


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    """A sampling client whose session has not ended, for the next start.

    Args:
        path: of the weights that were saved under a name; None: the base.
        version: what they are called in the engine; the path may come to be that of others.
    """

    id: str
    session: str
    owner: str
    sdk_version: str
    path: str | None
    version: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The parts of the names of its folders and files."""
        return self.id, self.session


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run was when it wrote a checkpoint, whose loop state this is: one is on the disk as the other is.

    Args:
        next_number: of the request behind the checkpoint.
        has_gradients: that no update was made of; they are in no checkpoint.
    """

    run: str
    next_number: int
    updates: int
    tokens: int
    has_gradients: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that a run wrote itself.

    Args:
        name: that its client gave it, or the service; None: it is one of those by step.
        step: as the group calls it.
    """

    progress: Progress
    name: str | None
    step: int


def adapter_of(run: str) -> str:
    """The name in the group of a run's adapter; runs have colons in theirs."""
    return run.replace(":", ".")


def is_copy(name: str) -> bool:
    """Whether a checkpoint is the copy of one that was loaded; what a client can give as a name is shorter."""
    return name.startswith(COPY) and len(name) == len(COPY) + 64


def whole_name(run: str, name: str) -> str:
    """Returns the name of a checkpoint of all weights; those of all runs share one folder."""
    return f"{adapter_of(run)}.{name}"


class Catalogue:
    """All that was saved, also by earlier starts of the service in the same run.dir."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._saved: dict[str, Saved] = {}
        for one in _records(run_dir / _FOLDER / "saved", Saved):
            if self.folder(one).exists():
                self._saved[one.path] = one

    def remove_unknown(self) -> None:
        """Removes weights to sample from that nobody can ask for, as a start finds them.

        They had no name, or the service ended before it was written down.
        """
        known = {self.folder(one) for one in self._saved.values()}
        for folder in (self._run_dir / _FOLDER / "sampler_weights").glob("*/*@*"):
            if folder not in known and not folder.parent.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)

    def folder(self, one: Saved) -> Path:
        """Returns the folder of a save. Weights to sample from get a folder that nothing else ever had."""
        if one.kind == "sampler_weights":
            return self._run_dir / _FOLDER / "sampler_weights" / one.adapter / f"{one.name}@{one.time!r}"
        return self.folder_of(one.run, one.rank, one.name)

    def folder_of(self, run: str, rank: int, name: str) -> Path:
        """Returns the folder of a run's checkpoint of this name, which may not exist yet."""
        if rank == 0:
            return CheckpointStore.of_run(self._run_dir).named(whole_name(run, name)).root
        return CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run)).named(name).root

    def add(self, one: Saved) -> None:
        """Remembers it, in place of what had its path before; its folder is there."""
        with self._lock:
            before = self._saved.get(one.path)
            _write(self._file(one), asdict(one))
            self._saved[one.path] = one
        if before is not None and self.folder(before) != self.folder(one):
            shutil.rmtree(self.folder(before), ignore_errors=True)

    def get(self, path: str, user: User) -> Saved:
        """
        Raises:
            CheckpointError: the user has none under this path.
        """
        with self._lock:
            found = self._saved.get(path)
        if found is None or not user.owns(found.owner) or (found.expires is not None and found.expires < time.time()):
            raise CheckpointError(f"there is no checkpoint {path}", field="path", hint="list those of the run")
        return found

    def find(self, path: str) -> Saved | None:
        """Returns the save with this path, of any user, or None."""
        with self._lock:
            return self._saved.get(path)

    def listed(self, user: User, run: str | None = None) -> list[Saved]:
        """Returns the saves of a user, or of one of their runs, oldest first."""
        with self._lock:
            found = [one for one in self._saved.values() if user.owns(one.owner) and run in (None, one.run)]
        return sorted(found, key=lambda one: one.time)

    def remove(self, path: str, user: User) -> None:
        """Deletes it from the disk.

        Raises:
            CheckpointError: the user has none under this path.
        """
        self._remove(self.get(path, user))

    def _remove(self, one: Saved) -> None:
        with self._lock:
            if self._saved.get(one.path) is not one:  # a newer one has its path, and of a checkpoint its folder
                return
            del self._saved[one.path]
            self._file(one).unlink(missing_ok=True)
        shutil.rmtree(self.folder(one), ignore_errors=True)

    def remove_made_at_starts(self, run: str, but: str | None = None) -> None:
        """Removes the checkpoints that starts have given a name to, since nobody is told of them any more.

        Args:
            but: the path of the one that clients are told of.
        """
        with self._lock:
            saved = [one for one in self._saved.values() if one.run == run and one.is_of_start and one.path != but]
        for one in saved:
            self._remove(one)

    def remove_expired(self) -> None:
        """Removes saves whose time has passed; it is to be called every few seconds."""
        with self._lock:
            saved = list(self._saved.values())
        for one in saved:
            if one.expires is not None and one.expires < time.time():
                self._remove(one)

    def keep_run(self, record: RunRecord) -> None:
        """Records a run for the next start, in place of its earlier record."""
        _write(self._record(record.run), asdict(record))

    def kept_runs(self) -> list[RunRecord]:
        """Returns the runs that had not ended when the service ended, by whatever cause."""
        return _records(self._run_dir / _FOLDER / "runs", RunRecord)

    def forget_run(self, run: str) -> None:
        """It has ended; its checkpoints stay."""
        self._record(run).unlink(missing_ok=True)

    def keep_sampler(self, record: SamplerRecord) -> None:
        """Records a sampling client for the next start."""
        _write(self._run_dir / _FOLDER / "samplers" / f"{adapter_of(record.id)}.json", asdict(record))

    def kept_samplers(self) -> list[SamplerRecord]:
        """Returns the sampling clients whose sessions had not ended when the service ended."""
        return _records(self._run_dir / _FOLDER / "samplers", SamplerRecord)

    def forget_samplers(self, session: str) -> None:
        """Their session has ended."""
        for file in (self._run_dir / _FOLDER / "samplers").glob(f"{session}.*.json"):
            file.unlink(missing_ok=True)

    def checkpoints_of(self, run: str, rank: int) -> list[Checkpoint]:
        """Returns the run's checkpoints whose files exist; none of them is verified.

        The newest are first, and of equal ones that without a name, which no client deletes.
        """
        store, prefix = CheckpointStore.of_run(self._run_dir, "actor", adapter_of(run)), ""
        if rank == 0:
            store, prefix = CheckpointStore.of_run(self._run_dir), whole_name(run, "")
        folders = (store.root / NAMED).glob(f"{prefix}[!.]*")
        names = [None, *(folder.name for folder in folders if not is_copy(folder.name))]
        found = []
        for name in names:
            one = store if name is None else store.named(name)
            for step in one.steps():
                try:
                    state = one.manifest_of(one.path_of(step)).info["loop_state"]
                except CheckpointError:
                    continue  # torn or altered: as if it were not there
                if state.get("run") == run:
                    found.append(Checkpoint(Progress(**state), name and name.removeprefix(prefix), step))
        return sorted(found, key=lambda one: (one.progress.next_number, one.name is None, one.name or ""), reverse=True)

    def _record(self, run: str) -> Path:
        return self._run_dir / _FOLDER / "runs" / f"{adapter_of(run)}.json"

    def _file(self, one: Saved) -> Path:
        return self._run_dir / _FOLDER / "saved" / f"{one.adapter}.{one.kind}.{one.name}.json"


def _records(folder: Path, kind: type[RecordT]) -> list[RecordT]:
    """All of a folder; a file that is none, or names another place than its own, is passed over and said."""
    found = []
    for file in sorted(folder.glob("*.json")):
        try:
            if not file.is_file():  # a pipe would be waited for
                raise ValueError("it is no file")
            one = TypeAdapter(kind).validate_json(file.read_bytes())
            if not all(map(_is_name, one.names)):
                raise ValueError("it names another folder")
        except (OSError, ValueError, RecursionError) as error:
            said = str(error).partition("\n")[0]
            print(f"{file} is no record of a service, and passed over: {said}", file=sys.stderr, flush=True)
            continue
        found.append(one)
    return found


def _is_name(text: str) -> bool:
    """Whether it is the name of something in a folder, and leads nowhere else."""
    return "/" not in text and "\0" not in text and not text.startswith(".") and text != ""


def _write(file: Path, value: dict[str, Any]) -> None:
    """
    Raises:
        ResourceError: the disk refuses; what was there before stays.
    """
    with disk_reported(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        write_synced(part, json.dumps(value).encode())
        part.replace(file)


def bytes_below(folder: Path) -> int:
    """Returns the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
