"""The folders that a run writes to: whether they can be used, and hold nothing of an earlier run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from actors.run_dir import RunFolder
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from slimefsdp.io.files import FolderLock
from slimefsdp.io.user_files import can_keep_files, refuse_unless_plain
from slimefsdp.rpc import ROLES

_METRICS = "metrics.jsonl"
# what belongs to the machine: files of a run do not
_SYSTEM_FOLDERS = frozenset(
    Path("/", name).resolve()  # /bin may be a link to /usr/bin
    for name in (
        *("", "bin", "boot", "dev", "dev/shm", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc", "root"),
        *("run", "sbin", "srv", "sys", "tmp", "usr", "usr/bin", "usr/lib", "usr/local", "usr/sbin", "usr/share"),
        *("var", "var/lib", "var/log", "var/tmp"),
    )
)


def check_folders(config: RunConfig) -> None:
    """Refuses folders that cannot take a run's files, or in which another process runs.

    Raises:
        ConfigError: naming the setting.
    """
    try:
        _check_folders_named(config)
    except OSError as error:
        raise _unusable(error) from None


def check_leftovers(config: RunConfig) -> None:
    """Refuses folders in which an earlier run has left something where this one would write.

    Raises:
        ConfigError: naming all of them.
    """
    run_dir, export_dir, resumes = config.run.dir, config.run.export_dir, config.checkpoint.resume
    assert run_dir is not None
    left: dict[str, tuple[str, str]] = {}  # by setting: what is there, and the way out
    try:
        metrics = run_dir / _METRICS
        # without a row nothing was trained: a run that ended while it started may start again
        if not resumes and metrics.exists() and metrics.stat().st_size:
            hint = "choose another run.dir, remove it, or set checkpoint.resume=true if it has checkpoints"
            left["run.dir"] = (f"run.dir={run_dir} holds an earlier run", hint)
        if export_dir is not None and export_dir.exists() and any(export_dir.iterdir()):
            hint = "choose another run.export_dir, or run.export_dir=null for a run that leaves no model"
            hint += ", and raise run.steps if the run has ended already" if resumes else ""
            left["run.export_dir"] = (f"run.export_dir={export_dir} is not empty", hint)
    except OSError as error:
        raise _unusable(error) from None
    if left:
        problems, hints = zip(*left.values(), strict=True)
        raise ConfigError(", and ".join(problems), field=next(iter(left)), hint="; ".join(hints))


def _check_folders_named(config: RunConfig) -> None:
    run_dir, export_dir = config.run.dir, config.run.export_dir
    assert run_dir is not None
    _check_can_be_made(run_dir, "run.dir")
    _check_run_dir(run_dir, [config.folder_of(role)[0] for role in ROLES])
    if export_dir is not None:
        _check_can_be_made(export_dir, "run.export_dir")
    steps = RunFolder(run_dir).checkpoint_steps
    if config.checkpoint.resume and not steps:
        raise ConfigError(
            f"run.dir={run_dir} holds no checkpoint to resume from",
            field="run.dir",
            hint="name the folder of a run that wrote one (checkpoint.interval_steps), or set checkpoint.resume=false",
        )
    if config.checkpoint.resume and config.run.steps is not None and steps[0] > config.run.steps:
        raise ConfigError(
            f"run.steps={config.run.steps} is below step {steps[0]}, of the oldest checkpoint in run.dir={run_dir}",
            field="run.steps",
            hint="raise run.steps, or begin another run",
        )
    FolderLock(run_dir).require_free()
    refuse_unless_plain(run_dir / _METRICS)
    if export_dir is not None and export_dir.resolve() in (run_dir.resolve(), *run_dir.resolve().parents):
        raise ConfigError(
            f"run.export_dir={export_dir} would hold run.dir={run_dir}",
            field="run.export_dir",
            hint="use a folder of its own, such as model/ inside run.dir",
        )


def _check_run_dir(run_dir: Path, models: Sequence[Path]) -> None:
    """Refuses folders whose other contents a run's files would be lost among, or be taken for a run's."""
    folder, home = run_dir.resolve(), Path.home().resolve()
    what = None
    if folder in _SYSTEM_FOLDERS or folder == home or folder in home.parents:
        what = "no folder for the files of a run"
    elif (folder / ".git").exists():
        what = "the root of a checkout"
    elif folder in [path.resolve() for path in models]:
        what = "the folder of a model"
    if what is not None:
        raise ConfigError(
            f"run.dir={run_dir} is {what}", field="run.dir", hint="name a folder of the run's own, such as runs/first"
        )


def _check_can_be_made(folder: Path, field: str) -> None:
    """Refuses a folder that is not there and cannot be made, or cannot be written to."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if can_keep_files(folder) and existing.is_dir() and os.access(existing, os.W_OK):
            return
        problem = f"cannot be made in {existing}"
    except (OSError, RuntimeError) as error:  # a name that is too long, links that lead round in a circle
        problem = f"cannot be made: {getattr(error, 'strerror', None) or error}"
    raise ConfigError(f"{field}={folder} {problem}", field=field, hint="choose another folder")


def _unusable(error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {error.filename}: {error.strerror}", field="run.dir", hint="name folders that you may write to"
    )
