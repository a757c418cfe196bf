from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slimefsdp.algorithms.advantages import AdvantageInputs, AdvantageOptions
from tests.support.reward_batches import (
    GROUP_NAMES,
    GROUPED,
    OPTIONS,
    batch_for,
    computed,
    every_estimator,
    grouped_estimators,
    several_batches,
)


@every_estimator
@several_batches
@pytest.mark.parametrize("whiten", [False, True])
def test_more_masked_tokens_anywhere_change_no_advantage(name, seed, whiten):
    inputs = batch_for(name, seed)
    at = np.sort(np.random.default_rng(seed).integers(0, inputs.mask.size, size=30))
    padded = replace(
        inputs,
        token_rewards=np.insert(inputs.token_rewards, at, 0.0),
        mask=np.insert(inputs.mask, at, False),
        sample_ids=np.insert(inputs.sample_ids, at, inputs.sample_ids[at]),
        values=np.insert(inputs.values, at, 9.0),
    )
    actual = computed(name, padded, whiten=whiten)
    assert (actual[padded.mask] == computed(name, inputs, whiten=whiten)[inputs.mask]).all()


@every_estimator
@several_batches
def test_reordering_the_samples_reorders_the_advantages(name, seed):
    inputs = batch_for(name, seed)
    order = np.random.default_rng(seed).permutation(inputs.scores.size)
    tokens = np.concatenate([np.flatnonzero(inputs.sample_ids == sample) for sample in order])
    renamed = np.argsort(order)[inputs.sample_ids[tokens]]
    reordered = AdvantageInputs(
        inputs.scores[order], inputs.token_rewards[tokens], inputs.mask[tokens], renamed,
        inputs.group_ids[order], inputs.baseline_rewards[order], inputs.values[tokens],
    )  # fmt: skip
    np.testing.assert_allclose(computed(name, reordered), computed(name, inputs)[tokens], rtol=1e-12, atol=1e-14)


@grouped_estimators
@several_batches
def test_a_group_does_not_see_the_others(name, seed):
    inputs = batch_for(name, seed)
    here = inputs.group_ids == GROUP_NAMES[0]
    swapped = np.where(here, inputs.scores, inputs.scores[::-1])  # still right and wrong, or nothing negative
    tokens = here[inputs.sample_ids]
    assert (swapped != inputs.scores).any()
    before, after = computed(name, inputs), computed(name, replace(inputs, scores=swapped))
    assert (before[tokens] == after[tokens]).all()


@pytest.mark.parametrize("name", [name for name in GROUPED if name not in ("maxrl", "pass_at_k")])
@several_batches
def test_adding_a_constant_to_the_rewards_of_one_group_changes_nothing(name, seed):
    inputs = batch_for(name, seed)
    shifted = np.where(inputs.group_ids == GROUP_NAMES[0], inputs.scores + 23.0, inputs.scores)
    np.testing.assert_allclose(
        computed(name, replace(inputs, scores=shifted)), computed(name, inputs), rtol=1e-12, atol=1e-13
    )


@several_batches
def test_adding_a_constant_to_all_that_is_compared_changes_nothing(seed):
    inputs = batch_for("pass_at_k", seed)
    assert (computed("pass_at_k", replace(inputs, scores=3 * inputs.scores + 5)) == computed("pass_at_k", inputs)).all()

    inputs = batch_for("remax", seed)
    last = np.append(np.diff(np.where(inputs.mask, inputs.sample_ids, -1)[inputs.mask]) > 0, True)
    raised = inputs.token_rewards.copy()
    raised[np.flatnonzero(inputs.mask)[last]] += 4.0
    np.testing.assert_allclose(
        computed("remax", replace(inputs, token_rewards=raised, baseline_rewards=inputs.baseline_rewards + 4.0)),
        computed("remax", inputs), rtol=1e-12, atol=1e-13,
    )  # fmt: skip
    before, after = (
        computed("reinforce_pp", replace(inputs, token_rewards=r), AdvantageOptions(), whiten=True)
        for r in (inputs.token_rewards, raised)
    )
    np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-12)


@every_estimator
@several_batches
@pytest.mark.parametrize("scale", [1e-3, 50.0])
def test_scaling_all_rewards_scales_advantages_or_changes_nothing(name, seed, scale):
    inputs, options = batch_for(name, seed), replace(OPTIONS, epsilon=0.0)
    scaled = replace(
        inputs,
        **{
            field: getattr(inputs, field) * scale for field in ("scores", "token_rewards", "baseline_rewards", "values")
        },
    )
    is_free = name in ("grpo", "maxrl", "pass_at_k")
    before, after = computed(name, inputs, options), computed(name, scaled, options)
    np.testing.assert_allclose(after, before if is_free else before * scale, rtol=1e-11, atol=1e-13 * scale)


@several_batches
def test_maxrl_is_blind_to_the_scale_of_each_group(seed):
    inputs = batch_for("maxrl", seed)
    scale = np.where(inputs.group_ids == GROUP_NAMES[0], 40.0, 0.25)
    scaled = replace(inputs, scores=inputs.scores * scale)
    np.testing.assert_allclose(computed("maxrl", scaled), computed("maxrl", inputs), rtol=1e-12, atol=1e-14)


@several_batches
def test_the_baseline_of_rloo_does_not_depend_on_the_samples_own_reward(seed):
    inputs, sample = batch_for("rloo", seed), 0
    raised = inputs.scores.copy()
    raised[sample] += 8.0
    token = inputs.mask & (inputs.sample_ids == sample)
    assert token.any()
    before, after = (computed("rloo", replace(inputs, scores=scores)) for scores in (inputs.scores, raised))
    np.testing.assert_allclose(after[token] - before[token], 8.0, rtol=1e-12)


@several_batches
def test_normalised_advantages_of_a_group_sum_to_zero_with_unit_sample_variance(seed):
    inputs = batch_for("grpo", seed)
    first = np.append(True, np.diff(inputs.sample_ids) > 0)
    found = computed("grpo", replace(inputs, mask=np.ones_like(inputs.mask)), AdvantageOptions(epsilon=0.0))[first]
    for name in GROUP_NAMES:
        of_group = found[inputs.group_ids == name]
        assert abs(of_group.sum()) < 1e-12 and of_group.var(ddof=1) == pytest.approx(1.0, rel=1e-12)


@grouped_estimators
@pytest.mark.parametrize("epsilon", [1e-6, 0.0])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, 3e38, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7, 10])
def test_equal_rewards_give_exactly_zero(name, reward, size, epsilon):
    # another group in between: the zeros must not depend on what stands beside them
    other = reward + 1 if reward < 1 else 0.0
    scores = np.array([reward, other, reward, reward] + [reward] * (size - 2))
    group_ids, tokens = np.array([5, 1, 5, 1] + [5] * (size - 2)), np.repeat(np.arange(size + 2), range(1, size + 3))
    inputs = AdvantageInputs(scores, np.zeros(tokens.size), np.ones(tokens.size, bool), tokens, group_ids)
    found = computed(name, inputs, AdvantageOptions(epsilon=epsilon))
    assert (found[group_ids[tokens] == 5] == 0.0).all()
    assert (found[group_ids[tokens] == 1] != 0.0).any()
