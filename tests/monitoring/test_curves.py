"""The curves: which panels a run gets, what they show, and a picture that is written whole or not at all."""

from __future__ import annotations

import itertools
import math

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

from slimefsdp.monitoring.curves import RunCurves, draw_curves, running_mean, series_of, spread
from slimefsdp.monitoring.metrics_log import MetricsLog

HEADINGS = {
    "eval/exact": "Held-out accuracy",
    "rollout/reward": "Training reward",
    "rewards/chosen": "Implicit rewards",
    "rewards/accuracies": "Pairs ranked rightly",
    "loss": "Loss",
    "entropy": "Entropy of the policy",
    "kl_ref": "KL to the reference model",
    "kl_old": "KL to the policy before the step",
    "clip_fraction_high": "Clipped tokens",
    "rollout/response_length": "Response length",
    "rollout/truncated": "Truncated responses",
    "grad_norm": "Gradient norm",
    "memory/peak_bytes": "Memory of the rank with most",
    "rollout_mismatch_max": "Mismatch of rollout and trainer",
    "seconds/train": "Where the time goes (medians)",
}
finite = st.floats(-1e6, 1e6)


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """Draws rows as usual and returns the picture's axes by heading."""
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))

    def axes_of(rows, **more):
        draw_curves(rows, tmp_path / "curves.png", title="t", **more)
        return {axes.get_title(loc="left"): axes for axes in figures[-1].axes}

    return axes_of


def rows_of(metrics, steps):
    return [{"step": step, "time": 0.0, **metrics} for step in range(steps)]


@pytest.mark.parametrize("panels", range(len(HEADINGS) + 1))
def test_only_panels_with_data_are_drawn_in_order_and_fill_the_picture_without_overlap(draw, panels):
    names = list(HEADINGS)[len(HEADINGS) - panels :]
    axes = draw(rows_of(dict.fromkeys(names, 0.5), 3))
    assert list(axes) == [HEADINGS[name] for name in names]
    cells = []
    for panel in axes.values():
        assert panel.get_ylabel()
        where = panel.get_subplotspec()
        cells += itertools.product(where.rowspan, where.colspan)
    if panels:
        grid = panel.get_gridspec()
        assert sorted(cells) == list(itertools.product(range(grid.nrows), range(grid.ncols)))


def test_missing_and_non_finite_values_are_left_out_and_a_repeated_step_keeps_its_last_value():
    values = [(1, 1.0), (2, None), (3, math.nan), (4, math.inf), (2, 5.0), (1, 7.0)]
    line = series_of([*({"step": step, "loss": value} for step, value in values), {"step": 9}], "loss")
    assert line.steps.tolist() == [1, 2] and line.values.tolist() == [7.0, 5.0]


def test_a_metric_that_is_never_finite_has_no_panel(draw):
    assert list(draw(rows_of({"loss": None, "entropy": math.nan, "grad_norm": 1.0}, 3))) == ["Gradient norm"]


def test_engines_that_agree_exactly_leave_no_logarithmic_panel(draw):
    assert draw(rows_of({"rollout_mismatch_max": 0.0}, 3)) == {}
    rows = [{"step": 1, "rollout_mismatch_max": 0.0}, {"step": 2, "rollout_mismatch_max": 1e-4}]
    (axes,) = draw(rows).values()
    assert axes.get_yscale() == "log" and axes.lines[0].get_xdata().tolist() == [2]


def test_a_held_out_reward_of_another_scale_gets_its_own_axis(draw):
    axes = draw(rows_of({"eval/exact": 0.5, "eval/truncated": 0.1, "eval/reward": -3.0}, 2))
    assert list(axes) == ["Held-out evaluation", "Held-out reward"]
    assert [text.get_text() for text in axes["Held-out evaluation"].texts] == ["exact 50.0%", "truncated 10.0%"]
    assert axes["Held-out reward"].texts[0].get_text() == "-3"


