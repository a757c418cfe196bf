"""Prints a run's progress as plain lines: a header, then one aligned row per step."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

ROWS_PER_HEADER = 20
_MIN_WIDTH = 7  # fits every number, since the longest `.0e` form is `-1e-300`
_GAP = "  "
_STEPS_OF_ETA = 20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its heading, the name of its metric, and the preferred number format."""

    title: str
    metric: str
    spec: str = ".3f"
    instead: str | None = None  # the metric to show in rows without the main one
    is_optional: bool = False  # whether to leave it out of the first header, since many runs never have the metric

    @property
    def width(self) -> int:
        return max(_MIN_WIDTH, len(self.title))

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """Returns the column's value in a row, or None."""
        if self.metric in metrics or self.instead is None:
            return metrics.get(self.metric)
        return metrics.get(self.instead)


GRPO_COLUMNS = (
    Column("reward", "rollout/reward"),
    Column("exact", "rollout/exact", is_optional=True),
    Column("held-out", "eval/exact", instead="eval/reward"),
    Column("loss", "loss", ".4f"),
    Column("entropy", "entropy"),
    Column("grad norm", "grad_norm"),
    Column("mismatch", "rollout_mismatch_max", ".1e"),
    Column("s/step", "seconds/step", ".1f"),
)
SFT_COLUMNS = (
    Column("loss", "loss", ".4f"),
    Column("grad norm", "grad_norm"),
    Column("lr", "lr", ".1e"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
)
DPO_COLUMNS = (
    Column("loss", "loss", ".4f"),
    Column("accuracy", "rewards/accuracies"),
    Column("margin", "rewards/margins"),
    Column("held-out", "eval/rewards/accuracies"),
    Column("grad norm", "grad_norm"),
    Column("lr", "lr", ".1e"),
    Column("tokens/s", "tokens_per_second", ",.0f"),
)


def with_held_out(columns: Sequence[Column], held_out: Sequence[Column]) -> tuple[Column, ...]:
    """Returns the columns with `held_out` in place of the single column for held-out records."""
    position = next(index for index, column in enumerate(columns) if column.metric.startswith("eval/"))
    return (*columns[:position], *held_out, *columns[position + 1 :])


class ProgressTable:
    """Prints one line per step; all lines of a table have the same width.

    The step comes first and the remaining time last. The header is repeated every 20 rows. After the first step, only
    columns that have had a value are shown, under a new header.

    Args:
        columns: the metrics to show, such as `GRPO_COLUMNS`; a missing value is printed as `-`.
        total_steps: the step after which the run ends.
        stream: where to print; None: the standard output at this moment.
    """

    def __init__(self, columns: Sequence[Column], *, total_steps: int, stream: TextIO | None = None) -> None:
        self._columns = tuple(columns)
        self._shown = self._columns
        self._known: set[Column] = set()  # columns that have had a value
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._step_width = max(len("step"), 2 * len(str(total_steps)) + 1)
        self._rows = 0
        self._recent_seconds: deque[float] = deque(maxlen=_STEPS_OF_ETA)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the row of a finished step, 0 <= step <= total_steps.

        The remaining time is the median of the last 20 values of `seconds/step` (`train_seconds` without a rollout)
        times the remaining steps; the median, because the first step and those with an evaluation take longer.
        """
        assert 0 <= step <= self._total_steps
        seconds = metrics.get("seconds/step", metrics.get("train_seconds", math.nan))
        if math.isfinite(seconds):
            self._recent_seconds.append(seconds)
        before, self._shown = self._shown, self._columns_with(metrics)
        self._rows = 0 if self._shown != before else self._rows
        if self._rows % ROWS_PER_HEADER == 0:
            self._print_header()
        self._rows += 1
        pace = statistics.median(self._recent_seconds) if self._recent_seconds else math.nan
        cells = [f"{step}/{self._total_steps}".rjust(self._step_width)]
        for column in self._shown:
            value = column.value(metrics)
            text = "-" if value is None else number_text(value, column.spec, column.width)
            cells.append(text.rjust(column.width))
        cells.append(duration_text(pace * (self._total_steps - step)).rjust(_MIN_WIDTH))
        self._print(cells)

    def _columns_with(self, metrics: Mapping[str, float]) -> tuple[Column, ...]:
        """Returns the columns to show from this row on."""
        self._known |= {column for column in self._columns if column.value(metrics) is not None}
        if not self._recent_seconds or not self._known:
            # an evaluation before the first step says nothing about the columns of steps
            return tuple(column for column in self._columns if column in self._known or not column.is_optional)
        return tuple(column for column in self._columns if column in self._known)

    def _print_header(self) -> None:
        titles = ["step".rjust(self._step_width)]
        titles += [column.title.rjust(column.width) for column in self._shown]
        titles.append("ETA".rjust(_MIN_WIDTH))
        self._print(titles)
        self._print(["-" * len(title) for title in titles])

    def _print(self, cells: list[str]) -> None:
        # flushed, so that someone who follows a log file sees each step when it ends
        print(_GAP.join(cells), file=self._stream, flush=True)


def number_text(value: float, spec: str, width: int) -> str:
    """Returns `value` in `width` >= 7 characters or fewer: as `spec`, or shorter if that is too long or rounds to 0."""
    if value == 0 and spec.endswith("e"):
        return "0"  # instead of 0.0e+00, for engines that agree to the last bit
    text = format(value, spec)
    rounds_to_zero = value != 0 and not any(digit in text for digit in "123456789") and math.isfinite(value)
    if rounds_to_zero or len(text) > width:
        text = format(value, ".1e")
    return text if len(text) <= width else format(value, ".0e")


def duration_text(seconds: float) -> str:
    """Returns seconds >= 0 as text in at most 7 characters, in its two largest units; `-` if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days > 999:
        return ">999d"
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
