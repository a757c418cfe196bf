"""The progress table: every line as wide as every other, whatever the numbers are."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.monitoring.progress_table import (
    GRPO_COLUMNS,
    ROWS_PER_HEADER,
    SFT_COLUMNS,
    Column,
    ProgressTable,
    duration_text,
    number_text,
    with_held_out,
)

SPECS = sorted({column.spec for column in (*GRPO_COLUMNS, *SFT_COLUMNS)})


def printed(columns, rows, total_steps):
    stream = io.StringIO()
    table = ProgressTable(columns, total_steps=total_steps, stream=stream)
    for step, metrics in rows:
        table.write(step, metrics)
    assert stream.getvalue().endswith("\n")
    return stream.getvalue().splitlines()


def test_columns_of_held_out_sets_stand_where_the_one_of_one_set_does():
    held_out = [Column("eval/a", "eval/a/exact"), Column("eval/b", "eval/b/exact")]
    titles = [column.title for column in with_held_out(GRPO_COLUMNS, held_out)]
    assert titles == ["reward", "exact", "eval/a", "eval/b", "loss", "entropy", "grad norm", "mismatch", "s/step"]


def test_a_column_shows_another_metric_of_a_row_without_its_own():
    table = [Column("held-out", "eval/exact", instead="eval/reward")]
    rows = [(1, {"eval/reward": 0.5}), (2, {"eval/exact": 0.25, "eval/reward": 0.5}), (3, {})]
    assert [line.split()[1] for line in printed(table, rows, 3)[2:]] == ["0.500", "0.250", "-"]


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


@given(data=st.data(), columns=st.sampled_from([GRPO_COLUMNS, SFT_COLUMNS]), total_steps=st.integers(1, 10**7))
def test_every_line_has_the_same_width(data, columns, total_steps):
    seconds = st.floats(min_value=0) | st.just(math.nan)
    values = dict.fromkeys(("seconds/step", "train_seconds"), seconds)
    values = {column.metric: st.floats() for column in columns} | values
    metrics = st.fixed_dictionaries({}, optional=values)
    rows = data.draw(st.lists(st.tuples(st.integers(0, total_steps), metrics), min_size=1, max_size=5))
    lines = printed(columns, rows, total_steps)
    heads = [place for place, line in enumerate(lines) if line.split()[0] == "step"]
    assert len(lines) == len(rows) + 2 * len(heads)
    for start, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        assert len({len(line) for line in lines[start:end]}) == 1
    assert all(line.isascii() for line in lines)  # any terminal and any log file can take it


@given(value=st.floats(allow_nan=False), spec=st.sampled_from(SPECS), width=st.integers(7, 12))
def test_a_number_fits_and_reads_back_near_itself(value, spec, width):
    text = number_text(value, spec, width)
    assert len(text) <= width
    back = float(text.replace(",", ""))
    if math.isfinite(back):  # .0e may round the very largest floats up to infinity
        # a fixed-point form is off by half its last digit, an exponent by half of its one digit
        assert back == value or math.isclose(back, value, rel_tol=0.51)
        assert (back == 0) == (value == 0)


READINGS = [("0.941", 0.941), ("1.2e-06", 1.2e-6), ("nan", math.nan), ("0.000", 0.0), ("1.2e+07", 12345678.0)]


@pytest.mark.parametrize("text, value", READINGS)
def test_numbers_read_as_expected(text, value):
    assert number_text(value, ".3f", 7) == text


def test_an_exact_zero_stays_apart_from_a_tiny_number():
    assert (number_text(0.0, ".1e", 7), number_text(1e-300, ".1e", 7)) == ("0", "1e-300")


def test_the_header_comes_back_every_twenty_rows():
    lines = printed(SFT_COLUMNS, [(step, {"loss": 1.0}) for step in range(1, 46)], 45)
    header = lines[0]
    assert header.split() == ["step", "loss", "grad", "norm", "lr", "tokens/s", "ETA"]
    assert [at for at, line in enumerate(lines) if line == header] == [0, ROWS_PER_HEADER + 2, 2 * ROWS_PER_HEADER + 4]


def test_a_cell_ends_where_its_heading_ends_and_an_absent_metric_is_a_dash():
    shown = {"rollout/reward": 0.25, "rollout_mismatch_max": 3.2e-5, "seconds/step": 61.24}
    whole = {column.metric: 0.5 for column in GRPO_COLUMNS} | {"seconds/step": 61.24}
    header, _, _, row = printed(GRPO_COLUMNS, [(6, whole), (7, shown)], 120)
    expected = {"step": "7/120", "reward": "0.250", "mismatch": "3.2e-05", "s/step": "61.2"}
    expected |= dict.fromkeys(("exact", "held-out", "loss", "entropy", "grad norm"), "-")
    for title, text in expected.items():
        end = header.index(title) + len(title)
        assert row[:end].endswith("  " + text) or row[:end] == text.rjust(end)
    assert row.endswith(duration_text(61.24 * 113))


def test_the_time_left_follows_the_typical_step_and_not_the_slow_first_one():
    rows = [(1, {"seconds/step": 100.0}), (2, {"seconds/step": 2.0}), (3, {"seconds/step": 2.0})]
    assert [line.split()[-1] for line in printed(GRPO_COLUMNS, rows, 13)[2:]] == ["20m00s", "9m21s", "20s"]
    assert printed(SFT_COLUMNS, [(1, {"train_seconds": 3.0})], 2)[-1].endswith(" 3s")


def test_a_table_prints_to_the_standard_output_of_the_moment(capsys):
    ProgressTable(SFT_COLUMNS, total_steps=1).write(1, {"loss": 1.5})
    assert "1.5000" in capsys.readouterr().out


@given(seconds=st.floats(0, 1e12))
def test_a_duration_fits_and_is_right_to_its_second_unit(seconds):
    text = duration_text(seconds)
    assert len(text) <= 7
    sizes = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    if text.startswith(">"):
        assert seconds > 999 * 86400
        return
    total, number, unit = 0, "", 1
    for character in text:
        if character.isdigit():
            number += character
        else:
            unit = sizes[character]
            total, number = total + int(number) * unit, ""
    assert -0.5 <= seconds - total < unit
