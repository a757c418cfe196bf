"""The tables of docs/optimizers.md are those of the record, and what it says of memory and host time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.optimizers import OPTIMIZERS, host_times, rows_of, tables, with_tables
from tests.support.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/optimizers.json").read_text())


def test_the_document_shows_the_tables_of_the_record() -> None:
    document = (ROOT / "docs/optimizers.md").read_text()
    assert with_tables(document, RECORD["results"]) == document, (
        "python benchmarks/optimizers.py --render docs/optimizers.md"
    )
    with pytest.raises(AssertionError, match="<!-- optimizers -->"):
        with_tables("nothing", RECORD["results"])


def test_the_record_has_every_optimiser_with_the_bytes_that_plan_counts() -> None:
    rows = RECORD["results"]["optimizers"]
    assert [(row["ranks"], row["optimizer"]) for row in rows] == [
        (ranks, name) for ranks in (1, 2) for name in OPTIMIZERS
    ]
    for row in rows:
        assert row["bytes"] == pytest.approx(row["planned_bytes"], rel=0.01), row["optimizer"]
    held = {row["optimizer"]: row["bytes"] for row in rows if row["ranks"] == 1}
    assert held["adamw"] / held["adamw, bfloat16"] == pytest.approx(2, rel=1e-3)
    assert held["adamw"] / held["adamw, 8bit"] == pytest.approx(8 / 2.03, rel=0.01)


def test_the_record_has_an_update_at_most_a_third_of_what_it_took_before() -> None:
    host = RECORD["results"]["host"]
    assert 3 * host["now"] <= host["before"] and host["now"] < host["torch, fused"] < host["torch, default"]


def test_updates_are_taken_as_they_are_and_were_and_as_users_of_torch_do(ranks: RankPool) -> None:
    (host,) = ranks.run(1, host_times, 1)
    assert host.keys() == RECORD["results"]["host"].keys() and min(host.values()) > 0


def test_a_row_adds_up_ranks() -> None:
    one = {"optimizer": "adamw", "parameters": 10, "bytes": 40, "planned_bytes": 38, "cpu_s": [1.0, 3.0, 2.0]}
    row = {"optimizer": "adamw", "parameters": 10, "bytes": 80, "planned_bytes": 76, "cpu_s": 4.0}
    assert rows_of([[one], [one]]) == [row]
    host = {"now": 0.01, "before": 0.035}
    found = tables({"optimizers": [row | {"ranks": 1}, row | {"ranks": 2, "cpu_s": 5.0}], "host": host})
    assert "| adamw | 8.00 | 7.60 | 4000 | 5000 |" in found and "| before | 35.0 | 3.5 |" in found
