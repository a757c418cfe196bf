"""One picture of a run: a panel for each thing worth watching whose data is among the metrics.

`RunCurves` draws it from a run's metrics.jsonl while the run goes on and when it ends.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter

from slimefsdp.monitoring.metrics_log import METRICS_FILE, read_metrics

Row = Mapping[str, float | None]
Panel = Callable[[Axes], None]  # draws itself

_COLUMNS = 3
_BLUE = "#2a6fbb"
_LINE_COLOURS = (
    _BLUE, "#d1495b", "#2e8b6f", "#b7791f", "#7b5ea7", "#4a5568", "#d9679f", "#4fb3c4", "#8a9a1f", "#8b5a3c",
)  # fmt: skip
_LINE_STYLES = ("-", "--", ":")  # the next one where the colours begin again
_PART_COLOURS = {
    "generate": "#4c8fd6", "reward": "#f0b24a", "train": "#2e8b6f", "sync": "#a78bca", "evaluate": "#d1495b",
    "critic": "#8b5a3c", "turn": "#4fb3c4", "wait": "#d9679f", "other": "#a3abb7",
}  # fmt: skip
_GREY, _INK = "#5f6773", "#1f2733"
_LABEL_GAP = 0.085  # between labels at the right edge, as a share of the panel's height
_HIGHEST_LABEL = 0.95  # of its middle, as a share of the panel's height: above is the heading
_WIDEST_HEADING = 42  # characters in the usual size; a longer one is set smaller
_NO_SHARES = re.compile(r"(^|/)(loss|chosen|rejected|margins)$")  # though their values may lie between 0 and 1
_DRAWING_SHARE = 0.01  # of a run's time, at most
CURVES = "curves.png"


@dataclass(frozen=True, slots=True)
class _LinePanel:
    """Metrics that are drawn into one panel, each over the steps."""

    metrics: Mapping[str, str]  # -> what its line is called, where there are several
    heading: str
    unit: str
    is_share: bool = False  # between 0 and 1, said in percent
    divisor: float = 1.0
    is_left_out_at_zero: bool = False  # where every value is 0: steps of one update have nothing to clip


_LINE_PANELS = (
    _LinePanel({"rollout/reward": ""}, "Training reward", "mean reward per response"),
    _LinePanel(
        {"rewards/chosen": "chosen", "rewards/rejected": "rejected", "rewards/margins": "margin"},
        "Implicit rewards",
        "mean over pairs",
    ),
    _LinePanel({"rewards/accuracies": ""}, "Pairs ranked rightly", "share of pairs", is_share=True),
    _LinePanel({"loss": ""}, "Loss", "mean over the step's updates"),
    _LinePanel({"entropy": ""}, "Entropy of the policy", "nats per token"),
    _LinePanel({"kl_ref": ""}, "KL to the reference model", "nats per token"),
    _LinePanel({"kl_old": ""}, "KL to the policy before the step", "nats per token", is_left_out_at_zero=True),
    _LinePanel(
        {"clip_fraction_low": "low", "clip_fraction_high": "high"},
        "Clipped tokens",
        "share of tokens",
        is_share=True,
        is_left_out_at_zero=True,
    ),
    _LinePanel({"rollout/response_length": ""}, "Response length", "mean tokens"),
    _LinePanel({"rollout/truncated": ""}, "Truncated responses", "share of responses", is_share=True),
    _LinePanel({"grad_norm": ""}, "Gradient norm", "L2 norm before clipping"),
    _LinePanel(
        {"memory/peak_bytes": "peak", "memory/allocated_bytes": "now"},
        "Memory of the rank with most",
        "GB",
        divisor=1e9,
    ),
)
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#aab1bb",
    "axes.labelcolor": _GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e9ee",
    "grid.linewidth": 0.8,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the steps that have a finite value of it; both [points]."""

    steps: np.ndarray
    values: np.ndarray


def draw_curves(rows: Sequence[Row], path: Path, *, title: str, heldout_sets: Sequence[str] = ()) -> None:
    """Write the run's curves as a PNG; the file at `path` is replaced whole or not at all.

    Args:
        rows: as `read_metrics` returns them; None, NaN and infinities are left out of the lines.
        path: its folder is made if it is missing.
        title: one line over the picture.
        heldout_sets: names of held-out sets, whose metrics eval/NAME/.. have panels of their own; a set without a name
            has the metrics eval/.. that are left over.
    """
    series = {name: series_of(rows, name) for name in dict.fromkeys(name for row in rows for name in row)}
    series = {name: line for name, line in series.items() if len(line.steps)}
    panels = _panels(series, heldout_sets)
    with matplotlib.rc_context(_STYLE):
        figure = _figure(panels, title, last_step=max((int(row["step"] or 0) for row in rows), default=0))
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        figure.savefig(temporary, format="png", dpi=140)
    temporary.replace(path)


