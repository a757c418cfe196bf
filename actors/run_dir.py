"""Reads and writes what a run keeps in `run.dir` besides metrics and checkpoints.

    .lock          held by the process that runs `train`, until it ends
    settings.yaml  every setting of the newest start, with defaults as comments and commits of hub models and data;
                   settings.1.yaml, .. of earlier starts
    skipped_prompts.jsonl  records that data.overlong_prompts=skip left out at the newest start
    batches/       what each step since the oldest checkpoint trained on
    samples/       texts of a few groups of each step, to be read by people
    evaluations/   responses of each evaluation, one per line (.jsonl), and the first ones as text (.txt); several
                   held-out sets have a folder each

A recorded batch is written atomically like a checkpoint, with the sha256 of its bytes.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.config.earlier import STORED
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError
from slimefsdp.io.files import FolderLock, io_reported, record_of, remove, write_synced
from slimefsdp.io.hub import id_of_snapshot

SETTINGS = "settings.yaml"
SKIPPED = "skipped_prompts.jsonl"
EVALUATIONS = "evaluations"
SAMPLES = "samples"
_BATCH = "batch.safetensors"


class RunFolder:
    """The folder `run.dir`, locked for one process at a time; use it as a context.

    Raises:
        CheckpointError: (on entering) another process uses it; the error names its pid and host.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = RecordedBatches(path / "batches")

    def __enter__(self) -> Self:
        FolderLock(self.path).acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        FolderLock(self.batches.root).release()  # taken when batches were written
        FolderLock(self.path).release()

    @property
    def checkpoint_steps(self) -> list[int]:
        """Returns the steps of the existing checkpoints, ascending, without verifying them."""
        return CheckpointStore.of_run(self.path).steps()

    @property
    def newest_loop_state(self) -> dict[str, Any]:
        """Returns the loop state of the newest checkpoint, without verifying it; empty if there is none."""
        newest = next(CheckpointStore.of_run(self.path).manifests(), None)
        state = None if newest is None else newest.info.get("loop_state")
        return state if isinstance(state, dict) else {}

    def write_settings(self, config: RunConfig) -> None:
        """Writes all settings as a file that `slimefsdp train` accepts; renames a different existing one.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        text, file = settings_text(config), self.path / SETTINGS
        with io_reported(file, "train"):
            if file.is_file() and file.read_bytes() != text.encode():
                numbered = (self.path / f"settings.{number}.yaml" for number in itertools.count(1))
                file.rename(next(path for path in numbered if not path.exists()))
            temporary = self.path / f".{SETTINGS}.tmp"
            write_synced(temporary, text.encode())
            temporary.replace(file)

    def write_skipped(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes a line for each record that was left out of this start; replaces those of the previous start.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        file = self.path / SKIPPED
        with io_reported(file, "train"):
            file.unlink(missing_ok=True)
            if records:
                write_synced(file, "".join(json.dumps(record) + "\n" for record in records).encode())

    def forget_old_batches(self) -> None:
        """Removes the batches of steps before the oldest checkpoint, to which no run can go back any more."""
        if steps := self.checkpoint_steps:
            self.batches.remove_before(steps[0])


class RecordedBatches:
    """The recorded batch of each step with its metrics, written before the step trains on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = CheckpointStore(root)

    def write(self, step: int, batch: RolloutBatch, notes: dict[str, Any]) -> None:
        """Records the batch of a step atomically; replaces an existing one.

        Args:
            step: counted from 0.
            notes: plain JSON.

        Raises:
            CheckpointError: the disk is full or fails.
        """
        file = self._store.begin(step) / _BATCH
        with io_reported(file, "train"):
            try:
                batch.save(file)
            except BatchError as error:
                raise error.__cause__ or error from None  # the error names run.dir, not the path argument of `save`
            self._store.commit(step, notes, [record_of(file)])

    def read(self, step: int) -> tuple[RolloutBatch, dict[str, Any]] | None:
        """Returns the batch of a step and its notes; None if there is none, or, with a warning, if it is damaged."""
        if step not in self._store.steps():
            return None
        folder = self._store.path_of(step)
        try:
            notes = self._store.verify(folder).info
            return RolloutBatch.load(folder / _BATCH), notes
        except (BatchError, CheckpointError) as error:
            warnings.warn(f"recorded batch passed over, it is sampled anew: {error.message}", stacklevel=2)
            return None

    def remove_before(self, step: int) -> None:
        """Removes the batches of earlier steps.

        Raises:
            CheckpointError: the disk fails.
        """
        for old in self._store.steps():
            if old < step:
                folder = self._store.path_of(old)
                with io_reported(folder, "train"):
                    remove(folder)


def settings_text(config: RunConfig) -> str:
    """Returns all settings as YAML which `load_config` reads back equal; those that were not given are comments."""
    lines = [f"{STORED} Those behind a # were not given and had this value."]
    for name, value in with_model_ids(config).model_dump(mode="json").items():
        if not isinstance(value, dict):
            lines.append(_line(name, value, is_given=name in config.model_fields_set))
            continue
        names_given = getattr(config, name).model_fields_set
        lines.append(f"{'' if names_given else '# '}{name}:")
        lines += [_line(f"  {key}", item, is_given=key in names_given) for key, item in value.items()]
    return "\n".join(lines) + "\n"


def with_model_ids(config: RunConfig) -> RunConfig:
    """Replaces folders in this machine's hub cache by id and commit."""
    ids = {field: hub_id for field, path in config.model_paths.items() if (hub_id := id_of_snapshot(path))}
    return config.with_model_paths({field: Path(str(hub_id)) for field, hub_id in ids.items()})


def _line(name: str, value: Any, *, is_given: bool) -> str:
    # JSON is YAML
    return f"{'' if is_given else '# '}{name}: {json.dumps(value, ensure_ascii=False)}"
