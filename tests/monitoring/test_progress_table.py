"""The progress table: every line as wide as every other, whatever the numbers are."""

from __future__ import annotations

import io
import math

from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.monitoring.progress_table import (
    GRPO_COLUMNS,
    SFT_COLUMNS,
    ProgressTable,
    number_text,
)

SPECS = sorted({column.spec for column in (*GRPO_COLUMNS, *SFT_COLUMNS)})


def printed(columns, rows, total_steps):
    stream = io.StringIO()
    table = ProgressTable(columns, total_steps=total_steps, stream=stream)
    for step, metrics in rows:
        table.write(step, metrics)
    assert stream.getvalue().endswith("\n")
    return stream.getvalue().splitlines()


def test_columns_that_no_step_has_a_value_of_are_left_out_until_one_has():
    rows = [
        (0, {"eval/exact": 0.25}),
        (1, {"rollout/reward": 0.5, "seconds/step": 1.0}),
        (2, {"rollout/reward": 0.5, "seconds/step": 1.0}),
        (3, {"rollout/reward": 0.5, "rollout/exact": 0.5, "seconds/step": 1.0}),
        (4, {"seconds/step": 1.0}),
    ]
    lines = printed(GRPO_COLUMNS, rows, 4)
    heads = [line.split() for line in lines if line.split()[0] == "step"]
    assert heads[0][1:3] == ["reward", "held-out"], "before the first step all but one that many rewards lack"
    assert heads[1:] == [
        ["step", "reward", "held-out", "s/step", "ETA"],
        ["step", "reward", "exact", "held-out", "s/step", "ETA"],
    ]
    assert lines[-1].split()[1:4] == ["-", "-", "-"]


@given(value=st.floats(allow_nan=False), spec=st.sampled_from(SPECS), width=st.integers(7, 12))
def test_a_number_fits_and_reads_back_near_itself(value, spec, width):
    text = number_text(value, spec, width)
    assert len(text) <= width
    back = float(text.replace(",", ""))
    if math.isfinite(back):  # .0e may round the very largest floats up to infinity
        # a fixed-point form is off by half its last digit, an exponent by half of its one digit
        assert back == value or math.isclose(back, value, rel_tol=0.51)
        assert (back == 0) == (value == 0)


def test_the_time_left_follows_the_typical_step_and_not_the_slow_first_one():
    rows = [(1, {"seconds/step": 100.0}), (2, {"seconds/step": 2.0}), (3, {"seconds/step": 2.0})]
    assert [line.split()[-1] for line in printed(GRPO_COLUMNS, rows, 13)[2:]] == ["20m00s", "9m21s", "20s"]
    assert printed(SFT_COLUMNS, [(1, {"train_seconds": 3.0})], 2)[-1].endswith(" 3s")
