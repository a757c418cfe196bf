"""A folder of files that becomes a checkpoint whole or not at all, and is checked byte for byte before anyone loads it.

Layout under the store's root (one writing run per root, one save at a time):

    step_00000012/            a committed checkpoint: its files and manifest.json
    .tmp_step_00000012/       being written, or left by a writer that died; never read
    .replaced_step_00000012/  the earlier save of a step while the new one takes its place; read if the step is gone
    latest                    the name of the folder that was committed last

Every rank seals the files that it writes (`seal_file`) before `commit` lists them in manifest.json.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from slimefsdp.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    damaged,
    io_reported,
    read_manifest,
    write_manifest,
    write_synced,
)
from slimefsdp.errors import CheckpointError

LATEST = "latest"
_TMP, _REPLACED = ".tmp_", ".replaced_"
_STEP_NAME = re.compile(r"step_(\d{8,})")


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
            write_manifest(temporary, step, info)
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
        manifest = read_manifest(step_folder)
        named = _STEP_NAME.search(step_folder.name)
        if named and int(named[1]) != manifest.step:
            raise damaged(step_folder / MANIFEST, f"is of step {manifest.step}")
        with io_reported(step_folder, "load"):
            check_files(step_folder, manifest)
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
            return None, [damaged(pointer, f"cannot be read ({error.strerror})")]
        match = _STEP_NAME.fullmatch(content)
        if not match or int(match[1]) not in folders:
            return None, [damaged(pointer, f"names {content!r}, which is no checkpoint here")]
        latest = int(match[1])
        later = [
            damaged(folders[step], f"is later than latest ({content})") for step in sorted(folders) if step > latest
        ]
        return latest, later


def _step_name(step: int) -> str:
    assert step >= 0
    return f"step_{step:08d}"


def _by_preference(folders: dict[int, Path], latest: int | None) -> list[int]:
    return sorted(folders, key=lambda step: (latest is not None and step > latest, -step))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
