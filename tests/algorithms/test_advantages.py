from __future__ import annotations

import math
from dataclasses import fields, replace
from itertools import combinations
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest

from slimefsdp.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    whitened,
    zero_variance_share,
)
from slimefsdp.errors import BatchError
from tests.support.refusals import refused
from tests.support.reward_batches import OPTIONS, batch_for, computed, every_estimator, several_batches


# Each formula as its paper writes it. For a sample: its reward r, the rewards of its group with the trained tokens of
# each, and its place i in the group. For token t: rewards r and values v of its sample's trained tokens, the baseline.
def of_pass_at_k(rewards, i, right, k, epsilon):
    subsets = list(combinations(range(len(rewards)), k))
    passed = {subset: float(any(rewards[j] == right for j in subset)) for subset in subsets}
    spread = pstdev(passed.values())
    better = fmean(passed[subset] for subset in subsets if i in subset) - fmean(passed.values())
    return better / (spread + epsilon) if spread > 0 else 0.0


OF_SAMPLE = {
    "grpo": lambda r, group, lengths, i: (r - fmean(group)) / (stdev(group) + OPTIONS.epsilon),
    "dr_grpo": lambda r, group, lengths, i: r - fmean(group),
    "rloo": lambda r, group, lengths, i: r - fmean(group[:i] + group[i + 1 :]),
    "reinforce_pp_baseline": lambda r, group, lengths, i: r - fmean(group),
    "opo": lambda r, group, lengths, i: (
        r - sum(n * other for n, other in zip(lengths, group, strict=True)) / max(sum(lengths), 1)
    ),
    "maxrl": lambda r, group, lengths, i: (r - fmean(group)) / fmean(group) if any(group) else 0.0,
    "pass_at_k": lambda r, group, lengths, i: of_pass_at_k(group, i, 2.0, OPTIONS.pass_k, OPTIONS.epsilon),
    "raw": lambda r, group, lengths, i: r,
}


def to_go(r, t, discount):
    return math.fsum(discount**later * r[t + later] for later in range(len(r) - t))


def td_residuals(r, v):
    return [r[t] + OPTIONS.gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(r))]


OF_TOKEN = {
    "reinforce_pp": lambda r, v, baseline, t: to_go(r, t, OPTIONS.gamma),
    "remax": lambda r, v, baseline, t: sum(r[t:]) - baseline,
    "gae": lambda r, v, baseline, t: to_go(td_residuals(r, v), t, OPTIONS.gamma * OPTIONS.gae_lambda),
}


def by_the_formula(name, inputs):
    result = np.zeros(inputs.mask.size)
    tokens_of = [np.flatnonzero(inputs.mask & (inputs.sample_ids == i)) for i in range(inputs.scores.size)]
    for sample, tokens in enumerate(tokens_of):
        if name in OF_TOKEN:
            r, v = inputs.token_rewards[tokens].tolist(), inputs.values[tokens].tolist()
            baseline = float(inputs.baseline_rewards[sample])
            result[tokens] = [OF_TOKEN[name](r, v, baseline, t) for t in range(len(tokens))]
        else:
            peers = np.flatnonzero(inputs.group_ids == inputs.group_ids[sample]).tolist()
            group, lengths = inputs.scores[peers].tolist(), [len(tokens_of[peer]) for peer in peers]
            result[tokens] = OF_SAMPLE[name](float(inputs.scores[sample]), group, lengths, peers.index(sample))
    return result


@every_estimator
@several_batches
def test_advantages_are_the_papers_formula(name, seed):
    inputs = batch_for(name, seed)
    actual = computed(name, inputs)
    assert actual.dtype == np.float64 and actual.any()
    np.testing.assert_allclose(actual, by_the_formula(name, inputs), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("num_right", range(7))
def test_pass_at_k_enumerates_the_subsets_of_a_group(k, num_right):
    scores, tokens = np.array([1.0] * num_right + [0.0] * (6 - num_right)), np.arange(6)
    inputs = AdvantageInputs(scores, scores, np.ones(6, bool), tokens, np.zeros(6, np.int64))
    actual = computed("pass_at_k", inputs, AdvantageOptions(pass_k=k))
    expected = [of_pass_at_k(scores.tolist(), i, 1.0, k, 1e-6) for i in range(6)]
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=0)


@every_estimator
def test_an_estimator_reads_no_other_field_than_it_names(name):
    inputs = batch_for(name, seed=0)
    given = [field.name for field in fields(inputs) if field.name in ESTIMATORS[name].reads]
    optional = {field: None for field in ("group_ids", "baseline_rewards", "values") if field not in given}
    assert (computed(name, replace(inputs, **optional)) == computed(name, inputs)).all()
    for field in given:
        with pytest.raises(AssertionError):
            computed(name, replace(inputs, **{field: None}))


