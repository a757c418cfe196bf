"""scripts/compare_commits.py: what counts as a difference, and what its jobs cover."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.compare_commits import compare, compare_jobs
from slimefsdp.algorithms import registry
from slimefsdp.config import config_from_dict
from slimefsdp.config.earlier import with_present_names

ROOT = Path(__file__).parents[1]
JOBS = {job.name: job for job in compare_jobs.jobs()}
LOSS = {"1 train: metric loss": (0.1).hex(), "end: weight a": "00 float32 [2]"}
ONE_BIT_MORE = {**LOSS, "1 train: metric loss": (0.1 + 2**-56).hex()}


# ---------------------------------------------------------------------- what counts as a difference


def test_equal_records_differ_in_nothing_and_one_bit_is_a_difference() -> None:
    assert compare({"j": LOSS}, {"j": dict(LOSS)}) == []
    (found,) = compare({"j": LOSS}, {"j": ONE_BIT_MORE})
    assert (found.job, found.what) == ("j", "1 train: metric loss")
    assert (found.old, found.new) == (LOSS[found.what], ONE_BIT_MORE[found.what])
    assert found.size == pytest.approx(2**-56 / 0.1) and not found.is_expected


def test_what_one_commit_alone_has_is_a_difference() -> None:
    (value,) = compare({"j": LOSS}, {"j": {"end: weight a": LOSS["end: weight a"]}})
    assert value.what == "1 train: metric loss" and value.new is None
    assert {found.old for found in compare({}, {"j": LOSS})} == {None}


def test_numbers_within_the_tolerance_are_equal_and_digests_are_not_numbers() -> None:
    assert compare({"j": LOSS}, {"j": ONE_BIT_MORE}, tolerance=1e-12) == []
    assert compare({"j": LOSS}, {"j": ONE_BIT_MORE}, tolerance=1e-18)
    other = {**LOSS, "end: weight a": "01 float32 [2]"}
    assert compare({"j": LOSS}, {"j": other}, tolerance=0.5), "how far they are apart is not known"
    sizes = {("j", "end: weight a"): 1e-13}
    assert compare({"j": LOSS}, {"j": other}, tolerance=1e-12, sizes=sizes) == []
    assert compare({"j": LOSS}, {"j": other}, tolerance=1e-14, sizes=sizes)[0].size == 1e-13


def test_expected_differences_are_marked() -> None:
    found = compare({"j": LOSS, "k": LOSS}, {"j": ONE_BIT_MORE, "k": ONE_BIT_MORE}, expected=["k: *metric*"])
    assert [(one.job, one.is_expected) for one in found] == [("j", False), ("k", True)]


def test_a_run_with_a_killed_rank_must_equal_the_other_commits_undisturbed_one() -> None:
    old = {"calm": LOSS, "killed": LOSS}
    new = {"calm": LOSS, "killed": ONE_BIT_MORE}
    found = compare(old, new, equals={"killed": "calm"})
    assert [one.job for one in found] == ["killed", "calm | killed"]


# ---------------------------------------------------------------------- the jobs


def test_the_names_that_jobs_take_from_a_commit_are_where_they_look() -> None:
    for name in compare_jobs.NAMES:
        assert callable(compare_jobs.taken(name)), name


def test_there_is_a_job_for_every_name_that_an_algorithm_can_be_made_of() -> None:
    assert {f"policy/{name}" for name in registry.POLICY_LOSSES} <= JOBS.keys()
    assert {f"estimator/{name}" for name in registry.ESTIMATORS} <= JOBS.keys()
    assert {f"correction/{name}" for name in registry.CORRECTIONS} <= JOBS.keys()
    assert {f"reduction/{name}" for name in registry.REDUCTIONS} <= JOBS.keys()
    assert {f"kl/{name} in loss" for name in registry.KL_ESTIMATORS} <= JOBS.keys()


def test_every_job_but_those_drawn_at_random_has_settings_that_are_accepted() -> None:
    for job in JOBS.values():
        if not job.name.startswith("mixed/"):
            config = config_from_dict(
                with_present_names(compare_jobs.merged(job.settings, {"model": {"path": "model"}}))
            )
            assert config.ranks == job.ranks, job.name
    assert 60 <= sum(job.is_quick for job in JOBS.values()) <= 120 < len(JOBS)
