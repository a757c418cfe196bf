"""Losses of the policy, one value per token; `reduce.py` decides how much each token counts."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PolicyLoss(NamedTuple):
    """What a policy loss returns; every field is [tokens], and only `loss` carries a graph."""

    loss: torch.Tensor
    ratio: torch.Tensor  # probability now / probability when the old log-probs were taken
    clipped_low: torch.Tensor  # bool, the lower bound stops this token's gradient
    clipped_high: torch.Tensor  # bool, the upper bound stops this token's gradient


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clipped loss, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    PPO (arXiv 1707.06347), equation 7; separate bounds from DAPO (arXiv 2503.14476), section 3.1. Where the two
    log-probs are equal the ratio is exactly 1 and the gradient is -A. A clipped token has gradient 0 even where its
    ratio overflows to infinity.

    Args:
        log_probs: [tokens] of the policy that is trained, with its graph.
        old_log_probs: [tokens] of the policy at the start of the phase, without a graph.
        advantages: [tokens].
        clip_low: how far the ratio may fall below 1 before a negative advantage stops counting.
        clip_high: how far the ratio may rise above 1 before a positive advantage stops counting.
    """
    log_ratio = log_probs - old_log_probs
    ratio = torch.exp(log_ratio.detach())
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    clipped_low = (ratio < bounded) & (advantages < 0)
    clipped_high = (ratio > bounded) & (advantages > 0)
    is_clipped = clipped_low | clipped_high
    # filled before the exponential, since the textbook min() backpropagates 0 * inf = nan through an infinite ratio
    open_ratio = torch.exp(log_ratio.masked_fill(is_clipped, 0.0))
    loss = -torch.where(is_clipped, bounded, open_ratio) * advantages
    return PolicyLoss(loss, ratio, clipped_low, clipped_high)


def cross_entropy_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """Supervised fine-tuning: the negative log-prob of each target, [tokens] to [tokens], in nats."""
    return -log_probs
