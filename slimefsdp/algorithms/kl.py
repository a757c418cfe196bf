"""Estimates KL(policy || reference) from the log-probs of the sampled tokens alone, one value per token.

k1, k2 and k3 are due to John Schulman, http://joschu.net/blog/kl-approx.html. For the policy P, the reference Q and
tokens sampled from P, the means over tokens are:

| name | mean of value     | mean of gradient            | mean gradient of ratio x estimate   |
|------|-------------------|-----------------------------|-------------------------------------|
| k1   | KL(P, Q)          | 0: it belongs in rewards    | gradient of KL(P, Q)                |
| k2   | not KL(P, Q)      | gradient of KL(P, Q)        | gradient of its own mean            |
| k3   | KL(P, Q)          | gradient of KL(Q, P)        | gradient of KL(P, Q)                |
| abs  | at least KL(P, Q) | gradient of sum(abs(P - Q)) | gradient of its own mean            |

A KL subtracted from the reward multiplies the gradient of the log-prob. There only k1 gives the gradient of KL(P, Q);
k3 gives it minus the gradient of KL(Q, P).

The last column multiplies the estimate by the ratio policy / old policy. Its means are over tokens that the old policy
sampled, and hold for any current policy. `slimefsdp.models.fused_log_probs` computes the exact KL over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

MAX_COEFFICIENT = 1e6  # stops the growth of the coefficient if the KL never reaches its target
HORIZON = 10_000  # samples over which an adapted coefficient changes by a fifth at most
MAX_RELATIVE_ERROR = 0.2  # `next_coefficient` clips kl / target - 1 to this size


def _k1(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Returns -log r with r = reference / policy: unbiased, high variance, often negative."""
    return log_probs - ref_log_probs


def _k2(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Returns (log r)^2 / 2: biased, low variance, never negative."""
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Returns (r - 1) - log r: unbiased, low variance, never negative."""
    log_r = ref_log_probs - log_probs
    return torch.expm1(log_r) - log_r  # exp(x) - 1 would lose every digit of a small KL in float32


def _abs(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Returns |log r|: biased, never negative."""
    return (log_probs - ref_log_probs).abs()


KL_ESTIMATORS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "abs": _abs,
}
"""Name in the settings -> function of (log_probs, ref_log_probs)."""


def kl_estimate(
    log_probs: torch.Tensor,
    ref_log_probs: torch.Tensor,
    estimator: str,
    old_log_probs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the per-token estimate of KL(policy || reference) in nats; exactly 0 where the two log-probs are equal.

    Args:
        log_probs: [tokens], log-probs of the policy; the gradient flows through them.
        ref_log_probs: [tokens], log-probs of the reference model, without a graph.
        estimator: a key of KL_ESTIMATORS.
        old_log_probs: [tokens], log-probs of the policy that sampled, without a graph. If given, the estimate is
            multiplied by policy / old policy, and the ratio is differentiated too. Averaged over tokens of the old
            policy, value and gradient of k1 and k3 are then those of KL(policy || reference). DeepSeek-V3.2
            (arXiv 2512.02556), section 3.1.
    """
    estimate = KL_ESTIMATORS[estimator](log_probs, ref_log_probs)
    return estimate if old_log_probs is None else torch.exp(log_probs - old_log_probs) * estimate


def next_coefficient(coefficient: float, kl: float, target: float, samples: int) -> float:
    """Returns the KL coefficient after a step, moved so that the KL approaches its target.

    A proportional controller in log space, Ziegler et al. (arXiv 1909.08593), section 2.2:
    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / HORIZON).

    Args:
        coefficient: the coefficient of the step.
        kl: KL measured over the step, in nats a token; if it is not finite, the coefficient does not change.
        target: in nats a token, > 0.
        samples: number of samples of the step. At most `HORIZON` count, so that the coefficient cannot become negative.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return min(coefficient * (1 + error * min(samples / HORIZON, 1.0)), MAX_COEFFICIENT)
