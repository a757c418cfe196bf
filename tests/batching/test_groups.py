"""Bundles of samples that begin alike, and plans that use them."""

import numpy as np
import pytest

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.groups import PrefixGroups, SampleCosts, groups
from slimefsdp.batching.plan import Plan
from slimefsdp.batching.prefix_tree import find_prefixes
from slimefsdp.errors import BatchError
from tests.support.plans import plan_of
from tests.support.refusals import refused

COST = CostModel()


def grouped(num_groups: int, size: int, prompt: int, response: int, *, system: int = 0) -> tuple[np.ndarray, ...]:
    """(tokens, lengths) of groups with a prompt of their own after a system prompt of all."""
    rng = np.random.default_rng(1)
    begin = rng.integers(0, 1000, system)
    samples = []
    for _ in range(num_groups):
        of_group = np.concatenate([begin, rng.integers(0, 1000, prompt)])
        samples += [np.concatenate([of_group, rng.integers(0, 1000, response)]) for _ in range(size)]
    return np.concatenate(samples), np.array([len(sample) for sample in samples])


def packs_of(plan: Plan) -> list[np.ndarray]:
    return [pack for update in plan.updates for packs in update for pack in packs if len(pack)]


@pytest.mark.parametrize("limit", [60, 250, 400, 1000, 3000, 10**6])
@pytest.mark.parametrize("system", [0, 30])
def test_prefix_groups_part_the_samples_and_stay_within_the_limit(limit, system):
    tokens, lengths = grouped(5, 8, 100, 20, system=system)
    costs = SampleCosts(lengths, COST, 1, 10**6, find_prefixes(tokens, lengths))
    items = PrefixGroups(costs, np.arange(0, 40)).within(limit)
    assert np.array_equal(np.sort(items.samples), np.arange(40))
    ends = np.cumsum(items.sizes)
    for size, end, tokens_of_item, cost in zip(items.sizes, ends, items.tokens, items.costs, strict=True):
        members = items.samples[end - size : end]
        assert tokens_of_item == costs.tokens(members) and cost == pytest.approx(costs.work(members))
        assert tokens_of_item <= limit or size == 1


@pytest.mark.parametrize("limit", [60, 250, 400, 1000, 3000, 10**6])
def test_prefix_groups_have_no_more_pairs_than_the_limit_either(limit):
    tokens, lengths = grouped(5, 8, 100, 0, system=30)
    shared, pairs = find_prefixes(tokens, lengths), lengths - 1
    items = PrefixGroups(SampleCosts(lengths, COST, 1, 10**6, shared, pairs), np.arange(40)).within(limit)
    assert np.array_equal(np.sort(items.samples), np.arange(40))
    members = np.split(items.samples, np.cumsum(items.sizes)[:-1])
    assert all(pairs[some].sum() <= limit or len(some) == 1 for some in members)


def test_a_sample_with_many_predictions_a_token_is_parted_evenly_among_packs():
    lengths = np.full(20, 101)
    tokens = np.tile(np.arange(101), 20)
    settings = {"dp": 1, "max_pack_tokens": 1024, "shared": find_prefixes(tokens, lengths)}
    (whole,) = packs_of(plan_of(lengths, **settings))
    assert len(whole) == 20
    plan = plan_of(lengths, **settings, pairs=lengths - 1)
    assert [len(pack) for pack in packs_of(plan)] == [10, 10]
    assert plan.computed_tokens(lengths) == 2 * 101


def test_packs_of_shared_samples_hold_a_cap_that_counts_what_is_shared_once():
    tokens, lengths = grouped(4, 16, 1024, 128)
    shared = find_prefixes(tokens, lengths)
    plan = plan_of(lengths, dp=1, max_pack_tokens=3072, shared=shared)
    assert plan.shared is shared and len(plan.updates[0][0]) == 4
    assert all(shared.tokens(lengths, pack) <= 3072 for pack in packs_of(plan))
    assert plan.computed_tokens(lengths) == 4 * 3072
    whole = plan_of(lengths, dp=1, max_pack_tokens=3072)
    assert whole.computed_tokens(lengths) == lengths.sum() and whole.digest() != plan.digest()


