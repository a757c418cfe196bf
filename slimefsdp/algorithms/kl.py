"""Estimates of KL(policy || reference) from the log-probs of the sampled tokens alone, one value per token.

k1, k2 and k3 are due to John Schulman, http://joschu.net/blog/kl-approx.html. Their means over tokens that the policy
sampled, P being the policy and Q the reference:

| name | of the value      | of the gradient             | of the gradient of ratio x estimate |
|------|-------------------|-----------------------------|-------------------------------------|
| k1   | KL(P, Q)          | 0: it belongs in rewards    | gradient of KL(P, Q)                |
| k2   | not KL(P, Q)      | gradient of KL(P, Q)        | of its own mean                     |
| k3   | KL(P, Q)          | gradient of KL(Q, P)        | gradient of KL(P, Q)                |
| abs  | at least KL(P, Q) | gradient of sum(abs(P - Q)) | of its own mean                     |

Taken off the reward, where its value weighs the gradient of the log-prob, k1 alone gives the gradient of KL(P, Q); k3
gives that less the gradient of KL(Q, P).

With the ratio, policy / old policy, the means are those over tokens that the old policy sampled, whatever the policy
has become since. The exact KL, over the whole vocabulary, is computed in the head (`slimefsdp.models.fused_log_probs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

MAX_COEFFICIENT = 1e6  # where a target cannot be met
MAX_RELATIVE_ERROR = 0.2  # of the KL against its target, as far as `next_coefficient` minds it


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


def _abs(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """|log r|: biased, never negative."""
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
        log_probs: [tokens] of the policy; the gradient flows through them.
        ref_log_probs: [tokens] of the reference model, without a graph.
        estimator: a key of KL_ESTIMATORS.
        old_log_probs: [tokens] of the policy that sampled, without a graph: weight the estimate by policy / old
            policy, and differentiate the weight too. Over tokens of the old policy, value and gradient of k1 and k3
            then average to those of KL(policy || reference). DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
    """
    estimate = KL_ESTIMATORS[estimator](log_probs, ref_log_probs)
    return estimate if old_log_probs is None else torch.exp(log_probs - old_log_probs) * estimate


def next_coefficient(coefficient: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """Returns the KL coefficient after a step, moved so that the KL approaches its target.

    A proportional controller in log space, Ziegler et al. (arXiv 1909.08593), section 2.2:
    coefficient * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
        coefficient: of the step.
        kl: measured over the step, in nats a token; the coefficient stays where it is not finite.
        target: in nats a token, > 0.
        samples: of the step; more than `horizon` count as so many, or one step could end in a negative coefficient.
        horizon: samples over which the coefficient changes by a fifth at most.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return min(coefficient * (1 + error * min(samples / horizon, 1.0)), MAX_COEFFICIENT)
