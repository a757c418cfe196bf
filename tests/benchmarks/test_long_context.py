"""All four variants of the long-context benchmark compute the same, and it notices where one does not; the document has
the tables of the record."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.long_context import (
    BOUND,
    MODEL,
    PAIRS,
    VARIANTS,
    Group,
    Step,
    compared,
    measured,
    summary,
    table,
    with_table,
)
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/long_context.json").read_text())
SMALL = Group(300, 4, 21)  # nothing that two ranks can share evenly
NAMES = [variant.name for variant in VARIANTS]


def test_the_four_variants_have_one_loss_and_one_gradient(ranks: RankPool, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model", **{**MODEL, "initializer_range": 0.2})
    differences = compared(ranks, folder, SMALL)
    assert differences.keys() == set(NAMES[1:]) and max(differences.values()) <= BOUND
    rounds = measured(ranks, folder, SMALL, 2)
    found = summary(SMALL, differences, rounds)
    assert found["equal"], found
    whole, computed = SMALL.responses * (SMALL.prompt + SMALL.response), SMALL.computed_tokens
    for variant in VARIANTS:
        steps = [step for one in rounds for step in one[variant.name]]
        assert len(steps) == 2 * variant.cp and all(step.peak_bytes > 0 and step.cpu_s > 0 for step in steps)
        shared = 1 - computed / whole if variant.shares else 0.0
        assert found["variants"][variant.name]["shared_tokens"] == pytest.approx(shared)


def steps_of(**changes: dict[str, float]) -> dict[str, list[Step]]:
    """A round in which rank r of every variant takes r + 1 seconds; with changes by variant."""
    return {
        variant.name: [
            replace(Step(1.0 + rank, 1.0 + rank, 2**20, 0.5, 2.0, 0.0), **changes.get(variant.name, {}))  # type: ignore[arg-type]
            for rank in range(variant.cp)
        ]
        for variant in VARIANTS
    }


@pytest.mark.parametrize("change", [{"loss": 0.5 + 1e-5}, {"grad_norm": 2.0 + 1e-3}])
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_variant_that_computes_something_else_is_noticed(name: str, change: dict[str, float]) -> None:
    equal = dict.fromkeys(NAMES[1:], 1e-15)
    assert summary(SMALL, equal, [steps_of(), steps_of()])["equal"]
    assert not summary(SMALL, equal, [steps_of(), steps_of(**{name: change})])["equal"]
    assert not summary(SMALL, {**equal, name: 1e-11}, [steps_of()])["equal"]


def test_ratios_are_those_inside_a_round_and_have_their_spread() -> None:
    names = ("not shared, cp 1", "shared, cp 1")
    rounds = [
        steps_of(**{names[0]: {"wall_s": slow, "cpu_s": 4.0, "peak_bytes": 3 * 2**20}, names[1]: {"wall_s": fast}})
        for slow, fast in ((10.0, 5.0), (30.0, 10.0), (8.0, 1.0))
    ]
    found = summary(SMALL, dict.fromkeys(NAMES[1:], 0.0), rounds)
    assert found["gains"]["shared prompts, cp 1"] == {
        "wall": [3.0, 2.0, 8.0], "cpu": [4.0] * 3, "all_cpu": [4.0] * 3, "peak": [3.0] * 3
    }  # fmt: skip
    assert found["gains"]["cp 2, shared"]["all_cpu"][0] == pytest.approx(1 / 3, abs=1e-3), "1 against 1 + 2 s"
    assert found["gains"]["cp 2, shared"]["cpu"][0] == 0.5, "1 against the busiest rank's 2 s"
    assert "| not shared, cp 1 | 10.00 | 4.00 | 4.00 | 3 |" in table(found)


def test_the_document_shows_the_tables_of_the_record() -> None:
    document = (ROOT / "docs/long_context.md").read_text()
    assert with_table(document, RECORD["results"]) == document, (
        "python benchmarks/long_context.py --render docs/long_context.md"
    )


def test_the_record_is_of_long_prompts_and_all_variants_were_equal_there() -> None:
    results = RECORD["results"]
    assert results["equal"] and results["group"]["prompt"] == 16384 and 4 <= results["group"]["responses"] <= 8
    assert max(results["float64_gradient_difference"].values()) <= BOUND
    assert list(results["variants"]) == NAMES and list(results["gains"]) == [name for name, *_ in PAIRS]
    assert all(len(one["rounds"]) >= 5 for one in results["variants"].values())
