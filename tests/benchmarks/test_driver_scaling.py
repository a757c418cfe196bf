"""The table of a step's driver is that of the record, and nothing in it grows faster than the ranks do."""

from __future__ import annotations

import cProfile
import json
import pstats
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.workers import futures
from actors.workers.futures import CallFuture
from benchmarks.driver_scaling import (
    GROUP,
    RANKS,
    driver_seconds,
    planned,
    planner_of,
    settings,
    skewed_batch,
    with_tables,
)
from slimefsdp.batching.prefix_tree import SharedPrefixes
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.preparation.plan import batch_metrics

ROOT = Path(__file__).resolve().parents[2]
RECORD: dict[str, Any] = json.loads((ROOT / "benchmarks/results/driver_scaling.json").read_text())
SAMPLES = 1600


def test_the_document_shows_the_table_of_the_record() -> None:
    document = (ROOT / "docs/performance.md").read_text()
    assert with_tables(document, RECORD["results"]) == document, (
        "python benchmarks/driver_scaling.py --render docs/performance.md"
    )


def test_the_record_has_every_number_of_ranks_before_and_after_with_the_same_plans() -> None:
    results = RECORD["results"]
    before = {(row["shares_prompts"], row["ranks"]): row for row in results["before"]["steps"]}
    assert [(row["shares_prompts"], row["ranks"]) for row in results["steps"]] == list(before)
    assert list(before) == [(shares, ranks) for shares in (False, True) for ranks in RANKS]
    for row in results["steps"]:
        assert row["driver_s"] == pytest.approx(driver_seconds(row, results["calls"]), rel=1e-12)
        assert row["plan"] == before[row["shares_prompts"], row["ranks"]]["plan"]


def test_a_batch_has_the_prompts_that_it_says(skewed: Callable[[bool], RolloutBatch]) -> None:
    for shares in (False, True):
        batch = skewed(shares)
        begins = batch.tokens[batch.token_offsets[:-1, None] + np.arange(24)].reshape(-1, GROUP, 24)
        assert bool((begins == begins[:, :1]).all()) == shares


@pytest.fixture(scope="module")
def skewed() -> Callable[[bool], RolloutBatch]:
    batches = {shares: skewed_batch(SAMPLES, shares=shares) for shares in (False, True)}
    return batches.__getitem__


def grows_no_faster_than(sizes: list[int], counted: list[int]) -> bool:
    """Whether what a twofold size adds is about twofold, and not fourfold; sizes double."""
    added = np.diff(counted)
    assert all(later == 2 * size for size, later in pairwise(sizes))
    return bool((added[1:] <= 3 * np.maximum(added[:-1], 1) + 100).all())


def test_what_is_counted_tells_a_square_from_a_line() -> None:
    sizes = [128, 256, 512, 1024]
    assert grows_no_faster_than(sizes, [5000 + 30 * size for size in sizes])
    assert not grows_no_faster_than(sizes, [5000 + size * size // 100 for size in sizes])


@pytest.mark.parametrize("shares", [False, True])
def test_planning_makes_no_more_calls_than_in_proportion_to_the_ranks(
    shares: bool, skewed: Callable[[bool], RolloutBatch]
) -> None:
    batch, counts = skewed(shares), []
    sizes = [64, 128, 256, 512]
    for ranks in sizes:
        config = settings(ranks, batch.num_samples)
        profile = cProfile.Profile()
        profile.enable()
        work = planner_of(config).for_training(batch)()
        batch_metrics(config, work.plan, batch, planner_of(config).cost)
        profile.disable()
        counts.append(int(pstats.Stats(profile).total_calls))  # type: ignore[attr-defined]
    assert grows_no_faster_than(sizes, counts), counts


def test_what_samples_share_is_looked_up_equally_often_for_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, skewed: Callable[[bool], RolloutBatch]
) -> None:
    looked = 0
    for name in ("among", "among_each"):
        original = getattr(SharedPrefixes, name)

        def counting(*args: Any, original: Callable[..., Any] = original) -> Any:
            nonlocal looked
            looked += 1
            return original(*args)

        monkeypatch.setattr(SharedPrefixes, name, counting)
    found = []
    for ranks in (8, 512):
        looked = 0
        row = planned(skewed(True), ranks, 1)
        assert row["packs"] >= 4 * ranks
        found.append(looked)
    assert 0 < found[1] <= 2 * found[0], found  # each look is of the whole batch


def test_waiting_for_a_call_looks_at_each_rank_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    def wait(refs: list[int], num_returns: int, **_: object) -> tuple[list[int], list[int]]:
        nonlocal looked
        looked += len(refs)
        return refs[:num_returns], refs[num_returns:]

    monkeypatch.setattr(futures.ray, "wait", wait)
    monkeypatch.setattr(futures.ray, "get", lambda ref, timeout: ref)
    sizes, counts = [128, 256, 512, 1024], []
    for ranks in sizes:
        looked = 0
        call = CallFuture(range(ranks), name="train_step", timeout_s=60, first_only=False)
        assert call.result() == list(range(ranks))
        counts.append(looked)
    assert grows_no_faster_than(sizes, counts), counts
    assert counts[-1] <= 10 * sizes[-1]
