"""Stores checkpoints: a folder becomes a checkpoint as a whole or not at all, and every byte is checked before a load.

Layout under the store's root (one writing run per root, one save at a time):

    step_00000012/            a committed checkpoint: its files, its parts and manifest.json
    step_00000012/critic/     a part, written by another group of ranks: its files and a manifest.json of its own
    named/NAME/               a store with the single checkpoint that the user saved as NAME
    .part_critic_step_00000012/  a part until the save of its step moves it into the checkpoint; never read
    .tmp_step_00000012/       a checkpoint that is being written, or was left by a writer that died; never read
    .replaced_step_00000012/  the replaced save of a step; read only if there is no folder of the step
    latest                    the name of the folder that was committed last
    .lock                     locked by the run that writes here

`commit` lists all files with their checksums in manifest.json. The manifest of a checkpoint also lists the manifests of
its parts: a checkpoint is whole if and only if this one manifest holds.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from slimefsdp.checkpoint.manifest import MANIFEST, Manifest, check_files, read_manifest, write_manifest
from slimefsdp.errors import CheckpointError, short_repr
from slimefsdp.io.files import FileRecord, FolderLock, damaged, io_reported, remove, sync, write_synced

LATEST = "latest"
_TMP, _REPLACED, _PART = ".tmp_", ".replaced_", ".part_"
_STEP_NAME = re.compile(r"step_(\d{8,})")
NAMED, _ADAPTERS = "named", "adapters"
PARTS = {"critic": "critic", "ref": "reference"}
"""Role -> the folder of its part in the checkpoint of a job."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Choice(NamedTuple):
    """Holds a chosen checkpoint, and the reasons for skipping preferred ones; users must be warned of these."""

    manifest: Manifest
    folder: Path
    skipped: list[CheckpointError]


