from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.loss.kl import KL_ESTIMATORS, KLEstimator, kl_estimate

FORMULAS = {  # of r = reference / policy
    "k1": lambda r: -math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
    "k3": lambda r: (r - 1) - math.log(r),
}
pairs_st = st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0)), min_size=1, max_size=30)
every_estimator = pytest.mark.parametrize("estimator", list(KL_ESTIMATORS))


def policy_and_reference():
    """Logits of two distributions over the same nine tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 9, dtype=torch.float64, generator=generator)


def exact_kl(logits, other_logits):
    log_p, log_q = logits.log_softmax(-1), other_logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def expectation_under_policy(logits, ref_logits, estimator):
    """Mean over sampled tokens, taken exactly: the sampling probabilities carry no gradient, as in training."""
    log_p = logits.log_softmax(-1)
    return (log_p.detach().exp() * kl_estimate(log_p, ref_logits.log_softmax(-1), estimator)).sum()


def test_every_name_a_setting_may_have_is_in_the_table():
    assert set(get_args(KLEstimator)) == set(KL_ESTIMATORS) == set(FORMULAS)


@every_estimator
@settings(deadline=None)
@given(pairs=pairs_st)
def test_estimates_are_schulmans_formulas_token_by_token(estimator, pairs):
    log_probs, ref_log_probs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    expected = [FORMULAS[estimator](math.exp(ref - log_prob)) for log_prob, ref in pairs]
    actual = kl_estimate(log_probs, ref_log_probs, estimator)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@every_estimator
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_log_probs_give_exactly_zero(estimator, dtype):
    log_probs = -torch.rand(1000, dtype=dtype) * 20
    assert (kl_estimate(log_probs, log_probs.clone(), estimator) == 0.0).all()


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@settings(deadline=None)
@given(pairs=pairs_st)
def test_k2_and_k3_are_never_negative(estimator, pairs):
    log_probs, ref_log_probs = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    assert (kl_estimate(log_probs, ref_log_probs, estimator) >= -1e-15).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_exact_kl(estimator):
    logits, ref_logits = policy_and_reference()
    expected = exact_kl(logits, ref_logits)
    assert expected > 0.1
    torch.testing.assert_close(expectation_under_policy(logits, ref_logits, estimator), expected)


def test_gradients_average_to_nothing_for_k1_to_reverse_kl_for_k2_and_to_forward_kl_for_k3():
    logits, ref_logits = policy_and_reference()
    logits.requires_grad_()
    (reverse,) = torch.autograd.grad(exact_kl(logits, ref_logits), logits)
    (forward,) = torch.autograd.grad(exact_kl(ref_logits, logits), logits)
    assert not torch.allclose(reverse, forward, rtol=0.1)
    for estimator, expected in (("k1", torch.zeros_like(reverse)), ("k2", reverse), ("k3", forward)):
        (actual,) = torch.autograd.grad(expectation_under_policy(logits, ref_logits, estimator), logits)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_estimator
def test_gradcheck(estimator):
    ref_log_probs = torch.linspace(-4, -1, 9, dtype=torch.float64)
    log_probs = (ref_log_probs + torch.linspace(-2, 2, 9, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, ref_log_probs, estimator), log_probs)


def test_k3_of_nearly_equal_float32_log_probs_keeps_its_digits():
    ref_log_probs = torch.full((1,), -1.0)
    log_probs = ref_log_probs + torch.tensor([2.0**-13])  # exact in float32
    expected = FORMULAS["k3"](math.exp(-(2.0**-13)))
    assert kl_estimate(log_probs, ref_log_probs, "k3").item() == pytest.approx(expected, rel=2e-3)
