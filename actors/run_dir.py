"""Reads and writes what a run keeps in `run.dir` besides metrics and checkpoints.

    .lock          locked by the process that runs `train`, until that process ends
    settings.yaml  every setting of the newest start, with defaults as comments and commits of hub models and data;
                   settings.1.yaml, .. of earlier starts
    starts.jsonl   a line for each start: its time, the step from which it went on, versions, the machine
    recoveries.jsonl  a line for each time that ranks were replaced
    skipped_prompts.jsonl  records that data.overlong_prompts=skip left out at the newest start
    batches/       the batch of each step since the oldest checkpoint
    samples/       texts of a few groups of each step, to be read by people
    evaluations/   responses of each evaluation, one per line (.jsonl), and the first responses as text (.txt); if there
                   are several held-out sets, each has its own folder

A recorded batch is written atomically like a checkpoint, with the sha256 of its bytes.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import RunConfig
from slimefsdp.config.earlier import STORED
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, CheckpointError, ConfigError
from slimefsdp.io.files import FolderLock, io_reported, record_of, remove, write_synced
from slimefsdp.io.hub import id_of_snapshot
from slimefsdp.io.user_files import can_keep_files, refuse_unless_plain
from slimefsdp.rpc import ROLES

SETTINGS = "settings.yaml"
STARTS = "starts.jsonl"
SKIPPED = "skipped_prompts.jsonl"
EVALUATIONS = "evaluations"
SAMPLES = "samples"
RECOVERIES = "recoveries.jsonl"
_BATCH = "batch.safetensors"
_METRICS = "metrics.jsonl"
# folders of the machine itself, in which a run's files do not belong
_SYSTEM_FOLDERS = frozenset(
    Path("/", name).resolve()  # /bin may be a link to /usr/bin
    for name in (
        *("", "bin", "boot", "dev", "dev/shm", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc", "root"),
        *("run", "sbin", "srv", "sys", "tmp", "usr", "usr/bin", "usr/lib", "usr/local", "usr/sbin", "usr/share"),
        *("var", "var/lib", "var/log", "var/tmp"),
    )
)


class RunFolder:
    """The folder `run.dir`, which this process locks in a `with` block.

    Raises:
        CheckpointError: (on entering) another process uses the folder; the error names that process's pid and host.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = RecordedBatches(path / "batches")

    def __enter__(self) -> Self:
        FolderLock(self.path).acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        FolderLock(self.batches.root).release()  # writing a batch acquires this lock
        FolderLock(self.path).release()

    @property
    def checkpoint_steps(self) -> list[int]:
        """Returns the steps of the existing checkpoints, ascending, without verifying them."""
        return CheckpointStore.of_run(self.path).steps()

    @property
    def newest_step(self) -> int | None:
        """Returns the step of the newest checkpoint, without verifying its files; None if there is none."""
        newest = next(CheckpointStore.of_run(self.path).manifests(), None)
        return None if newest is None else newest.step

    @property
    def newest_loop_state(self) -> dict[str, Any]:
        """Returns the loop state of the newest checkpoint, without verifying it; empty if there is none."""
        newest = next(CheckpointStore.of_run(self.path).manifests(), None)
        state = None if newest is None else newest.info.get("loop_state")
        return state if isinstance(state, dict) else {}

    def write_settings(self, config: RunConfig) -> None:
        """Writes all settings as a file that `slimefsdp train` accepts; renames an existing file with other settings.

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

    def write_start(self, step: int) -> None:
        """Appends a line about this start to starts.jsonl.

        Args:
            step: number of steps that were done before.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        packages = ("slimefsdp", "torch", "transformers", "ray", "numpy")
        versions = {name: importlib.metadata.version(name) for name in packages} | {"python": platform.python_version()}
        machine = f"{platform.platform()}, {os.cpu_count()} CPUs"
        line = {"time": time.time(), "step": step, "versions": versions, "machine": machine}
        with io_reported(self.path / STARTS, "train"):
            refuse_unless_plain(self.path / STARTS)
            with (self.path / STARTS).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")

    def write_skipped(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Writes a line for each record that was left out at this start; replaces the lines of the previous start.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        file = self.path / SKIPPED
        with io_reported(file, "train"):
            file.unlink(missing_ok=True)
            if records:
                write_synced(file, "".join(json.dumps(record) + "\n" for record in records).encode())

    def forget_old_batches(self) -> None:
        """Removes the batches of steps before the oldest checkpoint, which no resumed run can repeat."""
        if steps := self.checkpoint_steps:
            self.batches.remove_before(steps[0])


class RecordedBatches:
    """Writes the batch of each step, with notes, before the step trains on the batch, and reads it again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._store = CheckpointStore(root)

    def write(self, step: int, batch: RolloutBatch, notes: dict[str, Any]) -> None:
        """Records the batch of a step atomically; replaces an existing one.

        Args:
            step: counted from 0.
            notes: JSON values to store with the batch.

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
        """Returns the batch of a step and its notes; None if the batch is missing or, with a warning, damaged."""
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
        """Removes the batches of all steps before `step`.

        Raises:
            CheckpointError: the disk fails.
        """
        for old in self._store.steps():
            if old < step:
                folder = self._store.path_of(old)
                with io_reported(folder, "train"):
                    remove(folder)


def settings_text(config: RunConfig) -> str:
    """Returns all settings as YAML; loading the text gives equal settings. Settings with defaults are comments."""
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
    """Replaces each model folder in this machine's hub cache by the model's hub id with the commit."""
    ids = {field: hub_id for field, path in config.model_paths.items() if (hub_id := id_of_snapshot(path))}
    return config.with_model_paths({field: Path(str(hub_id)) for field, hub_id in ids.items()})


def _line(name: str, value: Any, *, is_given: bool) -> str:
    # JSON is YAML
    return f"{'' if is_given else '# '}{name}: {json.dumps(value, ensure_ascii=False)}"


def check_folders(config: RunConfig) -> None:
    """Refuses a run.dir or run.export_dir that cannot take a run's files, and a run.dir that another process uses.

    Raises:
        ConfigError: a folder cannot be used. CheckpointError: another process uses run.dir.
    """
    run_dir, export_dir, steps = config.run.dir, config.run.export_dir, config.run.steps
    assert run_dir is not None
    with _folder_errors():
        _check_can_be_made(run_dir, "run.dir")
        folder, home = run_dir.resolve(), Path.home().resolve()
        problem, hint = "", "name a folder of the run's own, such as runs/first"
        if folder in _SYSTEM_FOLDERS or folder == home or folder in home.parents:
            problem = "is not a folder for the files of a run"
        elif (folder / ".git").exists():
            problem = "is the root of a checkout"
        elif folder in [config.folder_of(role)[0].resolve() for role in ROLES]:
            problem = "is the folder of a model"
        elif config.checkpoint.resume and not RunFolder(run_dir).checkpoint_steps:
            problem = "holds no checkpoint to resume from"
            hint = "name the folder of a run that wrote one, or set checkpoint.resume=false"
        if problem:
            raise ConfigError(f"run.dir={run_dir} {problem}", field="run.dir", hint=hint)
        if config.checkpoint.resume and steps is not None:
            newest = RunFolder(run_dir).newest_step
            if newest is not None and newest > steps:
                problem = f"run.steps={steps} is below step {newest}, of the newest checkpoint in run.dir={run_dir}"
                raise ConfigError(problem, field="run.steps", hint="raise run.steps, or begin another run")
        FolderLock(run_dir).require_free()
        refuse_unless_plain(run_dir / _METRICS)
        if export_dir is not None:
            _check_can_be_made(export_dir, "run.export_dir")
            if export_dir.resolve() in (folder, *folder.parents):
                raise ConfigError(
                    f"run.export_dir={export_dir} would hold run.dir={run_dir}",
                    field="run.export_dir",
                    hint="use auto, which is the folder model/ in run.dir, or another folder of its own",
                )


def _check_can_be_made(folder: Path, field: str) -> None:
    """Refuses a folder that cannot be made or cannot be written to."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if can_keep_files(folder) and existing.is_dir() and os.access(existing, os.W_OK):
            return
        problem = f"cannot be made in {existing}"
    except (OSError, RuntimeError) as error:  # a name that is too long, or symbolic links in a circle
        problem = f"cannot be made: {getattr(error, 'strerror', None) or error}"
    raise ConfigError(f"{field}={folder} {problem}", field=field, hint="choose another folder")


def check_leftovers(config: RunConfig) -> None:
    """Raises a ConfigError if an earlier run has left files where this run would write; the error names all folders."""
    run_dir, export_dir, resumes = config.run.dir, config.run.export_dir, config.checkpoint.resume
    assert run_dir is not None
    left: dict[str, tuple[str, str]] = {}  # setting -> (problem, hint)
    with _folder_errors():
        metrics = run_dir / _METRICS
        # without a row of metrics nothing was trained, so a run that failed during its start may start again
        if not resumes and metrics.exists() and metrics.stat().st_size:
            hint = "choose another run.dir, remove it, or set checkpoint.resume=true if it has checkpoints"
            left["run.dir"] = (f"run.dir={run_dir} holds an earlier run", hint)
        if export_dir is not None and export_dir.exists() and any(export_dir.iterdir()):
            hint = "choose another run.export_dir, or run.export_dir=null for a run that leaves no model"
            hint += ", and raise run.steps if the run has ended already" if resumes else ""
            left["run.export_dir"] = (f"run.export_dir={export_dir} is not empty", hint)
    if left:
        problems, hints = zip(*left.values(), strict=True)
        raise ConfigError(", and ".join(problems), field=next(iter(left)), hint="; ".join(hints))


@contextmanager
def _folder_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"cannot use {error.filename}: {error.strerror}"
        raise ConfigError(problem, field="run.dir", hint="name folders that you may write to") from None
