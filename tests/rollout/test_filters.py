"""A filter is found by name, answers yes or no, and the one that comes with the project keeps what has an advantage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.rollout.filters import FILTERS, ScoredSample, load_filter, mixed_groups
from actors.rollout.prompts import Record
from slimefsdp.config import config_from_dict
from slimefsdp.errors import BatchError, ConfigError

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
    keep = load_filter("tests.rollout.test_filters:all_finished")
    assert keep(RECORD, group(1.0)) is True
    assert keep({"prompt": ""}, group(1.0)) is False


@pytest.mark.parametrize(("given", "kept"), [(True, True), (False, False), (np.True_, True), (np.False_, False)])
def test_a_filter_may_answer_with_numpys_booleans(monkeypatch: pytest.MonkeyPatch, given: Any, kept: bool) -> None:
    monkeypatch.setitem(globals(), "answer", given)
    assert load_filter(f"{__name__}:canned")(RECORD, group(1.0)) is kept


@pytest.mark.parametrize("given", [None, 1, 0.0, "yes", [True], np.array([True])])
def test_an_answer_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setitem(globals(), "answer", given)
    with pytest.raises(BatchError) as refused:
        load_filter(f"{__name__}:canned")(RECORD, group(1.0))
    assert refused.value.field == "rollout.filter" and f"{__name__}:canned" in refused.value.message


@pytest.mark.parametrize(
    "name", ["no_such_module_here:keep", "tests.rollout.test_filters:no_such", f"{__name__}:RECORD"]
)
def test_a_filter_that_cannot_be_called_is_refused_by_its_setting(name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_filter(name)
    assert refused.value.field == "rollout.filter"


def clearing(record: Record, samples: Sequence[ScoredSample]) -> bool:
    record.clear()
    return True


def leaving(record: Record, samples: Sequence[ScoredSample]) -> bool:
    raise GeneratorExit


def test_what_a_filter_does_to_its_record_is_nobody_elses() -> None:
    record = {"prompt": "sort 31"}
    assert load_filter(f"{__name__}:clearing")(record, group(1.0)) and record == RECORD


def test_whatever_a_filter_raises_is_an_error_about_it() -> None:
    with pytest.raises(BatchError) as refused:
        load_filter(f"{__name__}:leaving")(RECORD, group(1.0))
    assert refused.value.field == "rollout.filter"


def test_the_settings_take_the_filters_of_the_table_and_no_other_word() -> None:
    def chosen(name: str) -> str | None:
        return config_from_dict(
            {"model": {"path": "m"}, "optim": {"total_updates": 1}, "rollout": {"filter": name}}
        ).rollout.filter

    for name in FILTERS:
        assert chosen(name) == name and callable(load_filter(name))
    for word in ("mixed_group", "keep", ":keep", "a:b:c"):
        with pytest.raises(ConfigError) as refused:
            chosen(word)
        assert refused.value.field == "rollout.filter"