class CheckpointStore:
    """Reads and writes the checkpoints of a run. Only rank 0 may call `begin`, `commit` and `prune`."""

    part: str | None = None  # the part to read and write; None means everything except the parts
    before: CheckpointStore | None = None  # see PartStore

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of_run(cls, run_dir: Path, role: str = "actor", adapter: str | None = None) -> Self:
        """Returns the store of a role in a run's folder, or of an adapter in a service with several adapters."""
        if adapter is not None:
            return cls(run_dir / _ADAPTERS / adapter / "checkpoints")
        return cls((run_dir / "critic" if role == "critic" else run_dir) / "checkpoints")

    @staticmethod
    def of_job(run_dir: Path, role: str, name: str | None = None) -> CheckpointStore:
        """Returns the store in which a role reads and writes its part of a job's checkpoints.

        The actor's store has the whole checkpoints. The store of another role has the role's parts of them.

        Args:
            name: the name of a checkpoint that a user saved by name; None means the numbered checkpoints.
        """
        stores = [CheckpointStore.of_run(run_dir, which) for which in ("actor", "critic")]
        whole, critic = stores if name is None else [store.named(name) for store in stores]
        if role == "actor":
            return whole
        return PartStore(whole.root, PARTS[role], before=critic if role == "critic" else None)

    def named(self, name: str) -> Self:
        """Returns a store whose folder has only the checkpoint that a user saved under this name.

        Raises:
            CheckpointError: the name is invalid.
        """
        require_name(name)
        return type(self)(self.root / NAMED / name)

    def require_empty(self, name: str, save_id: str | None = None) -> None:
        """Raises a CheckpointError if this store, named `name`, has a checkpoint of another save than `save_id`."""
        steps = self.steps()
        written_by = [manifest.info.get("save_id") for manifest in self.manifests()]
        if steps and (save_id is None or written_by != [save_id] * len(steps)):
            raise CheckpointError(
                f"there is a checkpoint of the name {name!r} in {self.root}",
                field="name",
                hint="choose another name, remove that folder, or save with overwrite=True",
                call="save",
            )

    def begin(self, step: int, parts: Sequence[str] = ()) -> Path:
        """Removes files that dead writers left, and makes the folder into which every rank writes step `step`.

        Args:
            parts: names of the parts of this step that other groups have written; they are moved into the folder.
        """
        temporary = self.temporary_path(step)
        self.lock()
        with io_reported(temporary, "save"):
            # the parents may also be new: run.dir, and the folders of a name or an adapter
            below = 2 * (self.root.parent.name == NAMED) + 2 * (_ADAPTERS in self.root.parts[-5:])
            for parent in self.root.parents[: 2 + below]:
                sync(parent)
            if (self.root / LATEST).is_dir():
                raise damaged(self.root / LATEST, "is a folder")
            for torn in self.root.glob(f"{_TMP}step_*"):
                remove(torn)
            for replaced in self.root.glob(f"{_REPLACED}step_*"):
                final = self.root / replaced.name.removeprefix(_REPLACED)
                if final.exists():
                    remove(replaced)
                else:  # the writer died after it moved the old save aside, before it moved the new save in
                    replaced.rename(final)
            temporary.mkdir()
            try:
                for part in parts:
                    PartStore(self.root, part).temporary_path(step).rename(temporary / part)
            except OSError:
                self.abandon(step)
                raise
            for stale in self.root.glob(f"{_PART}*"):
                remove(stale)
        return temporary

    def lock(self) -> None:
        """Locks the store until this process ends; raises a CheckpointError if another process has the lock."""
        FolderLock(self.root).acquire()

    def abandon(self, step: int) -> None:
        """Removes the files written since `begin(step)`; no rank may still be writing."""
        shutil.rmtree(self.temporary_path(step), ignore_errors=True)

    def temporary_path(self, step: int) -> Path:
        """Returns the folder that `begin` makes on rank 0, so that other ranks can write into it."""
        return self.root / f"{_TMP}{_step_name(step)}"

    def final_path(self, step: int) -> Path:
        """Returns the folder that `commit` makes."""
        return self.root / _step_name(step)

    def commit(self, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> Path:
        """Makes the files of `begin(step)` the newest checkpoint.

        Must be called after every rank has written its files. An earlier save of the same step stays loadable until the
        new one is in place.

        Raises:
            CheckpointError: the folder does not hold these files, `info` is not plain JSON, or the disk fails.
        """
        temporary, final = self.temporary_path(step), self.final_path(step)
        replaced = self.root / f"{_REPLACED}{final.name}"
        with io_reported(temporary, "save"):
            write_manifest(temporary, step, info, files)
            sync(temporary)
            if final.exists():
                final.rename(replaced)
            temporary.rename(final)
            sync(self.root)
            pointer = self.root / f".{LATEST}.tmp"
            write_synced(pointer, f"{final.name}\n".encode())
            pointer.replace(self.root / LATEST)
            sync(self.root)
            if replaced.exists():
                remove(replaced)
        return final

    def steps(self) -> list[int]:
        """Returns the steps of committed checkpoints in ascending order, without verifying any."""
        return sorted(self._folders())

    def path_of(self, step: int) -> Path:
        """Returns the folder of a committed step; raises a CheckpointError if there is none."""
        folders = self._folders()
        if step not in folders:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.root}", field="step", hint=f"choose one of {sorted(folders)}"
            )
        return folders[step]

    def verify(self, step_folder: Path) -> Manifest:
        """Rereads every byte and compares it with the manifest.

        Raises:
            CheckpointError: see `check_files` and `manifest_of`.
        """
        manifest = self.manifest_of(step_folder)
        with io_reported(step_folder, "load"):
            check_files(step_folder, manifest)
        return manifest

    def manifest_of(self, step_folder: Path) -> Manifest:
        """Reads and checks a manifest, but not the files in it.

        Raises:
            CheckpointError: see `read_manifest`; or the manifest belongs to another step.
        """
        manifest = read_manifest(step_folder)
        named = _STEP_NAME.search(step_folder.name)
        if named and int(named[1]) != manifest.step:
            raise damaged(step_folder / MANIFEST, f"is of step {manifest.step}")
        return manifest

    @classmethod
    def find(cls, source: Path) -> Choice:
        """Returns the newest whole checkpoint of a run's folder or its `checkpoints`, or verifies the folder of a step.

        Raises:
            CheckpointError: there is no whole checkpoint, or the folder of the step is incomplete or altered.
        """
        if (source / MANIFEST).exists():
            return Choice(cls(source.parent).verify(source), source, [])
        inside = source / "checkpoints"
        store = cls(inside if inside.is_dir() else source)
        if not store.steps():
            raise CheckpointError(
                f"{source} has no checkpoint",
                field="SRC",
                hint="name the run.dir of a run with checkpoint.interval_steps, or the folder of a step; the model in "
                "run.export_dir is a Hugging Face folder already",
            )
        return store.newest_verified()

    def newest_verified(self) -> Choice:
        """Returns the newest whole checkpoint; reads every byte of it.

        The order of preference is: the step in `latest`, earlier steps, then later steps. A later step exists if the
        writer died before it changed `latest`, or if the run was resumed from an earlier step. Without a usable
        `latest` the highest step comes first.

        Raises:
            CheckpointError: no checkpoint is whole.
        """
        return first_verified(self.root, *self.candidates(), self.verify)

    def candidates(self, step: int | Literal["latest"] = "latest") -> tuple[list[Path], list[CheckpointError]]:
        """Returns the folders that `newest_verified` would try, in order, or the folder of one step; verifies nothing.

        Returns:
            (the folders, errors about an unusable `latest`).

        Raises:
            CheckpointError: there is no checkpoint of that step.
        """
        if step != "latest":
            if type(step) is not int:
                raise CheckpointError(f"step={step!r} is not a step", field="step", hint='give a number, or "latest"')
            return [self.path_of(step)], []
        folders = self._folders()
        latest, skipped = self._latest(folders)
        return [folders[step] for step in _by_preference(folders, latest)], skipped

    def manifests(self) -> Iterator[Manifest]:
        """Yields the readable manifests of `candidates`, without checking the files in them."""
        for folder in self.candidates()[0]:
            try:
                manifest = self.manifest_of(folder)
            except CheckpointError:
                continue  # loading skips this checkpoint, too
            yield manifest

    def prune(self, keep_last: int) -> list[int]:
        """Keeps the `keep_last` checkpoints that `newest_verified` would try first.

        Removes all others; returns their steps.
        """
        assert keep_last >= 1
        folders = self._folders()
        removed = _by_preference(folders, self._latest(folders)[0])[keep_last:]
        for step in removed:
            doomed = self.temporary_path(step)  # if this process is killed here, the next `begin` removes the rest
            with io_reported(doomed, "prune"):
                if doomed.exists():
                    remove(doomed)
                folders[step].rename(doomed)
                remove(doomed)
        return sorted(removed)

    def _folders(self) -> dict[int, Path]:
        with io_reported(self.root, "load"):
            names = {path.name for path in self.root.iterdir() if path.is_dir()} if self.root.exists() else set()
        found: dict[int, Path] = {}
        for prefix in (_REPLACED, ""):  # a replaced save counts only if there is no new save of its step
            for name in names:
                match = _STEP_NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match and match[0] == _step_name(int(match[1])):
                    found[int(match[1])] = self.root / name
        return found

    def _latest(self, folders: dict[int, Path]) -> tuple[int | None, list[CheckpointError]]:
        """Returns (the step in `latest`, or None if it is not in `folders`; errors about an unusable `latest`)."""
        if not folders:
            return None, []
        pointer = self.root / LATEST
        try:
            if not stat.S_ISREG(pointer.lstat().st_mode):  # reading a pipe would block
                return None, [damaged(pointer, "is no plain file")]
            with pointer.open("rb") as file:
                content = file.read(100).decode(errors="replace").strip()
        except OSError as error:
            return None, [damaged(pointer, f"cannot be read ({error.strerror})")]
        match = _STEP_NAME.fullmatch(content)
        if not match or int(match[1]) not in folders:
            return None, [damaged(pointer, f"names {content!r}, which is no checkpoint here")]
        latest = int(match[1])
        later = [
            damaged(folders[step], f"is later than latest ({content})") for step in sorted(folders) if step > latest
        ]
        return latest, later


