"""Estimates of KL(policy || reference) from the log-probs of the sampled tokens alone, one value per token.

All three are due to John Schulman, http://joschu.net/blog/kl-approx.html. They estimate the KL when the tokens were
sampled from the policy. As a term of the loss they differ: the gradient of k1 averages to zero there (it belongs in
the reward), that of k2 averages to the gradient of KL(policy || reference), and that of k3 to the gradient of
KL(reference || policy).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

KLEstimator = Literal["k1", "k2", "k3"]


def _k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """-log r with r = reference / policy: unbiased, high variance, often negative."""
    return log_probs - ref_log_probs


def _k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """(log r)^2 / 2: biased, low variance, never negative."""
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """(r - 1) - log r: unbiased, low variance, never negative."""
    log_r = ref_log_probs - log_probs
    return torch.expm1(log_r) - log_r  # exp(x) - 1 would lose every digit of a small KL in float32


KL_ESTIMATORS: dict[KLEstimator, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
}
"""Name in the settings -> function of (log_probs, ref_log_probs)."""


def kl_estimate(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, estimator: KLEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) in nats, exactly 0 where the two log-probs are equal.

    Args:
        log_probs: [tokens] of the policy; the gradient flows through them.
        ref_log_probs: [tokens] of the reference model, without a graph.
        estimator: a key of KL_ESTIMATORS.
    """
    return KL_ESTIMATORS[estimator](log_probs, ref_log_probs)
