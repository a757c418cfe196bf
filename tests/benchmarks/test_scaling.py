"""The tables of docs/performance.md are those of the record, and the record is complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.scaling import LEVELS, TRADE_OFFS, Candidate, Step, row_of, tables, with_tables
from slimefsdp.monitoring.profiler import Shares

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/scaling.json").read_text())


def test_the_document_shows_the_tables_of_the_record() -> None:
    document = (ROOT / "docs/performance.md").read_text()
    assert with_tables(document, RECORD["results"]) == document, (
        "python benchmarks/scaling.py --render docs/performance.md"
    )


def test_the_record_has_every_level_on_every_number_of_ranks_and_every_trade_off() -> None:
    rows = [(row["table"], row["name"], row["ranks"]) for row in RECORD["results"]]
    levels = [("levels", level, ranks) for ranks in (1, 2, 4, 8) for level in LEVELS]
    assert rows == levels + [("trade_offs", name, 2) for name in TRADE_OFFS]


def test_what_is_sharded_is_divided_by_the_ranks_and_the_rest_is_not() -> None:
    held = {(row["name"], row["ranks"]): row for row in RECORD["results"] if row["table"] == "levels"}
    for level in LEVELS:
        for ranks in (2, 4, 8):
            parts = 1 if level == "replicate" else ranks
            for name in ("parameters_bytes", "optimizer_bytes"):
                expected = held[level, 1][name] / parts
                assert held[level, ranks][name] == pytest.approx(expected, rel=0.02), (level, ranks, name)


def test_a_row_has_the_medians_of_the_slowest_rank_and_of_the_work_of_all() -> None:
    rounds = [[Step(wall, cpu, 10, 20, 30), Step(wall / 2, cpu, 11, 20, 30)] for wall, cpu in ((4.0, 1.0), (2.0, 2.0))]
    profiles = [(Shares(2.0, 1.0, 0.5, 0.5), 7), (Shares(4.0, 1.0, 2.0, 0.0), 9)]
    row = row_of(Candidate("levels", "full", 2, {}), [*rounds, rounds[1]], profiles)
    assert (row["samples_per_s"], row["samples_per_cpu_s"]) == (16 / 2.0, 16 / 4.0)
    assert (row["parameters_bytes"], row["peak_bytes"]) == (11, 9)
    assert row["shares"] == {"compute": 0.375, "communication": 0.375, "exposed": 0.125, "idle": 0.5}
    assert "| `full` | 2 | 8.0 | 4.0 | 0.00 | 0.00 | 0.00 | 0.00 | 38 % | 12 % |" in tables([row])


def test_a_document_without_the_marks_is_refused() -> None:
    with pytest.raises(AssertionError, match="<!-- scaling -->"):
        with_tables("nothing", RECORD["results"])