@every_estimator
@several_batches
@pytest.mark.parametrize("whiten", [False, True])
def test_masked_tokens_have_exactly_zero_and_nothing_is_read_there(name, seed, whiten):
    inputs = batch_for(name, seed)
    actual = computed(name, inputs, whiten=whiten)
    assert (actual[~inputs.mask] == 0.0).all() and actual[inputs.mask].any()
    dirty = replace(inputs, values=np.where(inputs.mask, inputs.values, np.nan))
    assert (computed(name, dirty, whiten=whiten) == actual).all()


@every_estimator
@several_batches
def test_whitened_advantages_have_mean_0_and_standard_deviation_1_over_trained_tokens(name, seed):
    inputs = batch_for(name, seed)
    raw, found = computed(name, inputs), computed(name, inputs, whiten=True)
    of_tokens = raw[inputs.mask].tolist()
    expected = [(value - fmean(of_tokens)) / (pstdev(of_tokens) + 1e-8) for value in of_tokens]
    np.testing.assert_allclose(found[inputs.mask], expected, rtol=1e-12, atol=1e-13)
    plain = whitened(raw, inputs.mask, epsilon=0.0)
    assert abs(plain[inputs.mask].mean()) < 1e-13 and plain[inputs.mask].std() == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(whitened(50 * raw - 3, inputs.mask, epsilon=0.0), plain, rtol=1e-11, atol=1e-12)


def test_reinforce_pp_and_gae_are_whitened_and_the_others_are_not():
    assert {name for name, estimator in ESTIMATORS.items() if estimator.whitens} == {
        "gae",
        "reinforce_pp",
        "reinforce_pp_baseline",
    }


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce_pp_baseline", "maxrl", "pass_at_k"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e-30, 3e38, 0.0])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_rewards_of_a_group_give_exactly_zero(name, reward, size):
    # the samples of another group lie in between: the zeros must not depend on them
    other = reward + 1 if reward < 1 else 0.0
    scores = np.array([reward, other, reward, reward, *[reward] * (size - 2)])
    group_ids, tokens = np.array([5, 1, 5, 1, *[5] * (size - 2)]), np.repeat(np.arange(size + 2), range(1, size + 3))
    inputs = AdvantageInputs(scores, np.zeros(tokens.size), np.ones(tokens.size, bool), tokens, group_ids)
    for epsilon in (1e-6, 0.0):
        actual = computed(name, inputs, AdvantageOptions(epsilon=epsilon))
        assert (actual[group_ids[tokens] == 5] == 0.0).all()
        assert (actual[group_ids[tokens] == 1] != 0.0).any()


def outcome_batch(scores, group_ids):
    tokens = np.arange(len(scores))
    scores = np.array(scores, dtype=np.float64)
    return AdvantageInputs(scores, scores, np.ones(len(scores), bool), tokens, np.array(group_ids))


@pytest.mark.parametrize(("name", "pass_k"), [("grpo", 1), ("rloo", 1), ("pass_at_k", 2)])
def test_a_group_that_is_too_small_is_refused_naming_the_group_and_the_sample(name, pass_k):
    with refused(BatchError, "group_ids", "group -9", "sample 2", 1, 2):
        computed(name, outcome_batch([1.0, 0.0, 1.0], [4, 4, -9]), AdvantageOptions(pass_k=pass_k))


@pytest.mark.parametrize(
    ("name", "scores", "value"),
    [
        ("pass_at_k", [1.0, 0.0, 0.25, 0.5], 0.25),
        ("maxrl", [1.0, 0.0, -0.25, -0.5], -0.25),
    ],
)
def test_rewards_that_an_estimator_cannot_use_are_refused(name, scores, value):
    with refused(BatchError, "rewards", name, "sample 2", value):
        computed(name, outcome_batch(scores, [0, 0, 1, 1]))


@several_batches
def test_the_share_of_groups_without_variance_is_counted(seed):
    rng = np.random.default_rng(seed)
    group_ids, scores = rng.integers(0, 6, size=14), rng.integers(0, 2, size=14) / 3
    groups = [scores[group_ids == name] for name in set(group_ids.tolist()) if (group_ids == name).sum() > 1]
    expected = sum(len(set(group.tolist())) == 1 for group in groups) / len(groups)
    assert zero_variance_share(scores, group_ids) == expected
