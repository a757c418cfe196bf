from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slimefsdp.algorithms.policy_losses import HORIZON, KL_ESTIMATORS, kl_estimate, next_coefficient

FORMULAS = {  # of r = reference / policy
    "k1": lambda r: -math.log(r),
    "k2": lambda r: math.log(r) ** 2 / 2,
    "k3": lambda r: (r - 1) - math.log(r),
    "abs": lambda r: abs(math.log(r)),
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


def expectation_under_old_policy(logits, ref_logits, estimator, old_logits, *, weighted):
    """The same over tokens that another policy sampled, each token of the vocabulary once."""
    old_log_p = old_logits.log_softmax(-1)
    ratio_from = old_log_p if weighted else None
    return (
        old_log_p.exp() * kl_estimate(logits.log_softmax(-1), ref_logits.log_softmax(-1), estimator, ratio_from)
    ).sum()


def gradient(value, logits):
    return torch.autograd.grad(value, logits)[0]


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


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_by_the_ratio_k1_and_k3_average_to_the_kl_and_its_gradient_over_tokens_of_any_policy(estimator):
    logits, ref_logits = policy_and_reference()
    logits.requires_grad_()
    exact = exact_kl(logits, ref_logits)
    expected = gradient(exact, logits)
    assert expected.abs().max() > 0.05
    for old_logits in (logits.detach(), logits.detach() + torch.linspace(-2, 2, 9, dtype=torch.float64).sin()):
        weighted = expectation_under_old_policy(logits, ref_logits, estimator, old_logits, weighted=True)
        assert weighted.item() == pytest.approx(exact.item(), abs=1e-12)
        torch.testing.assert_close(gradient(weighted, logits), expected, rtol=0, atol=1e-12)
        plain = expectation_under_old_policy(logits, ref_logits, estimator, old_logits, weighted=False)
        assert (gradient(plain, logits) - expected).abs().max() > 0.01  # what the weight is for


def test_k3_of_nearly_equal_float32_log_probs_keeps_its_digits():
    ref_log_probs = torch.full((1,), -1.0)
    log_probs = ref_log_probs + torch.tensor([2.0**-13])  # exact in float32
    expected = FORMULAS["k3"](math.exp(-(2.0**-13)))
    assert kl_estimate(log_probs, ref_log_probs, "k3").item() == pytest.approx(expected, rel=2e-3)


def test_the_coefficient_follows_the_error_of_the_kl_and_stays_at_its_target():
    assert next_coefficient(0.3, 0.05, 0.05, 64) == 0.3
    assert next_coefficient(0.3, 0.055, 0.05, HORIZON // 10) == pytest.approx(0.3 * (1 + 0.1 * 0.1))
    assert next_coefficient(0.3, 0.045, 0.05, HORIZON // 10) == pytest.approx(0.3 * (1 - 0.1 * 0.1))


@given(st.floats(1e-6, 1e3), st.floats(-1e3, 1e3), st.floats(1e-6, 10), st.integers(1, 10**7))
def test_no_step_changes_the_coefficient_by_more_than_a_fifth(coefficient, kl, target, samples):
    after = next_coefficient(coefficient, kl, target, samples)
    assert 0.799 * coefficient <= after <= 1.201 * coefficient
    assert (after - coefficient) * (kl - target) >= 0