def test_a_group_is_parted_where_ranks_would_otherwise_wait_for_it():
    tokens, lengths = grouped(1, 16, 256, 128)
    shared = find_prefixes(tokens, lengths)
    plan = plan_of(lengths, dp=2, max_pack_tokens=8192, shared=shared)
    assert [len(pack) for (pack,) in plan.updates[0]] == [8, 8]
    assert plan.imbalance(lengths) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("num_groups", "prompt", "size", "response", "dp"),
    [(1, 1024, 16, 128, 8), (4, 1024, 16, 128, 32), (8, 512, 8, 256, 32), (16, 1024, 16, 300, 64)],
)
def test_a_group_over_many_ranks_is_parted_as_well_as_by_any_equal_parts(num_groups, prompt, size, response, dp):
    tokens, lengths = grouped(num_groups, size, prompt, response)
    plan = plan_of(lengths, dp=dp, max_pack_tokens=16384, shared=find_prefixes(tokens, lengths))
    costs = SampleCosts(lengths, COST, 1, 16384, plan.shared)
    busiest = max(sum(map(costs.work, packs)) for packs in plan.updates[0])
    assert plan.shared is not None
    # every group in equal parts of so many samples, no more parts than ranks
    fitting = [part for part in range(1, size + 1) if num_groups * -(-size // part) <= dp]
    assert busiest <= 1.02 * min(costs.work(np.arange(part)) for part in fitting)


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("size", "prompt", "response"), [(16, 1024, 128), (8, 256, 256), (4, 32, 200), (2, 300, 10)])
def test_sharing_is_chosen_only_where_the_busiest_rank_gains(dp, cp, size, prompt, response):
    tokens, lengths = grouped(6, size, prompt, response)
    shared = find_prefixes(tokens, lengths)
    settings = {"dp": dp, "max_pack_tokens": 4096, "cp": cp}
    plan, whole = plan_of(lengths, **settings, shared=shared), plan_of(lengths, **settings)
    assert np.array_equal(plan.samples_of(0), np.arange(len(lengths)))

    def busiest(plan: Plan) -> float:
        costs = SampleCosts(lengths, COST, cp, 4096, plan.shared)
        return max(sum(map(costs.work, packs)) for packs in plan.updates[0])

    assert busiest(plan) <= (0.95 if plan.shared else 1) * busiest(whole)


def test_updates_have_the_same_samples_with_and_without_sharing():
    tokens, lengths = grouped(6, 8, 200, 20)
    settings = {"dp": 2, "max_pack_tokens": 1024, "samples_per_update": 20, "seed": 3, "epochs": 2}
    whole = plan_of(lengths, **settings)
    plan = plan_of(lengths, **settings, shared=find_prefixes(tokens, lengths))
    assert plan.shared is not None and len(plan.updates) == len(whole.updates) == 6
    for update in range(6):
        assert np.array_equal(plan.samples_of(update), whole.samples_of(update))


def test_pairs_stay_together_and_may_share_their_prompt():
    tokens, lengths = grouped(6, 2, 300, 50)
    shared, together = find_prefixes(tokens, lengths), np.repeat(np.arange(6), 2)
    plan = plan_of(lengths, dp=2, max_pack_tokens=400, together=together, shared=shared)
    assert plan.shared is shared  # 700 tokens of a pair fit no pack of 400 unless they share
    assert all(np.array_equal(together[pack], np.repeat(together[pack[0]], 2)) for pack in packs_of(plan))
    with refused(BatchError, "batch.max_tokens_per_rank", "group 0", 700, 400):
        plan_of(lengths, dp=2, max_pack_tokens=400, together=together)
    costs = SampleCosts(lengths, COST, 1, 400, shared)
    assert groups(costs, np.arange(12), together).tokens.tolist() == [400] * 6
