"""The curves: which panels a run gets, what they show, and a picture that is written whole or not at all."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from slimefsdp.monitoring.curves import RunCurves, draw_curves
from slimefsdp.monitoring.metrics_log import MetricsLog
from slimefsdp.monitoring.panels import panels_of, series_of


def rows_of(metrics, steps):
    return [{"step": step, "time": 0.0, **metrics} for step in range(steps)]


def test_missing_and_non_finite_values_are_left_out_and_a_repeated_step_keeps_its_last_value():
    values = [(1, 1.0), (2, None), (3, math.nan), (4, math.inf), (2, 5.0), (1, 7.0)]
    line = series_of([*({"step": step, "loss": value} for step, value in values), {"step": 9}], "loss")
    assert line.steps.tolist() == [1, 2] and line.values.tolist() == [7.0, 5.0]


def test_the_activities_and_what_they_leave_over_add_up_to_the_whole_step():
    rows = [{"step": s, "seconds/generate": 1.0 + s, "seconds/step": 4.0 + s} for s in range(1, 9)]
    rows[3]["seconds/evaluate"] = 2.0
    series = {name: series_of(rows, name) for name in ("seconds/generate", "seconds/evaluate", "seconds/step")}
    (panel,) = panels_of(series)
    assert list(panel.lines) == ["generate", "evaluate", "other"]
    whole = sum(line.values for line in panel.lines.values())
    np.testing.assert_allclose(whole, series["seconds/step"].values)


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