class RunCurves:
    """Keeps `curves.png` of a run up to date while the run goes on, and draws it when the run ends.

    A picture that cannot be drawn is reported on stderr once, and the run goes on.

    Args:
        run_dir: where metrics.jsonl is, and where the picture goes.
        algorithm: what it is headed with, beside the folder's name.
        heldout_sets: as of `draw_curves`.
        clock: seconds, never going back.
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
        """Draws after the first step, and then so rarely that drawing takes 1 % of the time at most."""
        if self._clock() < self._next_s:
            return
        began = self._clock()
        self.draw()
        now = self._clock()
        self._next_s = now + (now - began) / _DRAWING_SHARE

    def draw(self) -> None:
        """Draws all rows that are in metrics.jsonl now; does nothing where there are none."""
        try:
            rows = read_metrics(self._run_dir) if (self._run_dir / METRICS_FILE).exists() else []
            if rows:
                draw_curves(rows, self._run_dir / CURVES, title=self._title, heldout_sets=self._heldout_sets)
        except Exception as error:  # looking at a run must not end it
            if not self._has_reported:
                problem = f"{self._run_dir / CURVES} could not be drawn ({error}); the run goes on"
                print(problem, file=sys.stderr, flush=True)
            self._has_reported = True


def series_of(rows: Sequence[Row], name: str) -> Series:
    """The finite values of a metric by step; a step that was written twice keeps its last value."""
    found = {row["step"]: value for row in rows if (value := row.get(name)) is not None and math.isfinite(value)}
    points = np.array(sorted(found.items()), dtype=np.float64).reshape(-1, 2)
    return Series(points[:, 0], points[:, 1])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """The mean over the points within `window // 2` of each one, fewer at the ends; [points]."""
    reach = window // 2
    here = slice(reach, reach + len(values))
    # not by differences of a cumulative sum: one exploded gradient norm would cancel every later digit
    sums = np.convolve(values, np.ones(2 * reach + 1))[here]
    return sums / np.convolve(np.ones_like(values), np.ones(2 * reach + 1))[here]


def spread(positions: Sequence[float], gap: float, *, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """The positions moved apart, in their order and as little as possible, until neighbours are `gap` from each other.

    Positions that would touch form a group, laid out `gap` apart around the mean of the places they want.

    Args:
        low, high: between which all of them are to be, where there is room for them.
    """

    def start(group: list[int]) -> float:
        extent = gap * (len(group) - 1)
        wanted = sum(positions[index] for index in group) / len(group) - extent / 2
        return max(low, min(wanted, high - extent))

    groups: list[list[int]] = []
    for index in sorted(range(len(positions)), key=positions.__getitem__):
        groups.append([index])
        while len(groups) > 1 and start(groups[-2]) + gap * len(groups[-2]) > start(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = {index: start(group) + gap * place for group in groups for place, index in enumerate(group)}
    return [moved[index] for index in range(len(positions))]


def _panels(series: dict[str, Series], heldout_sets: Sequence[str]) -> list[Panel]:
    """The panels that have data, in reading order: results first, then the training's health, then cost."""
    held_out = {name.removeprefix("eval/"): line for name, line in series.items() if name.startswith("eval/")}
    panels: list[Panel] = []
    for heldout_set in filter(None, heldout_sets):
        own = [name for name in held_out if name.startswith(f"{heldout_set}/")]
        lines = {name.removeprefix(f"{heldout_set}/"): held_out.pop(name) for name in own}
        panels += _held_out_panels(lines, f" {heldout_set}:")
    panels += _held_out_panels(held_out, "")
    for panel in _LINE_PANELS:
        lines = {label: series[name] for name, label in panel.metrics.items() if name in series}
        if lines and not (panel.is_left_out_at_zero and not any(line.values.any() for line in lines.values())):
            panels.append(partial(_draw_lines, lines=lines, panel=panel))
    mismatch = _positive(series.get("rollout_mismatch_max"))
    if mismatch is not None:
        unit = "largest |log-prob difference|, nats"
        panel = _LinePanel({}, "Mismatch of rollout and trainer", unit)
        panels.append(partial(_draw_lines, lines={"": mismatch}, panel=panel, is_log=True))
    parts = _seconds_of_parts(series)
    if parts:
        panels.append(partial(_draw_parts, parts=parts))
    return panels