class PartStore(CheckpointStore):
    """Reads and writes a part of each checkpoint: the state that a critic or reference group of other ranks writes.

    The part is written before the checkpoint of its step. `begin` of that checkpoint moves the part in.

    Args:
        before: the separate store in which older versions kept checkpoints of these ranks; None means there is none.
    """

    def __init__(self, root: Path, part: str, before: CheckpointStore | None = None) -> None:
        super().__init__(root)
        self.part, self.before = part, before

    def temporary_path(self, step: int) -> Path:
        """Returns the folder of the part until it is moved into the checkpoint."""
        return self.root / f"{_PART}{self.part}_{_step_name(step)}"

    final_path = temporary_path

    def manifests(self) -> Iterator[Manifest]:
        """Yields the part's manifest of each checkpoint; for checkpoints without the part, the manifest in `before`."""
        for whole in super().manifests():
            with suppress(CheckpointError):
                if self.part in whole.parts:
                    yield self.manifest_of(self.path_of(whole.step) / str(self.part))
                elif self.before is not None:
                    yield self.before.manifest_of(self.before.path_of(whole.step))

    def lock(self) -> None:
        """Does nothing, since the writer of the whole checkpoint has the lock."""

    def begin(self, step: int, parts: Sequence[str] = ()) -> Path:
        """Makes the empty folder into which every rank writes the part."""
        folder = self.temporary_path(step)
        with io_reported(folder, "save"):
            self.root.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(folder):
                remove(folder)
            folder.mkdir()
        return folder

    def commit(self, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> Path:
        """Completes the part; must be called after every rank has written its files."""
        folder = self.temporary_path(step)
        with io_reported(folder, "save"):
            write_manifest(folder, step, info, files)
            sync(folder)
        return folder

    def prune(self, keep_last: int) -> list[int]:
        """Does nothing, since a part is removed with its checkpoint."""
        return []


def first_verified(
    root: Path, folders: Sequence[Path], skipped: Sequence[CheckpointError], verify: Callable[[Path], Manifest]
) -> Choice:
    """Returns the first of `folders` that `verify` accepts.

    Raises a CheckpointError with all reasons if there is none.
    """
    reasons = list(skipped)
    for folder in folders:
        try:
            return Choice(verify(folder), folder, reasons)
        except CheckpointError as error:
            reasons.append(error)
    listed = "; ".join(error.message for error in reasons)
    raise CheckpointError(
        f"no whole checkpoint in {root}" + (f" ({listed})" if listed else ""),
        field="run.dir",
        hint="point it at the folder of an earlier run, or start a new run in an empty folder",
        call="load",
    )


def require_name(name: object) -> None:
    """Raises a CheckpointError if this is not a valid name of a checkpoint."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"name={short_repr(name)} cannot be the name of a checkpoint",
            field="name",
            hint="use at most 128 letters, digits, and `.`, `_` or `-` after the first one",
        )


def _step_name(step: int) -> str:
    assert step >= 0
    return f"step_{step:08d}"


def _by_preference(folders: dict[int, Path], latest: int | None) -> list[int]:
    return sorted(folders, key=lambda step: (latest is not None and step > latest, -step))
