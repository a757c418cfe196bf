from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.policy_losses import PolicyOptions, PolicyTokens, Sequences, dpo_loss

OPTIONS = PolicyOptions(beta=0.3)
response_st = st.lists(st.tuples(st.floats(-12, 0), st.floats(-12, 0)), min_size=1, max_size=5)
# pairs of (chosen, rejected), each a list of (log-prob, reference log-prob) of its tokens
pairs_st = st.lists(st.tuples(response_st, response_st), min_size=1, max_size=4)


def pack(pairs, order=slice(None)):
    """The tokens of pairs; the second sample of each odd pair is the chosen one."""
    rows = []
    for pair, (chosen, rejected) in enumerate(pairs):
        for is_rejected, response in enumerate((chosen, rejected)):
            sample = 2 * pair + (is_rejected + pair) % 2
            rows += [(log_prob, ref, -0.7 if is_rejected else 0.7, sample, pair) for log_prob, ref in response]
    log_probs, ref, advantages, samples, groups = (list(column) for column in zip(*rows, strict=True))
    log_probs, ref, advantages = (torch.tensor(x, dtype=torch.float64)[order] for x in (log_probs, ref, advantages))
    samples, groups = (Sequences(torch.tensor(x)[order], 2 * len(pairs)) for x in (samples, groups))
    return PolicyTokens(log_probs.requires_grad_(), log_probs.detach() - 0.1, advantages, samples, groups, ref)


def sequence_mean(tokens):
    """The loss under the reduction sequence_mean."""
    weights = 1.0 / (tokens.sequences.count * tokens.sequences.spread(tokens.sequences.lengths()).double())
    return (weights * dpo_loss(tokens, OPTIONS).loss).sum()


@settings(deadline=None)
@given(pairs_st)
def test_the_mean_over_pairs_is_the_papers_equation_7_with_its_gradient(pairs):
    losses, slopes = [], []
    for chosen, rejected in pairs:
        margin = math.fsum(x - ref for x, ref in chosen) - math.fsum(x - ref for x, ref in rejected)
        sigmoid = 1 / (1 + math.exp(-0.3 * margin))
        losses.append(-math.log(sigmoid))
        slope = -0.3 * (1 - sigmoid) / len(pairs)
        slopes += [slope] * len(chosen) + [-slope] * len(rejected)
    tokens = pack(pairs)
    found = sequence_mean(tokens)
    (gradient,) = torch.autograd.grad(found, tokens.log_probs)
    torch.testing.assert_close(found.item(), math.fsum(losses) / len(pairs), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.tolist(), slopes, rtol=1e-12, atol=1e-12)


PAIRS = [([(-1.0, -2.0)], [(-0.5, -0.5), (-3.0, -1.0)]), ([(-4.0, -1.0), (-0.2, -0.1)], [(-2.0, -2.5)])]


@pytest.mark.parametrize("advantage", [0.0, 1.0])
def test_the_reference_itself_loses_log_2_and_equal_rewards_train_nothing(advantage):
    tokens = pack(PAIRS)
    same = replace(
        tokens, ref_log_probs=tokens.log_probs.detach(), advantages=advantage * torch.sign(tokens.advantages)
    )
    loss = dpo_loss(same, OPTIONS).loss
    torch.testing.assert_close(loss, torch.full_like(loss, math.log(2.0)))
    (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
    tokens_of_pair = 3
    torch.testing.assert_close(gradient, -0.3 / 2 * tokens_of_pair * same.advantages)


def test_margins_of_any_size_give_finite_losses_and_gradients():
    for far in ([([(0.0, -9e3)], [(-9e3, 0.0)])], [([(-9e3, 0.0)], [(0.0, -9e3)])]):
        tokens = pack(far)
        loss = dpo_loss(tokens, OPTIONS).loss
        (gradient,) = torch.autograd.grad(loss.sum(), tokens.log_probs)
        assert loss.isfinite().all() and gradient.isfinite().all()
    assert loss.tolist() == pytest.approx([0.3 * 18e3] * 2) and gradient.tolist() == pytest.approx([-0.6, 0.6])
