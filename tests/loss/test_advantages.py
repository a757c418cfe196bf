from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.errors import BatchError
from slimefsdp.loss.advantages import group_advantages

GROUP_NAMES = [7, -3, 2**62, 0]


def by_the_formula(rewards, group_ids, normalize_by_std, epsilon):
    result = []
    for reward, group in zip(rewards, group_ids, strict=True):
        peers = [float(r) for r, g in zip(rewards, group_ids, strict=True) if g == group]
        mean = math.fsum(peers) / len(peers)
        advantage = float(reward) - mean
        if normalize_by_std:
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in peers) / (len(peers) - 1))
            advantage /= std + epsilon
        result.append(advantage)
    return np.array(result)


@st.composite
def grouped_rewards(draw):
    """Two to five samples per group, groups interleaved, rewards on a grid so that no spread is lost in rounding."""
    ids = [name for name in GROUP_NAMES for _ in range(draw(st.integers(2, 5)))]
    group_ids = np.array(draw(st.permutations(ids)), dtype=np.int64)
    steps = draw(st.lists(st.integers(-50, 50), min_size=len(ids), max_size=len(ids)))
    return np.array(steps, dtype=np.float32) / 10, group_ids


@settings(deadline=None)
@given(grouped_rewards(), st.booleans(), st.sampled_from([1e-6, 1e-4, 0.5]))
def test_advantages_are_the_papers_formula_group_by_group(batch, normalize_by_std, epsilon):
    rewards, group_ids = batch
    actual = group_advantages(rewards, group_ids, normalize_by_std=normalize_by_std, epsilon=epsilon)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, by_the_formula(rewards, group_ids, normalize_by_std, epsilon), atol=1e-11)


@settings(deadline=None)
@given(grouped_rewards(), st.booleans(), st.integers(-100, 100))
def test_adding_a_constant_to_the_rewards_of_one_group_changes_nothing(batch, normalize_by_std, shift):
    rewards, group_ids = batch
    rewards = rewards.astype(np.float64)
    shifted = np.where(group_ids == GROUP_NAMES[0], rewards + shift, rewards)
    before = group_advantages(rewards, group_ids, normalize_by_std=normalize_by_std, epsilon=1e-3)
    after = group_advantages(shifted, group_ids, normalize_by_std=normalize_by_std, epsilon=1e-3)
    np.testing.assert_allclose(after, before, atol=1e-9)


@settings(deadline=None)
@given(grouped_rewards(), st.floats(0.01, 100))
def test_scaling_the_rewards_scales_them_without_std_and_changes_nothing_with_it(batch, scale):
    rewards, group_ids = batch
    rewards = rewards.astype(np.float64)
    plain, plain_scaled = (group_advantages(r, group_ids, normalize_by_std=False) for r in (rewards, rewards * scale))
    np.testing.assert_allclose(plain_scaled, plain * scale, atol=1e-9)
    unit, unit_scaled = (
        group_advantages(r, group_ids, normalize_by_std=True, epsilon=0.0) for r in (rewards, rewards * scale)
    )
    np.testing.assert_allclose(unit_scaled, unit, atol=1e-9)


@settings(deadline=None)
@given(grouped_rewards(), st.booleans(), st.randoms(use_true_random=False))
def test_reordering_the_batch_reorders_the_advantages(batch, normalize_by_std, random):
    rewards, group_ids = batch
    order = list(range(rewards.size))
    random.shuffle(order)
    before = group_advantages(rewards, group_ids, normalize_by_std=normalize_by_std)
    after = group_advantages(rewards[order], group_ids[order], normalize_by_std=normalize_by_std)
    np.testing.assert_allclose(after, before[order], atol=1e-12)


@settings(deadline=None)
@given(grouped_rewards())
def test_normalised_advantages_of_a_group_sum_to_zero_with_unit_sample_variance(batch):
    rewards, group_ids = batch
    advantages = group_advantages(rewards, group_ids, normalize_by_std=True, epsilon=0.0)
    for name in GROUP_NAMES:
        of_group = advantages[group_ids == name]
        assert abs(of_group.sum()) < 1e-9
        is_flat = np.ptp(rewards[group_ids == name]) == 0
        assert of_group.var(ddof=1) == pytest.approx(0.0 if is_flat else 1.0)


@pytest.mark.parametrize("normalize_by_std", [True, False])
@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7, 1e-30, 3e38])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(reward, size, epsilon, normalize_by_std):
    # another group in between: the zeros must not depend on what stands beside them
    rewards = np.array([reward, 0.9, reward, 0.4] + [reward] * (size - 2))
    group_ids = np.array([5, 1, 5, 1] + [5] * (size - 2))
    advantages = group_advantages(rewards, group_ids, normalize_by_std=normalize_by_std, epsilon=epsilon)
    assert (advantages[group_ids == 5] == 0.0).all()
    assert (advantages[group_ids == 1] != 0.0).all()


def test_a_group_of_one_is_refused_under_std_naming_the_group_and_the_sample():
    rewards, group_ids = np.array([1.0, 0.0, 0.5]), np.array([4, 4, -9])
    with pytest.raises(BatchError, match=r"group -9 .*sample 2") as caught:
        group_advantages(rewards, group_ids, normalize_by_std=True)
    assert caught.value.field == "group_ids" and caught.value.hint
    assert group_advantages(rewards, group_ids, normalize_by_std=False).tolist() == [0.5, -0.5, 0.0]


def test_an_empty_batch_has_no_advantages():
    empty = group_advantages(np.zeros(0, np.float32), np.zeros(0, np.int64), normalize_by_std=True)
    assert empty.shape == (0,)


def test_the_callers_rewards_are_left_alone_and_may_be_read_only():
    rewards, group_ids = np.array([1.0, 2.0]), np.array([0, 0])
    rewards.flags.writeable = group_ids.flags.writeable = False
    group_advantages(rewards, group_ids, normalize_by_std=True)
    assert rewards.tolist() == [1.0, 2.0]
