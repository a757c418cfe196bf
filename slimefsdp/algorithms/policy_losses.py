"""Computes losses of the policy and its KL to the reference, one value per token; see `reduction.py` for the weights.

A loss of whole sequences or pairs (PER_SEQUENCE in registry.py) has the same value at all of their tokens. Under the
reduction sequence_mean, with weights 1 / (samples * tokens of the sample), the loss of an update is then the mean over
sequences as in the papers, and for dpo the mean over pairs.

Ratios are exactly 1 where log-probs are equal. A clipped token has gradient 0 even if its ratio overflows to infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """Maps each token of a pack to its sequence.

    Tokens are the trained tokens of whole sequences. No method waits for the device.
    """

    index: torch.Tensor  # [tokens] int64 in [0, count), in any order
    count: int  # may exceed the number of sequences in the pack, e.g. the samples of the whole batch

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the differentiable sum of `values` [tokens] over each sequence, [count]; an empty sequence has 0."""
        # float64, because atomics add in any order on a GPU and ranks with the same pack must get the same result
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.index, values.double()).to(values.dtype)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the differentiable mean of `values` [tokens] over each sequence, [count]; an empty sequence has 0."""
        return self.sum(values) / self.lengths().clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Returns the value of each token's sequence, from [count] to [tokens]; differentiable."""
        return per_sequence.index_select(0, self.index)

    def lengths(self) -> torch.Tensor:
        """Returns the number of tokens of each sequence in this pack, [count] int64."""
        return torch.zeros(self.count, dtype=torch.int64, device=self.index.device).index_add(
            0, self.index, torch.ones_like(self.index)
        )

    def occurs(self) -> torch.Tensor:
        """Returns whether each sequence has a token in this pack, [count] bool."""
        return self.lengths() > 0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Holds one pack's trained tokens; every tensor is [tokens], and only `log_probs` carries a graph."""

    log_probs: torch.Tensor  # of the policy in training
    old_log_probs: torch.Tensor  # of the policy at the start of the step
    advantages: torch.Tensor
    sequences: Sequences
    groups: Sequences | None = None  # maps tokens to pairs, which are whole in the pack; only for losses of pairs
    ref_log_probs: torch.Tensor | None = None  # of the reference model


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Holds the parameters of the losses; each loss documents which ones it reads."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    beta: float = 0.1  # of dpo and dro


class PolicyLoss(NamedTuple):
    """Holds the result of a policy loss; every field is [tokens], and only `loss` carries a graph."""

    loss: torch.Tensor
    ratio: torch.Tensor  # current / old probability of the token, or under gspo and gspo_token of its sequence
    clipped_low: torch.Tensor  # bool, True where the lower bound stops the gradient, or under cispo limits the weight
    clipped_high: torch.Tensor  # bool, the same for the upper bound


def ppo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns PPO's clipped loss, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    PPO (arXiv 1707.06347), equation 7; separate bounds from DAPO (arXiv 2503.14476), section 3.1. With dual_clip = c
    the loss of a negative advantage is at most c * |A| (arXiv 1912.09729): for ratios above c the gradient is 0, which
    counts as clipped_high. Where log-probs are equal the gradient is -A.
    """
    return _clipped_loss(tokens.log_probs - tokens.old_log_probs, tokens.advantages, options, options.dual_clip)


def gspo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns GSPO's loss: PPO's clipped loss with the sequence ratio exp(mean log ratio of its tokens).

    arXiv 2507.18071. Reads clip_low and clip_high; the paper's values are about a thousandth of PPO's.
    """
    sequences = tokens.sequences
    log_ratio = sequences.spread(sequences.mean(tokens.log_probs - tokens.old_log_probs))
    return _clipped_loss(log_ratio, tokens.advantages, options)