def test_a_held_out_loss_is_no_share_however_small_it_is(draw):
    axes = draw(rows_of({"eval/loss": 0.5, "eval/rewards/accuracies": 0.75, "eval/rewards/margins": 0.25}, 2))
    assert list(axes) == ["Held-out evaluation", "Held-out loss", "Held-out rewards/margins"]
    assert axes["Held-out loss"].texts[0].get_text() == "0.5"


def test_lines_of_one_panel_share_an_axis_and_what_is_zero_throughout_may_have_none(draw):
    axes = draw(rows_of({"rewards/chosen": 1.0, "rewards/rejected": -1.0, "clip_fraction_low": 0.0, "kl_old": 0.0}, 3))
    assert [text.get_text() for text in axes["Implicit rewards"].texts] == ["chosen 1", "rejected -1"]
    assert list(axes) == ["Implicit rewards"]
    memory = {"memory/peak_bytes": 3.5e9, "memory/allocated_bytes": 2e9, "rollout/truncated": 0.0}
    axes = draw(rows_of(memory, 3))
    assert [text.get_text() for text in axes[HEADINGS["memory/peak_bytes"]].texts] == ["peak 3.5", "now 2"]
    assert axes["Truncated responses"].get_ylim()[0] == 0


def test_any_number_of_held_out_scores_have_looks_of_their_own_and_labels_beside_their_panel(draw):
    scores = {f"eval/score_{index}": 1 - index / 1000 for index in range(20)}
    axes = draw(rows_of(scores, 2))["Held-out evaluation"]
    looks = {(line.get_color(), line.get_linestyle()) for line in axes.lines}
    assert len(looks) == len(axes.lines) == len(scores)
    heights = [text.xy[1] for text in axes.texts]
    assert len(set(heights)) == len(scores) and min(heights) >= 0 and max(heights) < 1


def test_greedy_scores_have_panels_of_their_own_and_no_score_is_drawn_twice(draw):
    metrics = {"pass@1": 0.5, "pass@1_low": 0.4, "pass@1_high": 0.6, "solved_of_finished": 0.5, "truncated": 0.5}
    metrics |= {"ended_by_room": 0.125, "greedy_ended_by_room": 0.25, "greedy_reward": 0.75, "greedy_turns": 3.0}
    axes = draw(rows_of({f"eval/{name}": value for name, value in metrics.items()}, 2))
    labels = [[text.get_text() for text in panel.texts] for panel in axes.values()]
    assert labels == [["pass@1 50.0%", "truncated 50.0%"], ["reward 75.0%"], ["3"]]
    assert list(axes)[1:] == ["Held-out greedy evaluation", "Held-out greedy turns"]


def test_each_held_out_set_has_panels_of_its_own(draw):
    metrics = {"eval/math/pass@1": 0.5, "eval/math/pass@1_low": 0.4, "eval/math/pass@1_high": 0.6}
    metrics |= {"eval/math/reward": -3.0, "eval/code/exact": 0.25, "eval/format/ok": 1.0}
    axes = draw(rows_of(metrics, 2), heldout_sets=("code", "math"))
    headings = ["Held-out code: accuracy", "Held-out math: evaluation", "Held-out math: reward", "Held-out evaluation"]
    assert list(axes) == headings
    labels = [[text.get_text() for text in axes[heading].texts] for heading in headings]
    assert labels == [["exact 25.0%"], ["pass@1 50.0%"], ["-3"], ["format/ok 100.0%"]], "a score may be called so"
    assert axes["Held-out math: evaluation"].collections, "the band"


def test_the_label_at_the_edge_is_as_high_as_the_end_of_the_bold_line(draw):
    for name, heading in (("loss", "Loss"), ("rollout_mismatch_max", HEADINGS["rollout_mismatch_max"])):
        axes = draw([{"step": step, name: 10.0 ** (step % 7)} for step in range(30)])[heading]
        end = (axes.get_xlim()[1], axes.lines[1].get_ydata()[-1])
        height = axes.transAxes.inverted().transform(axes.transData.transform(end))[1]
        assert height == pytest.approx(axes.texts[0].xy[1])


