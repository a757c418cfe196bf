from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.reduction import REDUCTIONS, token_weights, update_denominator
from slimefsdp.errors import BatchError
from tests.support.refusals import refused

every_reduction = pytest.mark.parametrize("reduction", list(REDUCTIONS))
CONSTANT_LENGTH = 17


def length_for(reduction):
    return CONSTANT_LENGTH if reduction == "constant" else None


def groups_for(reduction, num_samples):
    """Interleaved groups of a few samples; None where no reduction reads them."""
    return np.arange(num_samples) * 2 % 3 - 1 if reduction == "prompt_mean" else None


def loss_by_the_formula(losses, mask, sample_of_token, num_samples, reduction):
    """The loss as the papers write it: a mean over tokens, over samples of a mean or a scaled sum, or over prompts."""
    of_sample = [
        [
            float(loss)
            for loss, is_trained, owner in zip(losses, mask, sample_of_token, strict=True)
            if is_trained and owner == sample
        ]
        for sample in range(num_samples)
    ]
    trained = [tokens for tokens in of_sample if tokens]
    if reduction == "token_mean":
        flat = [loss for tokens in trained for loss in tokens]
        return sum(flat) / len(flat)
    if reduction == "sequence_mean":
        return sum(sum(tokens) / len(tokens) for tokens in trained) / len(trained)
    if reduction == "prompt_mean":
        of_prompt = {}
        for tokens, group in zip(of_sample, groups_for(reduction, num_samples).tolist(), strict=True):
            of_prompt.setdefault(group, []).extend(tokens)
        prompts = [tokens for tokens in of_prompt.values() if tokens]
        return sum(sum(tokens) / len(tokens) for tokens in prompts) / len(prompts)
    return sum(sum(tokens) / CONSTANT_LENGTH for tokens in trained) / len(trained)


def weights_of(mask, sample_of_token, num_samples, reduction, **given):
    given = {"group_ids": groups_for(reduction, num_samples), "constant_length": length_for(reduction)} | given
    return token_weights(mask, sample_of_token, num_samples, reduction, **given)


@st.composite
def updates(draw):
    """(losses, mask, sample_of_token, num_samples): ragged samples, some all masked, tokens in any order."""
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=8))
    mask = np.array([bit for of_sample in masks for bit in of_sample])
    sample_of_token = np.repeat(np.arange(len(masks)), [len(of_sample) for of_sample in masks])
    order = np.array(draw(st.permutations(range(mask.size))))
    losses = np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=mask.size)
    return losses, mask[order], sample_of_token[order], len(masks)


@every_reduction
@settings(deadline=None)
@given(update=updates())
def test_the_weighted_sum_is_the_papers_loss(reduction, update):
    losses, mask, sample_of_token, num_samples = update
    assume(mask.any())
    weights = weights_of(mask, sample_of_token, num_samples, reduction)
    assert weights.dtype == np.float64
    assert weights @ losses == pytest.approx(loss_by_the_formula(*update, reduction), rel=1e-12, abs=1e-13)


@every_reduction
@settings(deadline=None)
@given(update=updates())
def test_masked_out_tokens_weigh_exactly_nothing_and_the_others_something(reduction, update):
    _, mask, sample_of_token, num_samples = update
    weights = weights_of(mask, sample_of_token, num_samples, reduction)
    assert ((weights > 0) == mask).all() and (weights[~mask] == 0.0).all()


@every_reduction
@settings(deadline=None)
@given(update=updates(), data=st.data())
def test_parts_given_the_wholes_denominator_have_the_wholes_weights(reduction, update, data):
    _, mask, sample_of_token, num_samples = update
    assume(mask.any())
    groups = groups_for(reduction, num_samples)
    whole = weights_of(mask, sample_of_token, num_samples, reduction)
    denominator = update_denominator(mask, sample_of_token, num_samples, reduction, group_ids=groups)
    part_of_sample = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_samples, max_size=num_samples)))
    if groups is not None:  # a prompt stays in one call
        part_of_sample = part_of_sample[[groups.tolist().index(group) for group in groups]]
    parts_denominator = 0.0
    for part in range(3):
        samples = np.flatnonzero(part_of_sample == part)
        here = np.isin(sample_of_token, samples)
        local_sample = np.searchsorted(samples, sample_of_token[here])  # each call numbers its own samples from 0
        arguments = mask[here], local_sample, samples.size, reduction
        local_groups = None if groups is None else groups[samples]
        weights = weights_of(*arguments, group_ids=local_groups, denominator=denominator)
        assert (weights == whole[here]).all()
        parts_denominator += update_denominator(*arguments, group_ids=local_groups)
    assert parts_denominator == denominator


@every_reduction
@pytest.mark.parametrize("denominator", [None, 0.0, 3.0])
def test_an_update_with_nothing_to_train_on_weighs_nothing(reduction, denominator):
    mask, sample_of_token = np.zeros(3, bool), np.array([0, 1, 1])
    for size in (3, 0):
        tokens = mask[:size], sample_of_token[:size], 2, reduction
        weights = weights_of(*tokens, denominator=denominator)
        assert weights.shape == (size,) and (weights == 0.0).all()
        assert update_denominator(*tokens, group_ids=groups_for(reduction, 2)) == 0.0


@pytest.mark.parametrize("denominator", [0.0, -2.0, float("nan"), float("inf")])
def test_a_denominator_that_cannot_divide_is_refused(denominator):
    with refused(BatchError, "denominator", denominator):
        token_weights(np.ones(3, bool), np.zeros(3, np.int64), 1, "token_mean", denominator=denominator)