def gspo_token_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns GSPO-token's loss: the sequence ratio determines value and clipping, the token's log-prob the gradient.

    arXiv 2507.18071, section 4.3. Value and gradient equal those of gspo if advantages and weights are equal inside a
    sequence; otherwise each token has its own advantage. Reads clip_low and clip_high.
    """
    log_probs, sequences = tokens.log_probs, tokens.sequences
    log_ratio = sequences.spread(sequences.mean(log_probs.detach() - tokens.old_log_probs))
    return _clipped_loss(log_ratio + (log_probs - log_probs.detach()), tokens.advantages, options)


def _clipped_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, options: PolicyOptions, dual_clip: float | None = None
) -> PolicyLoss:
    ratio = torch.exp(log_ratio.detach())
    bounded = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    clipped_low = (ratio < bounded) & (advantages < 0)
    clipped_high = (ratio > bounded) & (advantages > 0)
    if dual_clip is not None:
        is_bounded = (ratio > dual_clip) & (advantages < 0)
        bounded = bounded.masked_fill(is_bounded, dual_clip)
        clipped_high = clipped_high | is_bounded
    is_clipped = clipped_low | clipped_high
    # masked before the exponential: the textbook min() would backpropagate 0 * inf = nan through an infinite ratio
    open_ratio = torch.exp(log_ratio.masked_fill(is_clipped, 0.0))
    loss = -torch.where(is_clipped, bounded, open_ratio) * advantages
    return PolicyLoss(loss, ratio, clipped_low, clipped_high)


def cispo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns CISPO's loss, -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log-prob, without gradient in the ratio.

    MiniMax-M1 (arXiv 2506.13585). No token loses its gradient. The authors set no lower bound.
    """
    ratio = _ratio(tokens)
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.log_probs, ratio, ratio < weight, ratio > weight)


SAPO_POSITIVE, SAPO_NEGATIVE = 1.0, 1.05  # temperatures of the gate, by the sign of the advantage


def sapo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns SAPO's loss, -4 / tau * sigmoid(tau * (ratio - 1)) * A: a soft gate where PPO clips.

    arXiv 2511.20347; tau is 1 where A > 0, else 1.05, as in the paper. The gradient is -A at the ratio 1 and fades on
    both sides.
    """
    temperature = torch.full_like(tokens.advantages, SAPO_NEGATIVE)
    temperature = temperature.masked_fill(tokens.advantages > 0, SAPO_POSITIVE)
    # the gate is flat beyond e^50 even in float64; without the clamp an overflowing ratio would give 0 * inf = nan
    ratio = torch.exp((tokens.log_probs - tokens.old_log_probs).clamp(max=50.0))
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return _never_clipped(-gate * tokens.advantages, tokens)


def gmpo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns GMPO's loss: -A times the geometric mean of a sequence's token ratios.

    arXiv 2507.20673. Each ratio is clipped on the side towards which A pushes it. The bounds are on the log ratio, so a
    ratio stays within [exp(-clip_low), exp(clip_high)]; the paper uses 0.4 for both.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    clipped_low = (log_ratio < -options.clip_low) & (tokens.advantages < 0)
    clipped_high = (log_ratio > options.clip_high) & (tokens.advantages > 0)
    bounded = log_ratio.masked_fill(clipped_low, -options.clip_low).masked_fill(clipped_high, options.clip_high)
    geometric_mean = torch.exp(tokens.sequences.spread(tokens.sequences.mean(bounded)))
    return PolicyLoss(-geometric_mean * tokens.advantages, _ratio(tokens), clipped_low, clipped_high)


def reinforce_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns the loss of REINFORCE (Williams 1992), -A * log-prob. Old log-probs affect only the reported ratio."""
    return _never_clipped(-tokens.advantages * tokens.log_probs, tokens)


def importance_sampling_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns -ratio * A, never clipped: the policy gradient under samples of the old policy."""
    return _never_clipped(-torch.exp(tokens.log_probs - tokens.old_log_probs) * tokens.advantages, tokens)


def dpo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns DPO's loss of pairs, -log sigmoid(beta * (log ratio of the chosen - log ratio of the rejected)).

    arXiv 2305.18290, equation 7; a log ratio is log(policy / reference), summed over a sample's trained tokens. A group
    is one pair: the sample with the positive advantage is the chosen one, the sample with the negative advantage the
    rejected one. Each token of a pair has the pair's loss. If both advantages are 0, the loss is the constant log 2.
    """
    assert tokens.groups is not None and tokens.ref_log_probs is not None
    preference = torch.sign(tokens.advantages) * (tokens.log_probs - tokens.ref_log_probs)
    loss = -torch.nn.functional.logsigmoid(options.beta * tokens.groups.sum(preference))
    return _never_clipped(tokens.groups.spread(loss), tokens)