def _held_out_panels(held_out: dict[str, Series], of: str) -> list[Panel]:
    """Those of one set of prompts, and others of its greedy responses; `of` says which in their headings."""
    held_out = {
        name: line for name, line in held_out.items() if not name.removeprefix("greedy_").startswith("ended_by_")
    }
    greedy = {name: held_out.pop(name) for name in list(held_out) if name.startswith("greedy_")}
    bands = {name: held_out.pop(name) for name in list(held_out) if re.fullmatch(r".*pass@\d+_(low|high)", name)}
    shares = {
        name: line
        for name, line in held_out.items()
        if line.values.min() >= 0 and line.values.max() <= 1 and not _NO_SHARES.search(name)
    }
    what = "accuracy" if set(shares) == {"exact"} else "evaluation"
    own_axis = {name: line for name, line in held_out.items() if name not in shares}  # a reward of another scale
    shares = _without_repetitions(shares, bands)
    panels: list[Panel] = (
        [partial(_draw_held_out, shares=shares, bands=bands, heading=f"Held-out{of} {what}")] if shares else []
    )
    panels += [
        partial(
            _draw_lines, lines={"": line}, panel=_LinePanel({}, f"Held-out{of} {name}", "mean over the held-out set")
        )
        for name, line in own_axis.items()
    ]
    if greedy:
        panels += _held_out_panels(
            {name.removeprefix("greedy_"): line for name, line in greedy.items()}, f"{of} greedy"
        )
    return panels


def _without_repetitions(shares: dict[str, Series], bands: Mapping[str, Series]) -> dict[str, Series]:
    """The scores without those that equal another at every step, such as `solved_of_finished` where all finished.

    One with a band stays rather than one without. `truncated` always stays: it measures something else.
    """
    kept: dict[str, Series] = {}
    for name in sorted(shares, key=lambda name: f"{name}_low" not in bands):
        line = shares[name]
        repeats = any(
            np.array_equal(line.steps, other.steps) and np.allclose(line.values, other.values, rtol=0, atol=1e-9)
            for other in kept.values()
        )
        if not repeats or name == "truncated":
            kept[name] = line
    return {name: line for name, line in shares.items() if name in kept}


def _positive(line: Series | None) -> Series | None:
    """What a logarithmic axis can show; engines that agree to the last bit leave nothing."""
    if line is None or not (line.values > 0).any():
        return None
    return Series(line.steps[line.values > 0], line.values[line.values > 0])


def _figure(panels: list[Panel], title: str, *, last_step: int) -> Figure:
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)  # inches
    figure = Figure(figsize=(4.5 * columns, 2.9 * rows + 0.7), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    # parse_math off wherever a name that users chose is drawn: a `$` in it is a dollar sign
    figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold", color=_INK, parse_math=False)
    if not panels:
        figure.text(0.5, 0.45, "no metrics yet", ha="center", color=_GREY)
        return figure
    note = "thin: each step    bold: running mean, its last value in numbers beside it    dots: evaluations"
    figure.supxlabel(
        note if columns > 1 else note.replace("    dots", "\ndots"), x=0.99, ha="right", fontsize=9, color=_GREY
    )
    grid = figure.add_gridspec(rows, columns)
    spare = rows * columns - len(panels)  # the first panel takes what the last row would leave empty
    for index, draw in enumerate(panels):
        cell = index + spare if index else 0
        row, column = divmod(cell, columns)
        axes = figure.add_subplot(grid[row, column : column + 1 + (spare if index == 0 else 0)])
        draw(axes)
        axes.set_xlim(0, last_step + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
        if cell + columns >= rows * columns:
            axes.set_xlabel("training step")
    return figure


def _name_panel(axes: Axes, heading: str, unit: str) -> None:
    size = 10.5 * min(1.0, _WIDEST_HEADING / len(heading))
    axes.set_title(heading, loc="left", fontsize=size, fontweight="bold", color=_INK, parse_math=False)
    axes.set_ylabel(unit)


def _draw_lines(axes: Axes, lines: Mapping[str, Series], panel: _LinePanel, *, is_log: bool = False) -> None:
    """Of each line every step thin and light, the running mean over it; on a log axis the mean is geometric."""
    ends = []
    for (label, line), colour in zip(lines.items(), _LINE_COLOURS, strict=False):
        values = line.values / panel.divisor
        window = max(1, len(values) // 12)
        marker = "o" if len(line.steps) == 1 else ""
        axes.plot(line.steps, values, color=colour, alpha=0.28, linewidth=1, marker=marker)
        mean = np.exp(running_mean(np.log(values), window)) if is_log else running_mean(values, window)
        axes.plot(line.steps, mean, color=colour, linewidth=2)
        end = f"{mean[-1]:.1%}" if panel.is_share else f"{mean[-1]:.3g}"
        ends.append((f"{label} {end}".strip(), mean[-1], colour))
    if is_log:
        axes.set_yscale("log")
    if panel.is_share:
        top = max(float(line.values.max()) for line in lines.values())
        axes.set_ylim(0, min(1.02, 1.1 * top) if top else 0.01)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
    _name_panel(axes, panel.heading, panel.unit)
    _label_ends(axes, ends)


def _draw_held_out(axes: Axes, shares: dict[str, Series], bands: dict[str, Series], heading: str) -> None:
    ends = []
    looks = [(colour, style) for style in _LINE_STYLES for colour in _LINE_COLOURS]
    for (name, line), (colour, style) in zip(shares.items(), looks * len(shares), strict=False):
        look: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 2}
        axes.plot(line.steps, line.values, **look, marker="o", markersize=4, clip_on=False)
        if f"{name}_low" in bands and f"{name}_high" in bands:
            low, high = bands[f"{name}_low"], bands[f"{name}_high"]
            axes.fill_between(low.steps, low.values, high.values, color=colour, alpha=0.15, linewidth=0)
        ends.append((f"{name} {line.values[-1]:.1%}", line.values[-1], colour))
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    _name_panel(axes, heading, "mean over the held-out set")
    _label_ends(axes, ends)


def _seconds_of_parts(series: dict[str, Series]) -> dict[str, Series]:
    """Seconds per part at the steps that `seconds/step` has; what no part accounts for is `other`."""
    names = [name for name in series if name.startswith("seconds/") and name != "seconds/step"]
    if not names:
        return {}
    steps = np.unique(np.concatenate([series[name].steps for name in names]))
    seconds = {}
    for name in names:
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, series[name].steps)] = series[name].values
        seconds[name.removeprefix("seconds/")] = values
    if "seconds/step" in series:
        whole = series["seconds/step"]
        _, at, of = np.intersect1d(steps, whole.steps, return_indices=True)
        other = np.zeros(len(steps))
        other[at] = np.maximum(0, whole.values[of] - np.sum(list(seconds.values()), axis=0)[at])
        seconds["other"] = other
    return {name: Series(steps, values) for name, values in seconds.items()}


