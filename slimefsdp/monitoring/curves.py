"""Draws a picture of a run's metrics, with a panel for each topic.

`RunCurves` draws the picture from the run's metrics.jsonl, during the run and at its end.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from slimefsdp.monitoring.metrics_log import METRICS_FILE, read_metrics
from slimefsdp.monitoring.panels import DIFFERENCE, Panel, Row, all_series_of, panels_of

_COLUMNS = 3
_BYTES = EngFormatter("B", places=1)
_DRAWING_SHARE = 0.01  # largest share of a run's time for drawing
CURVES = "curves.png"


def draw_curves(rows: Sequence[Row], path: Path, *, title: str, heldout_sets: Sequence[str] = ()) -> None:
    """Writes the run's curves as a PNG; the file at `path` is replaced atomically.

    Args:
        rows: rows as returned by `read_metrics`; None, NaN and infinities are not drawn.
        path: the PNG to write; its folder is created if it is missing.
        title: one line above the panels.
        heldout_sets: names of held-out sets. The metrics eval/NAME/.. of each get their own panels; all other metrics
            eval/.. belong to the set without a name.
    """
    panels = list(panels_of(all_series_of(rows), heldout_sets))
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


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Returns for each point the mean over all points that are at most `window // 2` positions away; [points]."""
    reach = window // 2
    inside = slice(reach, reach + len(values))
    # with cumulative sums, a single huge value would erase the digits of all later means
    sums = np.convolve(values, np.ones(2 * reach + 1))[inside]
    return sums / np.convolve(np.ones_like(values), np.ones(2 * reach + 1))[inside]


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
    if panel.unit == DIFFERENCE:
        axes.set_yscale("symlog", linthresh=1e-8)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