def pair_metrics(tokens: PolicyTokens, beta: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns DPO's usual metrics of each pair, and which pairs have tokens in this pack; all [pairs], without a graph.

    The implicit reward of a sample is beta * log(policy / reference), summed over its trained tokens.
    """
    assert tokens.groups is not None and tokens.ref_log_probs is not None
    log_probs, groups = tokens.log_probs.detach(), tokens.groups
    rewards = beta * (log_probs - tokens.ref_log_probs)
    metrics: dict[str, torch.Tensor] = {}
    for name, is_role in (("chosen", tokens.advantages > 0), ("rejected", tokens.advantages < 0)):
        metrics[f"rewards/{name}"] = groups.sum(rewards.masked_fill(~is_role, 0.0))
        metrics[f"logps/{name}"] = groups.sum(log_probs.masked_fill(~is_role, 0.0))
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    metrics["rewards/accuracies"] = (metrics["rewards/margins"] > 0).to(log_probs.dtype)
    return metrics, groups.occurs()


def dro_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """Returns DRO's loss, -(A * log-prob - beta / 2 * (log-prob - old log-prob)^2).

    The policy gradient is that of arXiv 2405.19107, with A in place of reward minus value, and the old policy in place
    of the reference. A token of advantage 0 is pulled back to its old log-prob.
    """
    distance = tokens.log_probs - tokens.old_log_probs
    return _never_clipped(options.beta / 2 * distance.square() - tokens.advantages * tokens.log_probs, tokens)


def _ratio(tokens: PolicyTokens) -> torch.Tensor:
    return torch.exp(tokens.log_probs.detach() - tokens.old_log_probs)


def _never_clipped(loss: torch.Tensor, tokens: PolicyTokens) -> PolicyLoss:
    never = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return PolicyLoss(loss, _ratio(tokens), never, never)


PolicyLossFunction = Callable[[PolicyTokens, PolicyOptions], PolicyLoss]

POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "ppo": ppo_loss,
    "gspo": gspo_loss,
    "gspo_token": gspo_token_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "gmpo": gmpo_loss,
    "reinforce": reinforce_loss,
    "importance_sampling": importance_sampling_loss,
    "dpo": dpo_loss,
    "dro": dro_loss,
}
"""Name in the settings -> loss."""


def cross_entropy_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """Returns the loss of supervised fine-tuning, the negative log-prob of each target token, [tokens], in nats."""
    return -log_probs


# ---------------------------------------------------------------------- the KL to the reference
#
# Estimates KL(policy || reference) from the log-probs of the sampled tokens alone, one value per token.
#
# k1, k2 and k3 are due to John Schulman, http://joschu.net/blog/kl-approx.html. For the policy P, the reference Q and
# tokens sampled from P, the means over tokens are:
#
# | name | mean of value     | mean of gradient            | mean gradient of ratio x estimate   |
# |------|-------------------|-----------------------------|-------------------------------------|
# | k1   | KL(P, Q)          | 0 (use it in rewards)       | gradient of KL(P, Q)                |
# | k2   | not KL(P, Q)      | gradient of KL(P, Q)        | gradient of its own mean            |
# | k3   | KL(P, Q)          | gradient of KL(Q, P)        | gradient of KL(P, Q)                |
# | abs  | at least KL(P, Q) | gradient of sum(abs(P - Q)) | gradient of its own mean            |
#
# In the reward, the estimate is a factor of the gradient of the log-prob. Then k1 gives the gradient of KL(P, Q), and
# k3 gives minus the gradient of KL(Q, P).
#
# In the last column the estimate is multiplied by the ratio policy / old policy. Its means are over tokens that the old
# policy sampled, and hold for any current policy. `slimefsdp.models.fused_log_probs` computes the exact KL over the
# vocabulary.

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
            multiplied by policy / old policy, and this ratio is differentiated too. Averaged over tokens that the
            old policy sampled, value and gradient of k1 and k3 then equal those of KL(policy || reference).
            DeepSeek-V3.2 (arXiv 2512.02556), section 3.1.
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
        target: the KL to approach, in nats a token; > 0.
        samples: number of samples of the step. A number above `HORIZON` has the effect of `HORIZON`, so that the
            coefficient cannot become negative.
    """
    if not math.isfinite(kl):
        return coefficient
    error = min(max(kl / target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return min(coefficient * (1 + error * min(samples / HORIZON, 1.0)), MAX_COEFFICIENT)