def _draw_parts(axes: Axes, parts: dict[str, Series]) -> None:
    steps = next(iter(parts.values())).steps
    stack = np.stack([line.values for line in parts.values()])  # [parts, points]
    colours = [_PART_COLOURS.get(name, colour) for name, colour in zip(parts, _LINE_COLOURS * len(parts), strict=False)]
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    below = np.zeros(len(steps))
    for values, colour in zip(stack, colours, strict=True):
        axes.stairs(below + values, edges, baseline=below, fill=True, color=colour, linewidth=0)
        below = below + values
    # a slow first step would flatten all others; it is cut off and said in words
    top = 1.3 * float(np.quantile(below, 0.95))
    axes.set_ylim(0, min(top, 1.05 * below.max()) or 1)
    if below.max() > top:
        note = f"longest: {below.max():.3g} s at step {steps[below.argmax()]:.0f}"
        ground = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        where: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "bbox": ground}
        axes.text(0.98, 0.97, note, fontsize=8.5, color=_GREY, **where)
    _name_panel(axes, "Where the time goes (medians)", "seconds per step")
    typical = np.median(stack, axis=1)
    ends = []
    for name, values, place, colour in zip(parts, stack, np.cumsum(typical) - typical / 2, colours, strict=True):
        own = values[values > 1e-6 * below.mean()]  # of the steps that have it: few have an evaluation
        if len(own):
            rare = f" ({len(own)} steps)" if 2 * len(own) < len(values) else ""
            ends.append((f"{name} {np.median(own):.2g} s{rare}", place, colour))
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: list[tuple[str, float, str]]) -> None:
    """Names at the right edge, each in its line's colour and as near to `value` as the others allow.

    They stay beside the panel, where no heading is: many labels stand closer, in a smaller type.
    """
    low, high = axes.get_ylim()
    scale = np.log if axes.get_yscale() == "log" else np.asarray
    heights = [float((scale(value) - scale(low)) / (scale(high) - scale(low))) for _, value, _ in ends]
    gap = min(_LABEL_GAP, _HIGHEST_LABEL / max(1, len(ends) - 1))
    for (text, _, colour), height in zip(ends, spread(heights, gap, low=0.0, high=_HIGHEST_LABEL), strict=True):
        axes.annotate(
            text,
            (1, height),
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9 * gap / _LABEL_GAP,
            color=colour,
            annotation_clip=False,
            parse_math=False,
        )
