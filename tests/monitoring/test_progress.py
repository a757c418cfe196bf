"""The progress of a run: a line for each step."""

from __future__ import annotations

import io

import pytest

from slimefsdp.monitoring.progress import GRPO_COLUMNS, SFT_COLUMNS, Column, Progress


def printed(columns, rows, total_steps):
    stream = io.StringIO()
    progress = Progress(columns, total_steps=total_steps, stream=stream)
    for step, metrics in rows:
        progress.write(step, metrics)
    return stream.getvalue().splitlines()


def test_a_line_has_the_values_that_its_step_has():
    rows = [(0, {"eval/reward": 0.25}), (10, {"rollout/reward": 0.5, "eval/exact": 1.0, "eval/reward": 0.25})]
    assert printed(GRPO_COLUMNS, rows, 10) == ["step  0/10  held-out 0.250", "step 10/10  reward 0.500  held-out 1.000"]


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"rollout/reward": 0.0, "rollout/groups_dropped": 1.0}, "rollout.filter dropped all groups"),
        ({"rollout/reward_failures": 0.5}, "every group had a failed reward"),
        ({"rollout/reward": 0.0, "rollout/reward_failures": 0.0, "zero_variance_groups": 1.0}, "rewards of each group"),
        ({"rollout/reward": 0.0, "rollout/truncated": 1.0}, "all responses were truncated"),
        ({"zero_variance_groups": 0.5, "skipped_update": 1.0}, "gradients were not finite"),
        ({"zero_variance_groups": 0.0, "early_stopped_updates": 2.0}, "loss.max_kl"),
        ({"critic/updates": 2.0}, "the critic trains alone"),
    ],
)
def test_a_step_without_an_update_shows_the_reason(metrics: dict[str, float], reason: str) -> None:
    (line,) = printed(GRPO_COLUMNS, [(3, metrics | {"updates": 0.0, "seconds/step": 1.0})], 10)
    assert "  no update: " in line and reason in line.partition("no update: ")[2] and line.endswith("ETA 0:00:07")
    (line,) = printed(GRPO_COLUMNS, [(3, metrics | {"updates": 1.0})], 10)
    assert "no update" not in line


def test_a_number_that_would_round_to_zero_keeps_a_digit():
    assert Column("loss", "loss").text({"loss": -1.25e-7}) == "loss -1.2e-07"
    assert Column("loss", "loss").text({"loss": 0.0}) == "loss 0.000"


def test_the_time_left_follows_the_typical_step_and_not_the_slow_first_one():
    rows = [(1, {"seconds/step": 100.0}), (2, {"seconds/step": 2.0}), (3, {"seconds/step": 2.0})]
    assert [line.split()[-1] for line in printed(GRPO_COLUMNS, rows, 13)] == ["0:20:00", "0:09:21", "0:00:20"]
    assert printed(SFT_COLUMNS, [(1, {"train_seconds": 3.0})], 2)[-1].endswith("ETA 0:00:03")
