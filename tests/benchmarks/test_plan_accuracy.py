"""The recorded run of plan_accuracy says what the documents say of it, and its yardstick counts bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.plan_accuracy import MEMORY, PAIRS, Case, described, peak_of_step, verdict

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/plan_accuracy.json").read_text())["results"]


def test_every_case_is_in_the_record_and_no_other() -> None:
    assert [row["case"] for row in RECORD["memory"]] == list(map(described, MEMORY))
    assert [(row["pair"], row["first"], row["second"]) for row in RECORD["rankings"]] == [
        (name, described(first), described(second)) for name, first, second in PAIRS
    ]


@pytest.mark.parametrize("case", [*MEMORY, *(case for _, *both in PAIRS for case in both)], ids=described)
def test_a_case_has_the_batch_that_it_says(case: Case) -> None:
    batch = case.batch(100)
    assert batch.lengths.tolist() == case.lengths and len(case.lengths) > 0
    assert (batch.response_lengths == case.sample - case.prompt).all()


def test_every_recorded_estimate_of_memory_is_within_a_tenth() -> None:
    assert len(RECORD["memory"]) >= 16
    for row in RECORD["memory"]:
        assert 0.9 <= row["predicted_over_measured"] <= 1.1, row["case"]
        assert row["predicted_over_measured"] == pytest.approx(row["predicted_mb"] / row["measured_mb"], abs=5e-3)


def test_every_recorded_ranking_is_the_measured_one() -> None:
    assert len(RECORD["rankings"]) >= 4
    for row in RECORD["rankings"]:
        assert verdict(row["measured_ratio"]) == verdict(row["predicted_ratio"]), row["pair"]


def test_the_documents_quote_the_record() -> None:
    text = " ".join((ROOT / "docs/planning.md").read_text().split())
    quoted = re.search(r"(\d+) runs, the worst estimate is off by ([\d.]+) %.*?all (\d+) rankings", text)
    assert quoted is not None
    assert int(quoted[1]) == len(RECORD["memory"]) and int(quoted[3]) == len(RECORD["rankings"])
    assert float(quoted[2]) == pytest.approx(100 * RECORD["worst_memory_error"], abs=0.06)
    off = re.search(r"the estimated ratio is ([\d.]+) to ([\d.]+) times the measured one", text)
    assert off is not None
    ratios = [row["predicted_ratio"] / row["measured_ratio"] for row in RECORD["rankings"]]
    assert [float(off[1]), float(off[2])] == pytest.approx([min(ratios), max(ratios)], abs=6e-3)


def test_the_peak_is_what_was_held_and_the_highest_sum_of_what_is_allocated() -> None:
    before = SimpleNamespace(parameters=1000, optimizer=200, reference=30, host_buffers=4)

    def step(_: object) -> None:
        first = torch.ones(1_000_000)
        second = torch.ones(500_000)
        del first
        third = torch.ones(100_000)
        del second, third

    trainer: Any = SimpleNamespace(memory=lambda: before, train_step=step)
    batch: Any = None
    assert peak_of_step(trainer, batch) == pytest.approx(1234 + 4 * 1_500_000, abs=1000)


@pytest.mark.parametrize(
    ("ratio", "faster"), [(1.2, "first"), (0.8, "second"), (1.04, "neither"), (0.96, "neither"), (1.051, "first")]
)
def test_settings_that_differ_by_less_than_a_twentieth_are_equally_fast(ratio: float, faster: str) -> None:
    assert verdict(ratio) == faster
