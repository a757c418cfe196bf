"""The numbers a run leaves behind: lines of metrics.jsonl, the same as TensorBoard scalars, and wandb if asked.

metrics.jsonl is the record; the other two are views of it. A line is
{"step": .., "time": seconds since the epoch, ..}; a step may have several.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from slimefsdp.checkpoint.store import write_synced
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError
from slimefsdp.io.checksummed_files import disk_reported
from slimefsdp.io.user_files import open_plain, read_plain, refuse_unless_plain

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WANDB_ID = "wandb_id"  # a file with the id of the run at Weights & Biases


class MetricsLog:
    """Appends the metrics of a run to its files. One writing process per run folder.

    A line torn by an earlier process that died is removed on opening, so that the next one starts on a line of its own.

    Args:
        run_dir: made if it is missing.
        wandb: also log to Weights & Biases, with these arguments of `wandb.init`; None: do not. The id of the wandb run
            is kept in the run folder.
        resumes: go on with the wandb run whose id is there, instead of beginning another one.

    Raises:
        ConfigError: wandb is asked for and not installed, or does not start.
        ResourceError: the folder cannot be written.
        CheckpointError: metrics.jsonl has a damaged line before its last.
    """

    def __init__(self, run_dir: Path, *, wandb: Mapping[str, Any] | None = None, resumes: bool = False) -> None:
        self._run_dir = run_dir
        self._path = run_dir / METRICS_FILE
        module = None if wandb is None else _import_wandb()
        with disk_reported(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_unless_plain(self._path)
            if self._path.exists():
                self._keep_lines(math.inf)
            self._lines: TextIO = self._path.open("a", encoding="utf-8")
        self._wandb_run: Any = None if wandb is None else _begin_wandb_run(module, wandb, run_dir, resumes=resumes)
        self._open_scalars(purge_step=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            try:
                with disk_reported(self._run_dir):
                    self._lines.close()
            finally:
                try:
                    self._close_scalars()
                finally:
                    if self._wandb_run is not None:
                        self._wandb_run.finish(exit_code=int(error is not None))
        except ResourceError:
            if error is None:  # else it would hide what ended the run, which may be the same
                raise

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append one line for `step` and hand it to the operating system; a step may be written several times.

        NaN and infinities become null in metrics.jsonl, because JSON has no words for them and strict readers would
        refuse the line; TensorBoard and wandb get them as they are.

        Raises:
            ResourceError: the disk refuses; when it no longer does, the next line begins after a whole one.
        """
        assert not metrics.keys() & {"step", "time"}, "these two names belong to the log itself"
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with disk_reported(self._run_dir):
            self._lines.write(json.dumps({"step": step, "time": time.time(), **finite}, allow_nan=False) + "\n")
            self._lines.flush()
            for name, value in numbers.items():
                self._scalars.add_scalar(name, value, step)
            self._scalars.flush()
        if self._wandb_run is not None:
            self._wandb_run.log({**numbers, "step": step})

    def truncate_after(self, step: int) -> None:
        """Forget every later step, as if the run had ended after `step`; a resumed run calls this before it goes on.

        metrics.jsonl is replaced whole or not at all; TensorBoard is told to drop the points. wandb cannot forget: it
        keeps the later steps that it has, and gets them again from the run that goes on.
        """
        self._lines.close()
        self._keep_lines(step)
        self._lines = self._path.open("a", encoding="utf-8")
        self._close_scalars()
        self._open_scalars(purge_step=step + 1)

    def _keep_lines(self, last_step: float) -> None:
        lines = _whole_lines(self._path)
        kept = b"".join(line + b"\n" for line, row in lines if row["step"] <= last_step)
        if kept == self._path.read_bytes():
            return
        temporary = self._path.with_name(f".{METRICS_FILE}.tmp")
        write_synced(temporary, kept)
        temporary.replace(self._path)

    def _open_scalars(self, *, purge_step: int | None) -> None:
        # imported here: it takes a second, and readers of metrics do not need it
        from torch.utils.tensorboard import SummaryWriter

        self._hook_before = threading.excepthook
        threading.excepthook = self._hook = _without_writers(self._hook_before)
        self._scalars: Any = SummaryWriter(str(self._run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)

    def _close_scalars(self) -> None:
        try:
            with disk_reported(self._run_dir):
                self._scalars.close()
        finally:
            if threading.excepthook is self._hook:
                threading.excepthook = self._hook_before


def _without_writers(hook: Callable[[threading.ExceptHookArgs], Any]) -> Callable[[threading.ExceptHookArgs], Any]:
    """Prints no traceback of TensorBoard's thread, whose error the next call on its writer raises."""

    def report(failed: threading.ExceptHookArgs) -> None:
        if not type(failed.thread).__module__.startswith("tensorboard."):
            hook(failed)

    return report


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """The rows of a run's metrics.jsonl in the order they were written; None where the value was NaN or infinite.

    A last line that was cut short (the writer was killed, or is writing) is left out.

    Raises:
        ConfigError: the folder has no readable metrics.jsonl.
        CheckpointError: a line before the last is not a row.
    """
    path = run_dir / METRICS_FILE
    try:
        return [row for _, row in _whole_lines(path)]
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", field="run.dir", hint="give the folder of a run that was started"
        ) from None


def _whole_lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """Each line without its end, and its row; a torn last line is left out."""
    with open_plain(path) as file:
        lines = file.read().removesuffix(b"\n").split(b"\n")
    rows = [_row(line) for line in lines]
    if rows[-1] is None:  # a prefix of a row never closes its brace, so it cannot be taken for a row
        del lines[-1], rows[-1]
    whole = [(line, row) for line, row in zip(lines, rows, strict=True) if row is not None]
    if len(whole) < len(rows):
        raise CheckpointError(
            f"{path}, line {rows.index(None) + 1} is not a row of metrics",
            field=METRICS_FILE,
            hint="delete that line",
        )
    return whole


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _begin_wandb_run(module: Any, arguments: Mapping[str, Any], run_dir: Path, *, resumes: bool) -> Any:
    """The wandb run of this folder, begun or gone on with, whose curves are drawn over the metric `step`."""
    file = run_dir / WANDB_ID
    with disk_reported(run_dir):
        known = read_plain(file, 1000).decode(errors="replace").strip() if resumes and file.exists() else ""
        run_id = known if re.fullmatch(r"[\w-]{1,64}", known, re.ASCII) else secrets.token_hex(8)
        file.write_text(run_id + "\n")
    try:
        # allow: one that was begun offline, and not sent yet, is none that a server knows
        run = module.init(**arguments, id=run_id, resume="allow", dir=str(run_dir))
    except Exception as error:  # of several kinds: no key, no such project, no network
        raise ConfigError(
            f"wandb did not start: {error}",
            field="run.wandb_project",
            hint="log in with `wandb login`, set WANDB_MODE=offline, or leave the setting out",
        ) from error
    # not wandb's own count of steps: it refuses those that a resumed run takes again
    run.define_metric("*", step_metric="step")
    return run


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"wandb cannot be imported ({error})",
            field="run.wandb_project",
            hint="install it with `pip install slimefsdp[wandb]`, or leave the setting out",
        ) from None
    return wandb