def test_the_activities_and_what_they_leave_over_add_up_to_the_whole_step(draw):
    rows = [
        {"step": s, "seconds/generate": 1.0 + s, "seconds/train": 2.0, "seconds/step": 4.0 + s} for s in range(1, 9)
    ]
    axes = draw(rows)[HEADINGS["seconds/train"]]
    tops = [patch.get_data().values for patch in axes.patches]
    np.testing.assert_allclose(tops, [[1.0 + s for s in range(1, 9)], [3.0 + s for s in range(1, 9)], range(5, 13)])
    assert [text.get_text() for text in axes.texts] == ["generate 5.5 s", "train 2 s", "other 1 s"]


def test_what_few_steps_do_is_named_with_its_time_in_these(draw):
    rows = [
        {"step": step, "seconds/train": 2.0} | ({"seconds/evaluate": 3.0} if step == 4 else {}) for step in range(8)
    ]
    axes = draw(rows)[HEADINGS["seconds/train"]]
    assert [text.get_text().split(" s")[0] for text in axes.texts] == ["train 2", "evaluate 3"]


def test_a_slow_first_step_is_named_and_does_not_flatten_the_others(draw):
    rows = [{"step": step, "seconds/train": 90.0 if step == 1 else 2.0} for step in range(1, 101)]
    axes = draw(rows)[HEADINGS["seconds/train"]]
    assert axes.get_ylim()[1] < 4
    assert "longest: 90 s at step 1" in [text.get_text() for text in axes.texts]


@given(values=st.lists(finite, min_size=1, max_size=30), window=st.integers(1, 9))
def test_the_running_mean_is_the_mean_of_the_neighbours(values, window):
    reach = window // 2
    expected = [np.mean(values[max(0, at - reach) : at + reach + 1]) for at in range(len(values))]
    np.testing.assert_allclose(running_mean(np.array(values), window), expected, atol=1e-6)


def test_a_spike_does_not_reach_past_its_window():
    values = np.array([1.0, 1.0, 1e20, *[1.0] * 9])
    np.testing.assert_array_equal(running_mean(values, 5)[5:], 1.0)


@given(positions=st.lists(st.floats(-2, 2), max_size=8), gap=st.floats(0.01, 0.5))
def test_labels_that_are_kept_between_bounds_keep_their_order_and_distance(positions, gap):
    moved = spread(positions, gap, low=0.0, high=4.0)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    assert all(moved[after] - moved[before] >= gap - 1e-9 for before, after in itertools.pairwise(order))
    assert all(-1e-9 <= height <= 4 + 1e-9 for height in moved)


@given(positions=st.lists(st.floats(-2, 2), max_size=8), gap=st.floats(0.01, 0.5))
def test_spread_labels_keep_their_order_and_distance_and_their_mean(positions, gap):
    moved = spread(positions, gap)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    assert all(moved[after] - moved[before] >= gap - 1e-9 for before, after in itertools.pairwise(order))
    assert sum(moved) == pytest.approx(sum(positions), abs=1e-9)
    if all(positions[after] - positions[before] > gap for before, after in itertools.pairwise(order)):
        assert moved == positions


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


def test_dollar_signs_in_names_are_drawn_as_they_are(tmp_path):
    rows = rows_of({"eval/$x": 0.5, "eval/{$": 3.0, "seconds/$": 1.0}, 2)
    draw_curves(rows, tmp_path / "deep" / "c.png", title=r"cost in $, \frac{")
    assert imread(tmp_path / "deep" / "c.png").shape[2] == 4


def test_a_picture_that_fails_leaves_the_earlier_one_and_the_global_style_alone(tmp_path, monkeypatch):
    style = dict(matplotlib.rcParams)
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
    assert dict(matplotlib.rcParams) == style
