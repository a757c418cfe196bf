"""A folder of files that becomes a checkpoint whole or not at all, and is checked byte for byte before anyone loads it.

Layout under the store's root (one writing run per root, one save at a time):

    step_00000012/            a committed checkpoint: its files, its parts and manifest.json
    step_00000012/critic/     a part, written by another group of ranks: its files and a manifest.json of its own
    named/NAME/               a store of one checkpoint, which is kept under a name
    .part_critic_step_00000012/  a part that is being written, or waits for the save that takes it in; never read
    .tmp_step_00000012/       being written, or left by a writer that died; never read
    .replaced_step_00000012/  the earlier save of a step while the new one takes its place; read if the step is gone
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
    """A checkpoint that was chosen, and why each one before it was passed over, of which users must be warned."""

    manifest: Manifest
    folder: Path
    skipped: list[CheckpointError]


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 calls `begin`, `commit` and `prune`; any process may read."""

    part: str | None = None  # the part of each checkpoint that is read and written; None: all but its parts
    before: CheckpointStore | None = None  # see PartStore

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of_run(cls, run_dir: Path, role: str = "actor", adapter: str | None = None) -> Self:
        """Returns the store of a role in a run's folder, or of an adapter other than the run's own."""
        if adapter is not None:
            return cls(run_dir / _ADAPTERS / adapter / "checkpoints")
        return cls((run_dir / "critic" if role == "critic" else run_dir) / "checkpoints")

    @staticmethod
    def of_job(run_dir: Path, role: str, name: str | None = None) -> CheckpointStore:
        """Returns the store of a role in the checkpoints of a job, or in the one that is kept under a name.

        An actor's store has whole checkpoints; those of other roles have their parts.
        """
        stores = [CheckpointStore.of_run(run_dir, which) for which in ("actor", "critic")]
        whole, critic = stores if name is None else [store.named(name) for store in stores]
        if role == "actor":
            return whole
        return PartStore(whole.root, PARTS[role], before=critic if role == "critic" else None)

    def named(self, name: str) -> Self:
        """Returns the store of the one checkpoint that is kept under a name.

        Raises:
            CheckpointError: no folder can have this name.
        """
        require_name(name)
        return type(self)(self.root / NAMED / name)

    def require_empty(self, name: str, save_id: str | None = None) -> None:
        """Raises a CheckpointError if a save under this name would replace a checkpoint of another save."""
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
        """Clears what dead writers left, and makes the folder that every rank writes step `step` into.

        Args:
            parts: the parts of this step that other groups have written; the folder holds these and nothing else.
        """
        temporary = self.temporary_path(step)
        self.lock()
        with io_reported(temporary, "save"):
            # the parents may be new folders, too: run.dir, and those of a name or an adapter
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
                else:  # the writer died between moving it aside and moving the new one in
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
        """Locks the store for this process until it ends; CheckpointError if another process has the lock."""
        FolderLock(self.root).acquire()

    def abandon(self, step: int) -> None:
        """Removes the files written since `begin(step)`; no rank may be writing any more."""
        shutil.rmtree(self.temporary_path(step), ignore_errors=True)

    def temporary_path(self, step: int) -> Path:
        """Returns the folder that `begin` makes on rank 0, for the other ranks."""
        return self.root / f"{_TMP}{_step_name(step)}"

    def final_path(self, step: int) -> Path:
        """Returns the folder that `commit` makes."""
        return self.root / _step_name(step)

    def commit(self, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> Path:
        """Makes the files of `begin(step)` the newest checkpoint. Call after every rank has written its own.

        An earlier save of the same step stays loadable until the new one is in place.

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
        """Returns the steps with a committed folder, ascending; nothing is verified."""
        return sorted(self._folders())

    def path_of(self, step: int) -> Path:
        """Returns the folder of a committed step; CheckpointError if there is none."""
        folders = self._folders()
        if step not in folders:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.root}", field="step", hint=f"choose one of {sorted(folders)}"
            )
        return folders[step]

    def verify(self, step_folder: Path) -> Manifest:
        """Rereads every byte and compares it with the manifest.

        Raises:
            CheckpointError: names the first bad file: missing, surplus, not a plain file, wrong size or sha256, a
                manifest that cannot be parsed, was altered, is of another step or of a newer schema.
        """
        manifest = self.manifest_of(step_folder)
        with io_reported(step_folder, "load"):
            check_files(step_folder, manifest)
        return manifest

    def manifest_of(self, step_folder: Path) -> Manifest:
        """Reads and checks a manifest, but not the files that it lists. Raises CheckpointError."""
        manifest = read_manifest(step_folder)
        named = _STEP_NAME.search(step_folder.name)
        if named and int(named[1]) != manifest.step:
            raise damaged(step_folder / MANIFEST, f"is of step {manifest.step}")
        return manifest

    @classmethod
    def find(cls, source: Path) -> Choice:
        """Chooses from a run's folder, or from its `checkpoints`; or verifies the folder of one step.

        Raises:
            CheckpointError: there is no whole checkpoint, or the one asked for is torn or altered.
        """
        if (source / MANIFEST).exists():
            return Choice(cls(source.parent).verify(source), source, [])
        inside = source / "checkpoints"
        return cls(inside if inside.is_dir() else source).newest_verified()

    def newest_verified(self) -> Choice:
        """Chooses the newest whole checkpoint, every byte of which is read.

        Newest means committed last: the one `latest` names, then earlier steps. Later steps (a crash before `latest`
        moved, or the future of a run that was resumed from an earlier step) come after all of those. Without a usable
        `latest` the highest step comes first.

        Raises:
            CheckpointError: nothing is whole.
        """
        return first_verified(self.root, *self.candidates(), self.verify)

    def candidates(self, step: int | Literal["latest"] = "latest") -> tuple[list[Path], list[CheckpointError]]:
        """Lists the folders that `newest_verified` tries, in its order, or the one of a step; nothing is verified.

        Returns:
            The folders, and what is odd about `latest`.

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
        """Yields the readable manifests of `candidates`, without a look at the files that they list."""
        for folder in self.candidates()[0]:
            try:
                manifest = self.manifest_of(folder)
            except CheckpointError:
                continue  # loading passes over this checkpoint, too
            yield manifest

    def prune(self, keep_last: int) -> list[int]:
        """Removes all but the `keep_last` checkpoints that `newest_verified` would try first; returns those removed."""
        assert keep_last >= 1
        folders = self._folders()
        removed = _by_preference(folders, self._latest(folders)[0])[keep_last:]
        for step in removed:
            doomed = self.temporary_path(step)  # a kill halfway leaves what the next `begin` clears, not a torn step
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
        for prefix in (_REPLACED, ""):  # a step moved aside counts only while nothing has taken its place
            for name in names:
                match = _STEP_NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
                if match and match[0] == _step_name(int(match[1])):
                    found[int(match[1])] = self.root / name
        return found

    def _latest(self, folders: dict[int, Path]) -> tuple[int | None, list[CheckpointError]]:
        """Returns the step that `latest` names, None if it names none of `folders`, and what is odd about it."""
        if not folders:
            return None, []
        pointer = self.root / LATEST
        try:
            if not stat.S_ISREG(pointer.lstat().st_mode):  # a pipe would block
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
    """A part of each checkpoint of a store, which ranks of another group write.

    They write it before the checkpoint of its step: the save of that step takes it in, and it counts from then on.

    Args:
        before: has the checkpoints of these ranks that were written before checkpoints had parts; None: there are none.
    """

    def __init__(self, root: Path, part: str, before: CheckpointStore | None = None) -> None:
        super().__init__(root)
        self.part, self.before = part, before

    def temporary_path(self, step: int) -> Path:
        """Returns the folder that the part waits in."""
        return self.root / f"{_PART}{self.part}_{_step_name(step)}"

    final_path = temporary_path

    def manifests(self) -> Iterator[Manifest]:
        """Yields the manifests of the part in `candidates`."""
        for whole in super().manifests():
            with suppress(CheckpointError):
                if self.part in whole.parts:
                    yield self.manifest_of(self.path_of(whole.step) / str(self.part))
                elif self.before is not None:
                    yield self.before.manifest_of(self.before.path_of(whole.step))

    def lock(self) -> None:
        """Does nothing: the save that takes the part in has the lock."""

    def begin(self, step: int, parts: Sequence[str] = ()) -> Path:
        """Makes the empty folder that every rank writes the part into."""
        folder = self.temporary_path(step)
        with io_reported(folder, "save"):
            self.root.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(folder):
                remove(folder)
            folder.mkdir()
        return folder

    def commit(self, step: int, info: dict[str, Any], files: Sequence[FileRecord]) -> Path:
        """Completes the part. Call after every rank has written its own files."""
        folder = self.temporary_path(step)
        with io_reported(folder, "save"):
            write_manifest(folder, step, info, files)
            sync(folder)
        return folder

    def prune(self, keep_last: int) -> list[int]:
        """Does nothing: a part goes with its checkpoint."""
        return []


def first_verified(
    root: Path, folders: Sequence[Path], skipped: Sequence[CheckpointError], verify: Callable[[Path], Manifest]
) -> Choice:
    """Chooses the first of `folders` that `verify` accepts; CheckpointError with all reasons if there is none."""
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
    """Raises a CheckpointError if a folder for a checkpoint cannot have this name."""
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
