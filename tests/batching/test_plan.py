"""Plans cover every sample once, respect the cap, and give dp ranks equal counts and nearly equal work."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.groups import SampleCosts
from slimefsdp.batching.plan import Plan, plan_update
from slimefsdp.errors import BatchError
from tests.support.plans import plan_of
from tests.support.refusals import names, refused
from tests.support.tiers import examples

COST = CostModel()


def log_normal_lengths(num_samples: int, seed: int = 0, longest: int = 8192) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(7, 0.8, num_samples).clip(16, longest).astype(np.int64)


def packs_of(update) -> list[np.ndarray]:
    return [pack for micro_batches in update for pack in micro_batches]


def fewest_packs_by_search(lengths: list[int], cap: int) -> int:
    """The true minimum, by trying every way to place each sample."""

    def fits(left: list[int], rooms: tuple[int, ...]) -> bool:
        if not left:
            return True
        options = {(*rooms[:i], room - left[0], *rooms[i + 1 :]) for i, room in enumerate(rooms) if room >= left[0]}
        return any(fits(left[1:], tuple(sorted(rooms))) for rooms in options)

    ordered = sorted(lengths, reverse=True)
    return next(n for n in range(1, len(lengths) + 1) if fits(ordered, (cap,) * n))


@st.composite
def cases(draw):
    """Arguments of plan_of: lengths anywhere up to the cap, so that packs are tight as often as loose."""
    cap = draw(st.integers(1, 60))
    lengths = np.array(draw(st.lists(st.integers(1, cap), min_size=1, max_size=60)), dtype=np.int64)
    trains = draw(st.none() | st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return {
        "lengths": lengths,
        "dp": draw(st.integers(1, 9)),
        "max_pack_tokens": cap,
        "samples_per_update": draw(st.none() | st.integers(1, 70)),
        "epochs": draw(st.integers(1, 3)),
        "seed": draw(st.none() | st.integers(0, 5)),
        "trains": None if trains is None else np.array(trains, dtype=bool),
        "cp": draw(st.sampled_from([1, 1, 2, 4])),
    }


@given(cases())
@examples(300)
def test_every_kept_sample_is_used_once_per_epoch(case):
    plan = plan_of(**case)
    num_samples, epochs = len(case["lengths"]), case["epochs"]
    kept = np.arange(num_samples) if case["trains"] is None else np.flatnonzero(case["trains"])
    first = plan.num_first_epoch_updates
    for updates in (range(first), range(first, len(plan.updates))):
        used = [plan.samples_of(update) for update in updates]
        expected = np.repeat(kept, 1 if updates.start == 0 else epochs - 1)
        assert np.array_equal(np.sort(np.concatenate(used)) if used else np.array([], dtype=np.int64), expected)
    updates_cut = epochs * math.ceil(num_samples / (case["samples_per_update"] or num_samples))
    assert len(plan.updates) + plan.num_skipped_updates == updates_cut
    assert plan.num_dropped == num_samples - len(kept)


@given(cases())
@examples(300)
def test_no_pack_exceeds_the_cap_and_ranks_have_equal_micro_batch_counts(case):
    plan = plan_of(**case)
    for update in plan.updates:
        assert len(update) == case["dp"]
        assert len({len(micro_batches) for micro_batches in update}) == 1
        for pack in packs_of(update):
            assert pack.dtype == np.int64
            assert case["lengths"][pack].sum() <= case["max_pack_tokens"]
            assert (np.diff(pack) > 0).all()


@given(cases())
@examples(200)
def test_a_rank_has_dummies_only_for_want_of_samples_and_always_last(case):
    for update in plan_of(**case).updates:
        for micro_batches in update:
            sizes = [len(pack) for pack in micro_batches]
            num_dummies = sizes.count(0)
            assert num_dummies == 0 or max(sizes) <= 1, sizes
            assert all(size == 0 for size in sizes[len(sizes) - num_dummies :])
        assert any(len(micro_batches[-1]) > 0 for micro_batches in update), "a micro-batch of dummies alone"


@given(cases())
@examples(100)
def test_equal_input_gives_an_equal_digest(case):
    first, second = plan_of(**case), plan_of(**case)
    assert first.digest() == second.digest() == pickle.loads(pickle.dumps(first)).digest()


@st.composite
def grouped_cases(draw):
    """The same with samples that stay together, of any sizes, in any order; the longest group is the cap, or nearly."""
    case = draw(cases())
    size = len(case["lengths"])
    together = np.array(draw(st.lists(st.integers(-2, 25), min_size=size, max_size=size)), dtype=np.int64)
    longest = max(int(case["lengths"][together == number].sum()) for number in together)
    return {**case, "together": together, "max_pack_tokens": longest + draw(st.integers(0, 40))}


@given(grouped_cases())
@examples(150)
def test_samples_that_stay_together_are_in_one_pack_once_an_epoch_and_whole(case):
    lengths, together, epochs = case["lengths"], case["together"], case["epochs"]
    trains = np.ones(len(lengths), dtype=bool) if case["trains"] is None else case["trains"]
    kept = {number: np.flatnonzero(together == number).tolist() for number in together[trains]}
    plan = plan_of(**case)
    first = plan.num_first_epoch_updates
    for updates, times in ((plan.updates[:first], 1), (plan.updates[first:], epochs - 1)):
        packs = [pack for update in updates for pack in packs_of(update) if len(pack)]
        found = [pack[together[pack] == number].tolist() for pack in packs for number in np.unique(together[pack])]
        assert sorted(found) == sorted(list(kept.values()) * times)
        assert all(lengths[pack].sum() <= case["max_pack_tokens"] and (np.diff(pack) > 0).all() for pack in packs)
    assert all(len({len(micro_batches) for micro_batches in update}) == 1 for update in plan.updates)
    assert plan.num_dropped == len(lengths) - sum(map(len, kept.values()))


@given(grouped_cases())
@examples(100)
def test_an_update_holds_as_many_groups_as_samples_per_update_has_room_for(case):
    _, sizes = np.unique(case["together"], return_counts=True)
    per_update = case["samples_per_update"]
    groups = len(sizes) if per_update is None else max(1, per_update // sizes.max())
    plan = plan_of(**case)
    for update in range(len(plan.updates)):
        assert 1 <= len(np.unique(case["together"][plan.samples_of(update)])) <= groups
    assert len(plan.updates) + plan.num_skipped_updates == case["epochs"] * math.ceil(len(sizes) / groups)


def test_a_group_over_the_cap_is_refused_by_name_with_the_way_out():
    shape = {"dp": 2, "max_pack_tokens": 100, "together": np.array([8, 3, 8, 3])}
    with refused(BatchError, "batch.max_tokens_per_rank", "group 3", 130, 100) as caught:
        plan_of(np.array([10, 60, 20, 70]), **shape)
    assert names(caught.value.hint, 130)
    assert plan_of(np.array([10, 60, 20, 70]), **shape, trains=np.array([True, False, True, False])).num_dropped == 2


@given(st.lists(st.integers(1, 12), min_size=1, max_size=8), st.integers(12, 20), st.integers(1, 3))
@examples(150)
def test_micro_batches_are_within_first_fit_decreasings_bound_of_the_true_minimum(lengths, cap, dp):
    update = plan_update(SampleCosts(np.array(lengths), COST, 1, cap), np.arange(len(lengths)), dp=dp)
    fewest = fewest_packs_by_search(lengths, cap)
    most = (11 * fewest + 6) // 9  # Dosa 2007
    assert math.ceil(fewest / dp) <= len(update[0]) <= math.ceil(most / dp)


def test_the_digest_changes_with_anything_in_the_plan():
    def plan(*packs, counts=(0, 0, 1), cap=10) -> Plan:
        arrays = tuple(tuple(np.array(pack, dtype=np.int64) for pack in rank) for rank in packs)
        return Plan((arrays,), *counts, cap)

    plans = [
        plan([[0, 1], [2]], [[3], []]),
        plan([[0, 1], [3]], [[2], []]),  # two samples swapped
        plan([[0], [1, 2]], [[3], []]),  # the same samples in the same order, cut elsewhere
        plan([[0, 1], [2]], [[], [3]]),
        plan([[0, 1]], [[2]], [[3]], [[]]),  # other ranks
        plan([[0, 1], [2], [3], []]),
        plan([[0, 1], [2]], [[3], []], counts=(1, 0, 1)),
        plan([[0, 1], [2]], [[3], []], counts=(0, 1, 1)),
        plan([[0, 1], [2]], [[3], []], counts=(0, 0, 0)),
        plan([[0, 1], [2]], [[3], []], cap=11),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)


@pytest.mark.parametrize(("dp", "num_samples"), [(8, 512), (8, 4096), (64, 8192), (64, 40_000)])
@pytest.mark.parametrize("cap", [8192, 16384, 65536])
@pytest.mark.parametrize("seed", [0, 1])
def test_log_normal_lengths_are_balanced_over_ranks_in_few_packs(dp, num_samples, cap, seed):
    lengths = log_normal_lengths(num_samples, seed)
    plan = plan_of(lengths, dp=dp, max_pack_tokens=cap)
    work = [(lengths[s] + lengths[s] ** 2 / (12 * 2048)).sum() for s in map(np.concatenate, plan.updates[0])]
    assert max(work) / np.mean(work) <= 1.02
    assert plan.imbalance(lengths) == pytest.approx(max(work) / np.mean(work), rel=1e-12)
    fewest = math.ceil(lengths.sum() / cap)
    assert len(plan.updates[0][0]) <= math.ceil(1.02 * fewest / dp)


def test_micro_batches_that_run_at_the_same_time_hold_similar_work():
    lengths = log_normal_lengths(4096)
    (update,) = plan_of(lengths, dp=8, max_pack_tokens=16384).updates
    costs = np.array([[COST.cost(lengths[pack]).sum() for pack in micro_batches] for micro_batches in update])
    assert (np.diff(costs, axis=1) <= 0).all(), "costliest first"
    waited_for = costs.max(axis=0).sum()  # ranks meet in every collective, so each step takes as long as its slowest
    assert waited_for / costs.mean(axis=0).sum() <= 1.02


def test_cost_has_a_quadratic_term_and_decides_who_works_with_whom():
    lengths = np.array([1000, 250, 250, 250, 250, 250, 250])
    by_tokens, by_pairs = (
        plan_of(lengths, dp=2, max_pack_tokens=4000, cost_model=model) for model in (CostModel(1, 0), CostModel(0, 1))
    )
    assert sorted(lengths[rank[0]].sum() for rank in by_tokens.updates[0]) == [1250, 1250]
    assert sorted(len(rank[0]) for rank in by_pairs.updates[0]) == [1, 6]
    assert CostModel(2.0, 0.5).cost(np.array([3, 10])).tolist() == [10.5, 70.0]


def test_under_cp_a_sample_weighs_what_it_makes_its_ranks_send():
    # 100 tokens fit one of the four ranks, 101 do not: they are cut, and sending makes them cost four times as much
    lengths = np.array([101, *[100] * 4])
    shape = {"dp": 2, "max_pack_tokens": 400, "cost_model": CostModel(quadratic=0.0, comm=1.0)}
    whole, cut = (plan_of(lengths, cp=cp, **shape) for cp in (1, 4))
    assert sorted(lengths[np.concatenate(rank)].tolist() for rank in whole.updates[0]) == [[100, 100, 100], [101, 100]]
    assert sorted(lengths[np.concatenate(rank)].tolist() for rank in cut.updates[0]) == [[100] * 4, [101]]
    assert cut.imbalance(lengths, shape["cost_model"], cp=4) == pytest.approx(404 / 402)
    assert whole.imbalance(lengths, shape["cost_model"], cp=4) == pytest.approx(504 / 402)


@pytest.mark.parametrize("cp", [2, 8])
def test_log_normal_lengths_are_balanced_over_ranks_under_cp(cp):
    lengths = log_normal_lengths(2048, longest=8192 * cp)
    plan = plan_of(lengths, dp=8, max_pack_tokens=8192 * cp, cp=cp)
    assert plan.imbalance(lengths, cp=cp) <= 1.02


def test_where_spreading_the_work_does_not_fit_every_rank_still_gets_work_in_every_micro_batch():
    # First-fit decreasing needs seven packs and leaves the eighth empty; spread over eight, the last 8 finds no room.
    lengths = np.array([14, 14, 14, 14, 13, 13, 13, 12, 11, 11, 11, 10, 10, 10, 10, 9, 8])
    (update,) = plan_of(lengths, dp=4, max_pack_tokens=30).updates
    assert len(update[0]) == 2 and min(len(pack) for pack in packs_of(update)) >= 1
    assert max(lengths[pack].sum() for pack in packs_of(update)) <= 30


def test_a_sample_over_the_cap_is_refused_by_name_with_the_way_out():
    lengths = np.array([10, 5000, 20, 7000])
    with refused(BatchError, "batch.max_tokens_per_rank", "sample 3", 7000, 4096) as caught:
        plan_of(lengths, dp=2, max_pack_tokens=4096, samples_per_update=1)
    assert names(caught.value.hint, 7000)
    with refused(BatchError, "batch.max_tokens_per_rank", "sample 1", 5000, 4096):
        plan_update(SampleCosts(lengths, COST, 1, 4096), np.array([0, 1, 2]), dp=2)


def test_updates_are_cut_before_samples_are_dropped():
    trains = np.array([True, False, True, True, True, False])
    plan = plan_of(np.full(6, 5), dp=2, max_pack_tokens=10, samples_per_update=3, trains=trains)
    assert [plan.samples_of(update).tolist() for update in range(2)] == [[0, 2], [3, 4]]
    assert plan.num_dropped == 2


def test_an_update_with_nothing_to_train_is_skipped_and_counted_in_every_epoch():
    trains = np.array([True, True, False, False, True])
    plan = plan_of(np.full(5, 5), dp=2, max_pack_tokens=10, samples_per_update=2, epochs=3, trains=trains)
    assert plan.num_skipped_updates == 3 and plan.num_first_epoch_updates == 2
    assert [plan.samples_of(update).tolist() for update in range(6)] == [[0, 1], [4]] * 3
    nothing = plan_of(np.full(5, 5), dp=2, max_pack_tokens=10, trains=np.zeros(5, dtype=bool))
    assert nothing.updates == () and nothing.num_skipped_updates == 1 and nothing.num_dropped == 5
    assert nothing.imbalance(np.full(5, 5)) == 1.0


def test_what_counts_and_does_not_train_is_in_the_denominators_of_its_update():
    trains, counts = np.array([1, 0, 1, 0, 0, 0], dtype=bool), np.array([1, 1, 1, 1, 0, 1], dtype=bool)
    shape = {"dp": 2, "max_pack_tokens": 10, "samples_per_update": 2, "trains": trains, "counts": counts}
    dropped, kept = (plan_of(np.full(6, 5), **shape, drop=drop) for drop in (True, False))
    for plan, samples in ((dropped, [[0], [2]]), (kept, [[0, 1], [2, 3]])):
        assert [plan.samples_of(update).tolist() for update in range(2)] == samples
        assert [plan.counted_of(update).tolist() for update in range(2)] == [[0, 1], [2, 3]]
        assert plan.num_skipped_updates == 1
    assert (dropped.num_dropped, kept.num_dropped) == (4, 2)
    assert kept.counted is None and len({plan.digest() for plan in (dropped, kept)}) == 2
    assert dropped.digest() != dataclasses.replace(dropped, counted=None).digest()


@given(cases(), st.data())
def test_updates_are_the_same_whether_what_does_not_train_is_dropped_or_not(case, data):
    size = len(case["lengths"])
    counts = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    dropped, kept = (plan_of(**case, counts=counts, drop=drop) for drop in (True, False))
    assert len(dropped.updates) == len(kept.updates) and dropped.num_skipped_updates == kept.num_skipped_updates
    trains = np.ones(size, dtype=bool) if case["trains"] is None else case["trains"]
    first = {s for update in range(kept.num_first_epoch_updates) for s in kept.samples_of(update).tolist()}
    for update in range(len(dropped.updates)):
        counted = dropped.counted_of(update)
        assert np.array_equal(counted, kept.counted_of(update)) and (np.diff(counted) > 0).all()
        assert np.array_equal(dropped.samples_of(update), counted[trains[counted]])
        assert set(dropped.samples_of(update)) <= set(kept.samples_of(update)) <= set(counted) & first


def test_without_a_seed_updates_follow_the_batch_and_with_one_each_epoch_is_shuffled_anew():
    lengths = log_normal_lengths(64)
    shape = {"dp": 2, "max_pack_tokens": 16384, "samples_per_update": 16, "epochs": 2}
    in_order = plan_of(lengths, **shape)
    assert [in_order.samples_of(u).tolist() for u in range(8)] == np.tile(np.arange(64), 2).reshape(8, 16).tolist()
    shuffled, other_seed = plan_of(lengths, seed=3, **shape), plan_of(lengths, seed=4, **shape)
    first_updates = [shuffled.samples_of(0), shuffled.samples_of(4), other_seed.samples_of(0), in_order.samples_of(0)]
    assert len({tuple(samples) for samples in first_updates}) == 4


def test_an_update_does_not_depend_on_the_order_its_samples_come_in():
    lengths, samples = log_normal_lengths(300), np.arange(0, 300, 2)
    costs = SampleCosts(lengths, COST, 1, 8192)
    forwards, backwards = plan_update(costs, samples, dp=4), plan_update(costs, samples[::-1], dp=4)
    assert all(np.array_equal(a, b) for a, b in zip(packs_of(forwards), packs_of(backwards), strict=True))


@pytest.mark.slow
def test_a_million_samples_for_1024_ranks_are_planned():
    lengths = log_normal_lengths(1_000_000, longest=16384)
    plan = plan_of(lengths, dp=1024, max_pack_tokens=16384)  # 6 s on one core; a quadratic step would take hours
    assert plan.imbalance(lengths) <= 1.03
    assert np.array_equal(plan.samples_of(0), np.arange(1_000_000))
    assert max(lengths[pack].sum() for pack in packs_of(plan.updates[0])) <= 16384
