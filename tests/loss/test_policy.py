from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.loss.policy import clipped_policy_loss, cross_entropy_loss

LOW, HIGH = 0.2, 0.28
log_probs_st = st.floats(-12, 0)
tokens_st = st.lists(st.tuples(log_probs_st, log_probs_st, st.floats(-3, 3)), min_size=1, max_size=30)


def columns(tokens):
    return torch.tensor(tokens, dtype=torch.float64).unbind(1)


def by_the_formula(log_prob, old_log_prob, advantage):
    """(loss, d loss / d log_prob) of one token: minus the smaller of the two surrogates of PPO's equation 7."""
    ratio = math.exp(log_prob - old_log_prob)
    bounded = min(max(ratio, 1 - LOW), 1 + HIGH)
    if bounded * advantage < ratio * advantage:
        return -bounded * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


@settings(deadline=None)
@given(tokens_st)
def test_loss_and_gradient_are_the_papers_formula_token_by_token(tokens):
    log_probs, old, advantages = columns(tokens)
    log_probs.requires_grad_()
    loss = clipped_policy_loss(log_probs, old, advantages, LOW, HIGH).loss
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    expected = torch.tensor([by_the_formula(*token) for token in tokens], dtype=torch.float64)
    torch.testing.assert_close(loss.detach(), expected[:, 0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected[:, 1], rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(tokens_st)
def test_the_flags_say_exactly_where_the_bound_made_the_loss_pessimistic(tokens):
    log_probs, old, advantages = columns(tokens)
    loss, ratio, clipped_low, clipped_high = clipped_policy_loss(log_probs, old, advantages, LOW, HIGH)
    assert torch.equal(ratio, torch.exp(log_probs - old))
    assert torch.equal(clipped_low | clipped_high, loss > -ratio * advantages)
    assert torch.equal(clipped_low, (ratio < 1 - LOW) & (advantages < 0))
    assert torch.equal(clipped_high, (ratio > 1 + HIGH) & (advantages > 0))


def test_gradcheck_on_open_and_clipped_tokens_of_either_sign():
    log_ratio = torch.tensor([-1.0, -0.1, 0.0, 0.1, 1.0], dtype=torch.float64).repeat(2)  # away from the two kinks
    advantages = torch.tensor([1.5] * 5 + [-0.5] * 5, dtype=torch.float64)
    old = torch.linspace(-4, -1, 10, dtype=torch.float64)
    log_probs = (old + log_ratio).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: clipped_policy_loss(x, old, advantages, LOW, HIGH).loss, log_probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_log_probs_give_ratio_exactly_one_and_loss_minus_the_advantage(dtype):
    old = -torch.rand(1000, dtype=dtype) * 20
    log_probs = old.clone().requires_grad_()
    advantages = torch.randn(1000, dtype=dtype)
    for clip_low, clip_high in [(LOW, HIGH), (0.0, 0.0)]:
        loss, ratio, clipped_low, clipped_high = clipped_policy_loss(log_probs, old, advantages, clip_low, clip_high)
        (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
        assert loss.dtype == dtype
        assert torch.equal(ratio, torch.ones_like(ratio))
        assert torch.equal(loss, -advantages) and torch.equal(gradient, -advantages)
        assert not (clipped_low | clipped_high).any()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_open"),
    [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, 1.0, True), (-1.0, -1.0, False)],
)
def test_the_clip_stops_the_gradient_only_on_the_side_the_advantage_pushes_to(log_ratio, advantage, is_open):
    log_probs = torch.tensor([log_ratio - 2.0], requires_grad=True)
    result = clipped_policy_loss(log_probs, torch.tensor([-2.0]), torch.tensor([advantage]), LOW, HIGH)
    result.loss.sum().backward()
    assert (log_probs.grad.item() != 0.0) == is_open
    assert result.clipped_high.item() == (not is_open and advantage > 0)
    assert result.clipped_low.item() == (not is_open and advantage < 0)


def test_the_two_bounds_are_separate():
    old, up, down = torch.zeros(1), torch.tensor([math.log(1.25)]), torch.tensor([math.log(0.75)])
    positive, negative = torch.ones(1), -torch.ones(1)
    assert clipped_policy_loss(up, old, positive, 0.3, 0.2).clipped_high.item()
    assert not clipped_policy_loss(up, old, positive, 0.2, 0.3).clipped_high.item()
    assert clipped_policy_loss(down, old, negative, 0.2, 0.3).clipped_low.item()
    assert not clipped_policy_loss(down, old, negative, 0.3, 0.2).clipped_low.item()


def test_a_clipped_token_stays_finite_where_its_ratio_overflows():
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    result = clipped_policy_loss(log_probs, torch.tensor([-200.0, -1.0]), torch.tensor([2.0, 2.0]), LOW, HIGH)
    result.loss.sum().backward()
    assert result.ratio[0] == torch.inf and result.loss[0].item() == pytest.approx(-2 * (1 + HIGH))
    assert log_probs.grad.tolist() == [0.0, -2.0]


def test_only_the_loss_carries_a_graph():
    log_probs = torch.zeros(3, requires_grad=True)
    loss, *rest = clipped_policy_loss(log_probs, torch.zeros(3), torch.ones(3), LOW, HIGH)
    assert loss.requires_grad and not any(tensor.requires_grad for tensor in rest)


def test_cross_entropy_of_log_softmax_is_torchs_cross_entropy():
    logits = torch.randn(6, 11, dtype=torch.float64)
    targets = torch.randint(11, (6,))
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(cross_entropy_loss(log_probs), expected)
