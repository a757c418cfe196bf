"""The benchmark of weight updates counts what it says it counts."""

from __future__ import annotations

from pathlib import Path

from benchmarks.weight_updates import summary

ROOT = Path(__file__).resolve().parents[2]


def test_the_engines_own_time_is_left_out_where_the_raw_copy_has_no_such_part() -> None:
    rounds = [{"update_s": 2.0, "engine_s": 1.0, "raw_s": raw_s} for raw_s in (0.5, 1.0, 3.0)]
    assert summary("broadcast", rounds) == {"update_s": 2.0, "engine_s": 1.0, "raw_s": 1.0, "share": 1.0}
    assert summary("ipc", rounds)["share"] == 0.5
