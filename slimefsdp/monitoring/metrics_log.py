"""Writes the metrics of a run to metrics.jsonl, to TensorBoard and optionally to wandb.

Only metrics.jsonl is read again; TensorBoard and wandb show the same numbers. A line is {"step": .., "time": seconds
since the epoch, ..}; a step may have several lines.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from slimefsdp.checkpoint.store import write_synced
from slimefsdp.errors import CheckpointError, ConfigError, ResourceError
from slimefsdp.io.files import disk_reported
from slimefsdp.io.user_files import open_plain, read_plain, refuse_unless_plain

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
_MOST_STEPS = 2**53  # a limit on integers in rows, since floats are exact only below
WANDB_ID = "wandb_id"  # name of the file with the run's id at Weights & Biases


class MetricsLog:
    """Appends metrics to the files of a run. Only one process may write to a run folder.

    The constructor removes an incomplete last line, which an earlier process left when it died.

    Args:
        run_dir: the run folder; created if it is missing.
        wandb: arguments of `wandb.init`; None means no logging to Weights & Biases. The id of the wandb run is stored
            in the run folder.
        resumes: whether to continue the wandb run with the stored id; otherwise a new wandb run is started.

    Raises:
        ConfigError: wandb is not installed, or does not start.
        ResourceError: the folder cannot be written.
        CheckpointError: a line of metrics.jsonl before the last is damaged.
    """

    def __init__(self, run_dir: Path, *, wandb: Mapping[str, Any] | None = None, resumes: bool = False) -> None:
        self._run_dir = run_dir
        self._path = run_dir / METRICS_FILE
        with disk_reported(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_unless_plain(self._path)
            if self._path.exists():
                self._keep_lines(math.inf)
            self._lines: TextIO = self._path.open("a", encoding="utf-8")
        self._wandb_run: Any = None if wandb is None else _begin_wandb_run(wandb, run_dir, resumes=resumes)
        self._open_scalars(purge_step=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            with ExitStack() as stack:
                if self._wandb_run is not None:
                    stack.callback(self._wandb_run.finish, exit_code=int(error is not None))
                stack.enter_context(disk_reported(self._run_dir))
                stack.callback(self._scalars.close)
                stack.callback(self._lines.close)
        except ResourceError:
            if error is None:  # the error that ended the run must not be hidden by this one
                raise

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends a line for `step` and flushes it; a step may have several lines.

        NaN and infinities become null in metrics.jsonl, since strict JSON readers would refuse them. TensorBoard and
        wandb get them unchanged.

        Raises:
            ResourceError: the disk is full or fails; later calls still write whole lines.
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
        """Removes all steps after `step`; a resumed run calls this first.

        metrics.jsonl is replaced atomically, and TensorBoard is told to ignore the later points. wandb cannot remove
        steps, so it keeps the later steps, and receives them again from the resumed run.
        """
        self._lines.close()
        self._keep_lines(step)
        self._lines = self._path.open("a", encoding="utf-8")
        with disk_reported(self._run_dir):
            self._scalars.close()
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
        # imported here, since the import takes a second and readers of metrics do not need it
        from torch.utils.tensorboard import SummaryWriter

        self._scalars: Any = SummaryWriter(str(self._run_dir / TENSORBOARD_FOLDER), purge_step=purge_step)


def read_metrics(run_dir: Path) -> list[dict[str, float | None]]:
    """Returns the rows of a run's metrics.jsonl in their order; NaN and infinities are None.

    An incomplete last line, whose writer was killed or is still writing, is left out.

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
    """Returns (line without line end, row) for each complete line; leaves out an incomplete last line."""
    with open_plain(path) as file:
        lines = file.read().removesuffix(b"\n").split(b"\n")
    rows = [_row(line) for line in lines]
    if rows[-1] is None:  # part of a row has no closing brace, so it cannot be parsed as a row
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
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < _MOST_STEPS:
        return None
    return row if all(map(_is_number_or_none, row.values())) else None


def _is_number_or_none(value: Any) -> bool:
    return value is None or type(value) is float or (type(value) is int and abs(value) < _MOST_STEPS)


def _begin_wandb_run(arguments: Mapping[str, Any], run_dir: Path, *, resumes: bool) -> Any:
    """Starts or continues the wandb run of this folder, whose curves have the metric `step` as their x axis."""
    file = run_dir / WANDB_ID
    with disk_reported(run_dir):
        known = read_plain(file, 1000).decode(errors="replace").strip() if resumes and file.exists() else ""
        run_id = known if re.fullmatch(r"[\w-]{1,64}", known, re.ASCII) else secrets.token_hex(8)
        file.write_text(run_id + "\n")
    try:
        import wandb

        # "allow": the server does not know a run that was logged offline and not sent yet
        run = wandb.init(**arguments, id=run_id, resume="allow", dir=str(run_dir))
    except Exception as error:  # wandb raises many types: not installed, no key, no such project, no network
        raise ConfigError(
            f"wandb did not start: {error}",
            field="run.wandb_project",
            hint="install the `wandb` extra, `wandb login`, set WANDB_MODE=offline, or leave the setting out",
        ) from error
    # wandb's own step count would refuse steps that a resumed run repeats
    run.define_metric("*", step_metric="step")
    return run
