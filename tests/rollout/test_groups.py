"""A filter is found by name, answers yes or no, and the one that comes with the project keeps what has an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.rollout.groups import ScoredSample, load_filter, mixed_groups
from actors.rollout.records import Record
from slimefsdp.errors import BatchError

RECORD = {"prompt": "sort 31"}
answer: Any = None


def group(*rewards: float, trained: float = 0.0) -> list[ScoredSample]:
    sample = SampledResponse(0, 0, [1, 2], 1, [-0.5], "2", True)
    return [ScoredSample(sample, {"reward": reward}, trained) for reward in rewards]


def canned(record: Record, samples: Sequence[ScoredSample]) -> Any:
    return answer


def all_finished(record: Record, samples: Sequence[ScoredSample]) -> bool:
    return record["prompt"] != "" and all(scored.sample.finished for scored in samples)


@pytest.mark.parametrize("rewards", [(0, 0, 0), (1, 1, 1), (0.25, 0.25), (0, 1, 1), (0.5, 0.25), (0, 0, 1e-30)])
def test_mixed_groups_keeps_the_groups_that_have_an_advantage(rewards: tuple[float, ...]) -> None:
    assert mixed_groups(RECORD, group(*rewards)) == bool(np.std(np.array(rewards, dtype=np.float64)) > 0)


def test_mixed_groups_looks_at_rewards_before_anything_is_taken_off_them() -> None:
    assert not mixed_groups(RECORD, [*group(1.0, trained=1.0), *group(1.0, trained=0.5)])
    assert mixed_groups(RECORD, [*group(1.0, trained=0.5), *group(0.5, trained=0.5)])


def test_a_filter_of_ones_own_is_asked_about_record_and_samples() -> None:
    keep = load_filter("tests.rollout.test_groups:all_finished")
    assert keep(RECORD, group(1.0)) is True
    assert keep({"prompt": ""}, group(1.0)) is False


@pytest.mark.parametrize("given", [None, 1, 0.0, "yes", [True], np.array([True])])
def test_an_answer_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setitem(globals(), "answer", given)
    with pytest.raises(BatchError) as refused:
        load_filter(f"{__name__}:canned")(RECORD, group(1.0))
    assert refused.value.field == "rollout.filter" and f"{__name__}:canned" in refused.value.message
