"""The curves: which panels a run gets, what they show, and a picture that is written whole or not at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

from slimefsdp.monitoring.curves import Panel, RunCurves, draw_curves, panels_of, running_mean, series_of
from slimefsdp.monitoring.metrics_log import MetricsLog

finite = st.floats(-1e6, 1e6)


def rows_of(metrics, steps):
    return [{"step": step, "time": 0.0, **metrics} for step in range(steps)]


def panels(metrics, heldout_sets=()) -> dict[str, Panel]:
    series = {name: series_of(rows_of(metrics, 2), name) for name in metrics}
    return {panel.heading: panel for panel in panels_of(series, heldout_sets)}


def test_missing_and_non_finite_values_are_left_out_and_a_repeated_step_keeps_its_last_value():
    values = [(1, 1.0), (2, None), (3, math.nan), (4, math.inf), (2, 5.0), (1, 7.0)]
    line = series_of([*({"step": step, "loss": value} for step, value in values), {"step": 9}], "loss")
    assert line.steps.tolist() == [1, 2] and line.values.tolist() == [7.0, 5.0]


def test_only_panels_with_data_are_there_and_lines_of_one_panel_share_it():
    metrics = {"eval/exact": 0.5, "rewards/chosen": 1.0, "rewards/rejected": -1.0, "kl_old": 0.0, "grad_norm": 1.0}
    found = panels(metrics | {"seconds/train": 2.0})
    assert list(found) == ["Held-out evaluation", "Implicit rewards", "Gradient norm", "Where the time goes"]
    assert list(found["Implicit rewards"].lines) == ["chosen", "rejected"]


def test_shares_of_a_held_out_set_are_drawn_together_and_other_scales_apart():
    metrics = {"eval/exact": 0.5, "eval/truncated": 0.1, "eval/reward": -3.0, "eval/loss": 0.5, "eval/ended_by_x": 0.5}
    found = panels(metrics | {"eval/greedy_exact": 0.75})
    assert {heading: list(panel.lines) for heading, panel in found.items()} == {
        "Held-out evaluation": ["exact", "truncated"],
        "Held-out reward": [""],
        "Held-out loss": [""],
        "Held-out greedy evaluation": ["exact"],
    }


def test_each_held_out_set_has_panels_of_its_own_and_intervals_are_bands():
    metrics = {"eval/math/pass@1": 0.5, "eval/math/pass@1_low": 0.4, "eval/math/pass@1_high": 0.6}
    metrics |= {"eval/math/reward": -3.0, "eval/code/exact": 0.25, "eval/format/ok": 1.0}
    found = panels(metrics, heldout_sets=("code", "math"))
    assert {heading: list(panel.lines) for heading, panel in found.items()} == {
        "Held-out code: evaluation": ["exact"],
        "Held-out math: evaluation": ["pass@1"],
        "Held-out math: reward": [""],
        "Held-out evaluation": ["format/ok"],
    }
    low, high = found["Held-out math: evaluation"].bands["pass@1"]
    assert (low.values.tolist(), high.values.tolist()) == ([0.4] * 2, [0.6] * 2)


def test_the_activities_and_what_they_leave_over_add_up_to_the_whole_step():
    rows = [{"step": s, "seconds/generate": 1.0 + s, "seconds/step": 4.0 + s} for s in range(1, 9)]
    rows[3]["seconds/evaluate"] = 2.0
    series = {name: series_of(rows, name) for name in ("seconds/generate", "seconds/evaluate", "seconds/step")}
    (panel,) = panels_of(series)
    assert list(panel.lines) == ["generate", "evaluate", "other"]
    whole = sum(line.values for line in panel.lines.values())
    np.testing.assert_allclose(whole, series["seconds/step"].values)


@given(values=st.lists(finite, min_size=1, max_size=30), window=st.integers(1, 9))
def test_the_running_mean_is_the_mean_of_the_neighbours(values, window):
    reach = window // 2
    expected = [np.mean(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]
    np.testing.assert_allclose(running_mean(np.array(values), window), expected, atol=1e-6)


def test_a_spike_does_not_reach_past_its_window():
    values = np.array([1.0, 1.0, 1e20, *[1.0] * 9])
    np.testing.assert_array_equal(running_mean(values, 5)[5:], 1.0)


class Clock:
    """Seconds that a picture takes; others pass between two steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_is_drawn_after_its_first_step_and_then_for_a_hundredth_of_its_time(tmp_path, monkeypatch):
    clock, drawn = Clock(), []

    def draw(rows, path, **named):
        drawn.append((len(rows), named))
        clock.now += 2.0

    monkeypatch.setattr("slimefsdp.monitoring.curves.draw_curves", draw)
    curves = RunCurves(tmp_path, algorithm="GRPO", heldout_sets=("a",), clock=clock)
    curves.draw_if_due()
    assert not drawn, "nothing is there to be drawn"
    with MetricsLog(tmp_path) as log:
        for step in range(1, 402):
            log.write(step, {"loss": 1.0})
            curves.draw_if_due()
            clock.now += 1.0
    assert [rows for rows, _ in drawn] == [1, 201, 401]
    assert {tuple(sorted(named)) for _, named in drawn} == {("heldout_sets", "title")}
    curves.draw()
    assert len(drawn) == 4, "an end is drawn whenever it comes"


def test_what_cannot_be_drawn_is_said_once_and_ends_nothing(tmp_path, capsys):
    with MetricsLog(tmp_path) as log:
        log.write(1, {"loss": 1.0})
    (tmp_path / "curves.png").mkdir()
    curves = RunCurves(tmp_path, algorithm="GRPO", heldout_sets=())
    for _ in range(2):
        curves.draw()
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_names_are_drawn_as_they_are_dollar_signs_too(tmp_path):
    rows = rows_of({"eval/$x": 0.5, "eval/{$": 3.0, "seconds/$": 1.0, "loss": 1.0}, 2)
    draw_curves(rows, tmp_path / "deep" / "c.png", title=r"cost in $, \frac{")
    assert imread(tmp_path / "deep" / "c.png").shape[2] == 4


def test_a_picture_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch):
    draw_curves(rows_of({"loss": 1.0}, 2), tmp_path / "c.png", title="t")
    earlier = (tmp_path / "c.png").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["c.png"]

    def die(self, path, **_):
        path.write_bytes(b"torn")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", die)
    with pytest.raises(OSError, match="disk full"):
        draw_curves(rows_of({"loss": 2.0}, 2), tmp_path / "c.png", title="t")
    assert (tmp_path / "c.png").read_bytes() == earlier
