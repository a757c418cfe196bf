"""Sorts a run's metrics into panels, one for each topic, which curves.png and the report show.

A panel has a heading, a unit and the lines of some metrics.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Row = Mapping[str, float | None]

_NO_SHARES = re.compile(r"(^|/)(loss|chosen|rejected|margins)$")  # no shares, even if all values are in [0, 1]
_BAND = re.compile(r"(.*pass@\d+)_(low|high)")
DIFFERENCE = "largest |log-prob difference|, nats"  # has a symmetric log scale, since values may be 0 or tiny

# heading, unit, and the name of each metric's line; a unit that begins with "share" is shown in percent
_STEP_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Training reward", "mean reward per response", {"rollout/reward": ""}),
    (
        "Implicit rewards",
        "mean over pairs",
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"},
    ),
    ("Pairs ranked rightly", "share of pairs", {"rewards/accuracies": ""}),
    ("Loss", "mean over the step's updates", {"loss": ""}),
    ("Entropy of the policy", "nats per token", {"entropy": ""}),
    ("KL to the reference model", "nats per token", {"kl_ref": ""}),
    ("KL to the policy before the step", "nats per token", {"kl_old": ""}),
    ("Clipped tokens", "share of tokens", {"clip_fraction_low": "low", "clip_fraction_high": "high"}),
    ("Response length", "mean tokens", {"rollout/response_length": ""}),
    ("Truncated responses", "share of responses", {"rollout/truncated": ""}),
    ("Gradient norm", "L2 norm before clipping", {"grad_norm": ""}),
    ("Training speed", "tokens per second, all ranks", {"tokens_per_second": ""}),
    ("Memory of the rank with most", "bytes", {"memory/peak_bytes": "peak", "memory/allocated_bytes": "now"}),
    ("Mismatch of rollout and trainer", DIFFERENCE, {"rollout_mismatch_max": ""}),
)


@dataclass(frozen=True, slots=True)
class Series:
    """Holds the finite values of one metric and their steps; both are [points]."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Panel:
    heading: str
    unit: str
    lines: Mapping[str, Series]  # by their names in the legend
    bands: Mapping[str, tuple[Series, Series]] = field(
        default_factory=dict
    )  # name of a line -> its lower and upper bounds
    is_evaluation: bool = False  # a panel of few points, which has markers and no running mean
    is_stacked: bool = False  # the lines are parts of a sum

    @property
    def is_share(self) -> bool:
        """Returns whether the values are in [0, 1], and thus shown in percent."""
        return self.unit.startswith("share")


def series_of(rows: Sequence[Row], name: str) -> Series:
    """Returns the finite values of a metric by step. If a step was written several times, its last value counts."""
    values = {row["step"]: value for row in rows if (value := row.get(name)) is not None and math.isfinite(value)}
    points = np.array(sorted(values.items()), dtype=np.float64).reshape(-1, 2)
    return Series(points[:, 0], points[:, 1])


def all_series_of(rows: Sequence[Row]) -> dict[str, Series]:
    """Returns the series of each metric that has a finite value."""
    series = {name: series_of(rows, name) for name in dict.fromkeys(name for row in rows for name in row)}
    return {name: line for name, line in series.items() if len(line.steps)}


def panels_of(series: Mapping[str, Series], heldout_sets: Sequence[str] = ()) -> Iterator[Panel]:
    """Yields the panels that have data: first results, then the health of training, then its cost."""
    held_out = {name.removeprefix("eval/"): line for name, line in series.items() if name.startswith("eval/")}
    for heldout_set in filter(None, heldout_sets):
        own = [name for name in held_out if name.startswith(f"{heldout_set}/")]
        lines = {name.removeprefix(f"{heldout_set}/"): held_out.pop(name) for name in own}
        yield from _held_out_panels(lines, f" {heldout_set}:")
    yield from _held_out_panels(held_out, "")
    for heading, unit, names in _STEP_PANELS:
        lines = {label: series[name] for name, label in names.items() if name in series}
        if any(line.values.any() for line in lines.values()):  # an all-zero line, such as of no clipping, shows nothing
            yield Panel(heading, unit, lines)
    if parts := _seconds_of_parts(series):
        yield Panel("Where the time goes", "seconds per step", parts, is_stacked=True)


def _held_out_panels(held_out: dict[str, Series], of: str) -> Iterator[Panel]:
    """Yields the panels of one held-out set: one for all shares (metrics from 0 to 1), one for each other metric."""
    bounds = {name: held_out.pop(name) for name in list(held_out) if _BAND.fullmatch(name)}
    held_out = {name: line for name, line in held_out.items() if not name.startswith("ended_by_")}
    shares = {
        name: line
        for name, line in held_out.items()
        if line.values.min() >= 0 and line.values.max() <= 1 and not _NO_SHARES.search(name)
    }
    if shares:
        bands = {name: (bounds[f"{name}_low"], bounds[f"{name}_high"]) for name in shares if f"{name}_low" in bounds}
        yield Panel(f"Held-out{of} evaluation", "share of the held-out set", shares, bands, is_evaluation=True)
    for name, line in held_out.items():
        if name not in shares:
            yield Panel(f"Held-out{of} {name}", "mean over the held-out set", {"": line}, is_evaluation=True)


def _seconds_of_parts(series: Mapping[str, Series]) -> dict[str, Series]:
    """Returns the seconds of each part of a step; `other` is the rest of `seconds/step`."""
    names = [name for name in series if name.startswith("seconds/") and name != "seconds/step"]
    if not names:
        return {}
    steps = np.unique(np.concatenate([series[name].steps for name in names]))

    def at_steps(line: Series) -> np.ndarray:
        values = np.zeros(len(steps))
        _, to, of = np.intersect1d(steps, line.steps, return_indices=True)
        values[to] = line.values[of]
        return values

    parts = {name.removeprefix("seconds/"): at_steps(series[name]) for name in names}
    if "seconds/step" in series:
        parts["other"] = np.maximum(0, at_steps(series["seconds/step"]) - np.sum(list(parts.values()), axis=0))
    return {name: Series(steps, values) for name, values in parts.items()}
