"""Prints a run's progress, one line for each step."""

from __future__ import annotations

import math
import statistics
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Column:
    """Describes a value in the line of a step: its title, metric and number format."""

    title: str
    metric: str
    spec: str = ".3f"
    instead: str | None = None  # the metric to show in steps that lack `metric`

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """Returns the title and the value as text, or None if the step has no such metric."""
        metric = self.instead if self.metric not in metrics and self.instead is not None else self.metric
        if (value := metrics.get(metric)) is None:
            return None
        text = format(value, self.spec)
        rounds_to_zero = value != 0 and math.isfinite(value) and not any(digit in text for digit in "123456789")
        return f"{self.title} {format(value, '.1e') if rounds_to_zero else text}"


GRPO_COLUMNS = (
    Column("reward", "rollout/reward"),
    Column("exact", "rollout/exact"),
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


def reason_without_update(metrics: Mapping[str, float]) -> str | None:
    """Returns why a step made no update of the policy; None if it made one, or if the metrics do not show why."""
    if metrics.get("updates") != 0:
        return None
    if "critic/updates" in metrics:
        return "the critic trains alone"
    if "rollout/reward_failures" in metrics and "rollout/reward" not in metrics:
        return "every group had a failed reward"
    for metric, reason in (
        ("rollout/groups_dropped", "rollout.filter dropped all groups"),
        ("zero_variance_groups", "the rewards of each group are equal"),
        ("skipped_update", "the gradients were not finite"),
        ("rollout/truncated", "all responses were truncated"),
    ):
        if metrics.get(metric) == 1:
            return reason
    return "loss.max_kl ended the step" if metrics.get("early_stopped_updates") else None


def with_held_out(columns: Sequence[Column], held_out: Sequence[Column]) -> tuple[Column, ...]:
    """Returns the columns, with the single column for held-out records replaced by `held_out`."""
    position = next(index for index, column in enumerate(columns) if column.metric.startswith("eval/"))
    return (*columns[:position], *held_out, *columns[position + 1 :])


class Progress:
    """Prints a line for each step: its number, the values of the columns, and the remaining time.

    Args:
        columns: the metrics to show, such as `GRPO_COLUMNS`; a step's line leaves out metrics that the step lacks.
        total_steps: the step after which the run ends.
        stream: where to print; None means sys.stdout when this object is created.
    """

    def __init__(self, columns: Sequence[Column], *, total_steps: int, stream: TextIO | None = None) -> None:
        self._columns = tuple(columns)
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._recent_seconds: deque[float] = deque(maxlen=20)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the line of a finished step; 0 <= step <= total_steps.

        The remaining time is the number of remaining steps times the median of the last 20 values of `seconds/step`
        (without a rollout `train_seconds`). It is the median because the first step and steps with an evaluation take
        longer.
        """
        seconds = metrics.get("seconds/step", metrics.get("train_seconds", math.nan))
        if math.isfinite(seconds):
            self._recent_seconds.append(seconds)
        cells = [f"step {step:{len(str(self._total_steps))}}/{self._total_steps}"]
        cells += [text for column in self._columns if (text := column.text(metrics)) is not None]
        if (reason := reason_without_update(metrics)) is not None:
            cells.append(f"no update: {reason}")
        if self._recent_seconds:
            remaining_s = statistics.median(self._recent_seconds) * (self._total_steps - step)
            cells.append(f"ETA {timedelta(seconds=round(remaining_s))}")
        # flushed, so that a log file shows each step as soon as it ends
        print("  ".join(cells), file=self._stream, flush=True)
