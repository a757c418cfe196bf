"""Draws a picture of a run's metrics, with a panel for each topic.

`RunCurves` draws the picture from the run's metrics.jsonl, during the run and at its end.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from slimefsdp.monitoring.metrics_log import METRICS_FILE, read_metrics

Row = Mapping[str, float | None]

_COLUMNS = 3
_NO_SHARES = re.compile(r"(^|/)(loss|chosen|rejected|margins)$")  # no shares, even if all values are in [0, 1]
_DIFFERENCE = "largest |log-prob difference|, nats"  # has a symmetric log scale, since values may be 0 or tiny
_BYTES = EngFormatter("B", places=1)
_BAND = re.compile(r"(.*pass@\d+)_(low|high)")
_DRAWING_SHARE = 0.01  # largest share of a run's time for drawing
CURVES = "curves.png"

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
    ("Memory of the rank with most", "bytes", {"memory/peak_bytes": "peak", "memory/allocated_bytes": "now"}),
    ("Mismatch of rollout and trainer", _DIFFERENCE, {"rollout_mismatch_max": ""}),
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


def draw_curves(rows: Sequence[Row], path: Path, *, title: str, heldout_sets: Sequence[str] = ()) -> None:
    """Writes the run's curves as a PNG; the file at `path` is replaced atomically.

    Args:
        rows: rows as returned by `read_metrics`; None, NaN and infinities are not drawn.
        path: the PNG to write; its folder is created if it is missing.
        title: one line above the panels.
        heldout_sets: names of held-out sets. The metrics eval/NAME/.. of each get their own panels; all other metrics
            eval/.. belong to the set without a name.
    """
    series = {name: series_of(rows, name) for name in dict.fromkeys(name for row in rows for name in row)}
    series = {name: line for name, line in series.items() if len(line.steps)}
    panels = list(panels_of(series, heldout_sets))
    columns = min(_COLUMNS, max(1, len(panels)))
    height = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.5 * columns, 2.9 * height + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    # parse_math is off for texts with names that users chose, so that `$` is a dollar sign
    figure.suptitle(title, fontweight="bold", parse_math=False)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(height, columns, index + 1)
        _draw(axes, panel)
        axes.set_xlabel("training step")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    figure.supxlabel("thin: each step, bold: running mean, dots: evaluations", fontsize=9)
    if not panels:
        figure.text(0.5, 0.45, "no metrics yet", ha="center")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", dpi=140)
    temporary.replace(path)


class RunCurves:
    """Redraws `curves.png` of a run during the run and at its end.

    If drawing fails, this is reported on stderr once, and the run continues.

    Args:
        run_dir: the folder of metrics.jsonl and of the picture.
        algorithm: second part of the title; the first is the folder's name.
        heldout_sets: see `draw_curves`.
        clock: returns seconds that only increase.
    """

    def __init__(
        self, run_dir: Path, *, algorithm: str, heldout_sets: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run_dir = run_dir
        self._title, self._heldout_sets = f"{run_dir.name}: {algorithm}", tuple(heldout_sets)
        self._clock = clock
        self._next_s = -math.inf
        self._has_reported = False

    def draw_if_due(self) -> None:
        """Draws after the first step, and later at intervals such that drawing takes at most 1 % of the time."""
        if self._clock() < self._next_s:
            return
        began = self._clock()
        self.draw()
        now = self._clock()
        self._next_s = now + (now - began) / _DRAWING_SHARE

    def draw(self) -> None:
        """Draws all rows of metrics.jsonl; does nothing if it has none."""
        try:
            rows = read_metrics(self._run_dir) if (self._run_dir / METRICS_FILE).exists() else []
            if rows:
                draw_curves(rows, self._run_dir / CURVES, title=self._title, heldout_sets=self._heldout_sets)
        except Exception as error:  # a failing picture must not end the run
            if not self._has_reported:
                problem = f"{self._run_dir / CURVES} could not be drawn ({error}); the run goes on"
                print(problem, file=sys.stderr, flush=True)
            self._has_reported = True


def series_of(rows: Sequence[Row], name: str) -> Series:
    """Returns the finite values of a metric by step. If a step was written several times, its last value counts."""
    values = {row["step"]: value for row in rows if (value := row.get(name)) is not None and math.isfinite(value)}
    points = np.array(sorted(values.items()), dtype=np.float64).reshape(-1, 2)
    return Series(points[:, 0], points[:, 1])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns for each point the mean over all points that are at most `window // 2` positions away; [points]."""
    reach = window // 2
    inside = slice(reach, reach + len(values))
    # with cumulative sums, a single huge value would erase the digits of all later means
    sums = np.convolve(values, np.ones(2 * reach + 1))[inside]
    return sums / np.convolve(np.ones_like(values), np.ones(2 * reach + 1))[inside]


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


def _draw(axes: Axes, panel: Panel) -> None:
    """Draws the lines, and a legend with their last values, or for stacked lines their medians of nonzero values."""
    axes.set_title(panel.heading, loc="left", fontsize=10, parse_math=False)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)
    if panel.is_stacked:
        steps, stack = next(iter(panel.lines.values())).steps, [line.values for line in panel.lines.values()]
        labels = [
            f"{name} {np.median(values[values > 0]) if values.any() else 0:.2g} s"
            for name, values in zip(panel.lines, stack, strict=True)
        ]
        axes.stackplot(steps, *stack, labels=labels, step="mid")
        # without this limit the slow first step would flatten all other steps
        axes.set_ylim(0, 1.3 * float(np.quantile(np.sum(stack, axis=0), 0.95)) or 1)
    for label, line in ({} if panel.is_stacked else panel.lines).items():
        values = line.values
        if not panel.is_evaluation:
            values = running_mean(values, max(1, len(values) // 12))
        last = f"{values[-1]:.1%}" if panel.is_share else f"{values[-1]:.3g}"
        last = _BYTES(values[-1]) if panel.unit == "bytes" else last
        marker = "o" if len(values) == 1 or panel.is_evaluation else ""
        (bold,) = axes.plot(line.steps, values, label=f"{label} {last}".strip(), marker=marker)
        if not panel.is_evaluation:
            axes.plot(line.steps, line.values, color=bold.get_color(), alpha=0.3, linewidth=1)
        if label in panel.bands:
            low, high = panel.bands[label]
            axes.fill_between(low.steps, low.values, high.values, color=bold.get_color(), alpha=0.15)
    if panel.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    elif panel.unit == "bytes":
        axes.yaxis.set_major_formatter(_BYTES)
    if panel.unit == _DIFFERENCE:
        axes.set_yscale("symlog", linthresh=1e-8)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
