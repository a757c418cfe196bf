"""Losses of the policy, one value per token; `reduction.py` decides how much each token counts.

A loss of whole sequences, or of pairs (PER_SEQUENCE in registry.py), gives each of their tokens the one value that it
has for all of them; `Sequences` sums over them. Under the reduction sequence_mean, whose weights are
1 / (samples * tokens of the sample), the loss of an update is then the mean over sequences that the papers write, and
for dpo the mean over pairs.

Ratios are exactly 1 where log-probs are equal. A token whose gradient a bound stops has gradient 0 even where its ratio
overflows to infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which sequence each token of a pack belongs to.

    A pack holds whole sequences, and of each its trained tokens only. Nothing here waits for the device.
    """

    index: torch.Tensor  # [tokens] int64 in [0, count), in any order
    count: int  # may be larger than how many occur, such as the samples of the whole batch

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` [tokens] over each sequence, [count]; 0 for a sequence without tokens;
        differentiable.
        """
        # in float64: atomics add in any order on a GPU, and ranks that hold the same pack must decide alike
        totals = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.index, values.double()).to(values.dtype)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the mean of `values` [tokens] over each sequence, [count]; 0 for a sequence without tokens;
        differentiable.
        """
        return self.sum(values) / self.lengths().clamp(min=1)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """Returns for each token the value of its sequence, [count] to [tokens]; differentiable."""
        return per_sequence.index_select(0, self.index)

    def lengths(self) -> torch.Tensor:
        """Tokens of each sequence in this pack, [count] int64."""
        return torch.zeros(self.count, dtype=torch.int64, device=self.index.device).index_add(
            0, self.index, torch.ones_like(self.index)
        )

    def occurs(self) -> torch.Tensor:
        """Whether a sequence has a token here, [count] bool."""
        return self.lengths() > 0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """One pack's trained tokens; every tensor is [tokens], and only `log_probs` carries a graph."""

    log_probs: torch.Tensor  # of the policy that is trained
    old_log_probs: torch.Tensor  # of the policy at the start of the step
    advantages: torch.Tensor
    sequences: Sequences
    groups: Sequences | None = None  # the pair of each token, whole in the pack; for losses of pairs alone
    ref_log_probs: torch.Tensor | None = None  # of the reference model


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The parameters of the losses; each loss documents which ones it reads."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    dpo_beta: float = 0.1
    dro_beta: float | None = None


class PolicyLoss(NamedTuple):
    """What a policy loss returns; every field is [tokens], and only `loss` carries a graph."""

    loss: torch.Tensor
    ratio: torch.Tensor  # probability now / when the old log-probs were taken; gspo, gspo_token: of the sequence
    clipped_low: torch.Tensor  # bool, the lower bound stops this token's gradient; cispo: limits its weight
    clipped_high: torch.Tensor  # bool, the upper bound does


def ppo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """PPO's clipped loss, -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    PPO (arXiv 1707.06347), equation 7; separate bounds from DAPO (arXiv 2503.14476), section 3.1. With dual_clip = c
    the loss of a negative advantage is at most c * |A| (arXiv 1912.09729): above the ratio c, counted as
    clipped_high, its gradient is 0. Where log-probs are equal the gradient is -A.
    """
    return _clipped_loss(tokens.log_probs - tokens.old_log_probs, tokens.advantages, options, options.dual_clip)


def gspo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """GSPO: PPO's clipped loss of a whole sequence, whose ratio is exp(mean log ratio of its tokens).

    arXiv 2507.18071. Reads clip_low and clip_high, which the paper chooses a thousandth of PPO's.
    """
    sequences = tokens.sequences
    log_ratio = sequences.spread(sequences.mean(tokens.log_probs - tokens.old_log_probs))
    return _clipped_loss(log_ratio, tokens.advantages, options)


def gspo_token_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """GSPO-token: the value and the clip of the sequence's ratio, the gradient of the token's own log-prob.

    arXiv 2507.18071, section 4.3. Equals gspo, gradient and all, where advantages and weights are equal inside
    a sequence; elsewhere each token has its own. Reads clip_low and clip_high.
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
    # filled before the exponential, since the textbook min() backpropagates 0 * inf = nan through an infinite ratio
    open_ratio = torch.exp(log_ratio.masked_fill(is_clipped, 0.0))
    loss = -torch.where(is_clipped, bounded, open_ratio) * advantages
    return PolicyLoss(loss, ratio, clipped_low, clipped_high)


def cispo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """CISPO: the clipped ratio as a weight without gradient, -clip(ratio, 1 - clip_low, 1 + clip_high) * A * log-prob.

    MiniMax-M1 (arXiv 2506.13585). No token loses its gradient. Its authors set no lower bound.
    """
    ratio = _ratio(tokens)
    weight = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    return PolicyLoss(-weight * tokens.advantages * tokens.log_probs, ratio, ratio < weight, ratio > weight)


def sapo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """SAPO: a soft gate where PPO clips, -4 / tau * sigmoid(tau * (ratio - 1)) * A.

    arXiv 2511.20347; tau is sapo_temperature_positive where A > 0, else sapo_temperature_negative.
    The gradient is -A at the ratio 1 and fades on both sides.
    """
    temperature = torch.full_like(tokens.advantages, options.sapo_temperature_negative)
    temperature = temperature.masked_fill(tokens.advantages > 0, options.sapo_temperature_positive)
    # from e^50 on the gate is flat in float64 too, and its gradient would be 0 * inf = nan where the ratio overflows
    ratio = torch.exp((tokens.log_probs - tokens.old_log_probs).clamp(max=50.0))
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return _never_clipped(-gate * tokens.advantages, tokens)


def gmpo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """GMPO: -A times the geometric mean of a sequence's token ratios, each clipped on the side that A pushes it to.

    arXiv 2507.20673. The bounds are on the log ratio, so that a ratio stays within
    [exp(-clip_low), exp(clip_high)]; the paper takes 0.4 for both.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    clipped_low = (log_ratio < -options.clip_low) & (tokens.advantages < 0)
    clipped_high = (log_ratio > options.clip_high) & (tokens.advantages > 0)
    bounded = log_ratio.masked_fill(clipped_low, -options.clip_low).masked_fill(clipped_high, options.clip_high)
    geometric_mean = torch.exp(tokens.sequences.spread(tokens.sequences.mean(bounded)))
    return PolicyLoss(-geometric_mean * tokens.advantages, _ratio(tokens), clipped_low, clipped_high)


def reinforce_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """REINFORCE (Williams 1992), -A * log-prob. The old log-probs only show in the ratio."""
    return _never_clipped(-tokens.advantages * tokens.log_probs, tokens)


def importance_sampling_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """The policy gradient under samples of the old policy, -ratio * A, never clipped."""
    return _never_clipped(-torch.exp(tokens.log_probs - tokens.old_log_probs) * tokens.advantages, tokens)


def dpo_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """DPO of pairs, -log sigmoid(dpo_beta * (log ratio of the chosen - log ratio of the rejected)).

    arXiv 2305.18290, equation 7; a log ratio is log(policy / reference), summed over a sample's trained tokens. A group
    is one pair: of its two samples the one with the positive advantage is chosen, the one with the negative rejected.
    Each token of a pair has the pair's loss. Advantages of 0 prefer neither: the loss is log 2 and has no gradient.
    """
    assert tokens.groups is not None and tokens.ref_log_probs is not None
    preference = torch.sign(tokens.advantages) * (tokens.log_probs - tokens.ref_log_probs)
    loss = -torch.nn.functional.logsigmoid(options.dpo_beta * tokens.groups.sum(preference))
    return _never_clipped(tokens.groups.spread(loss), tokens)


def pair_metrics(tokens: PolicyTokens, beta: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Returns DPO's metrics of each pair, under the field's names, and which pairs have tokens here; all [pairs], no
    graph.

    The implicit reward of a sample is beta * log(policy / reference), summed over its trained tokens.
    """
    assert tokens.groups is not None and tokens.ref_log_probs is not None
    log_probs, groups = tokens.log_probs.detach(), tokens.groups
    rewards = beta * (log_probs - tokens.ref_log_probs)
    found: dict[str, torch.Tensor] = {}
    for name, is_of in (("chosen", tokens.advantages > 0), ("rejected", tokens.advantages < 0)):
        found[f"rewards/{name}"] = groups.sum(rewards.masked_fill(~is_of, 0.0))
        found[f"logps/{name}"] = groups.sum(log_probs.masked_fill(~is_of, 0.0))
    found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    found["rewards/accuracies"] = (found["rewards/margins"] > 0).to(log_probs.dtype)
    return found, groups.occurs()


def dro_loss(tokens: PolicyTokens, options: PolicyOptions) -> PolicyLoss:
    """DRO: -(A * log-prob - dro_beta / 2 * (log-prob - old log-prob)^2).

    arXiv 2405.19107, whose gradient of the policy this has, with A in place of reward minus value and the old policy in
    place of the reference. A token of advantage 0 is drawn back to its old log-prob.
    """
    assert options.dro_beta is not None
    distance = tokens.log_probs - tokens.old_log_probs
    return _never_clipped(options.dro_beta / 2 * distance.square() - tokens.advantages * tokens.log_probs, tokens)


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
    """Supervised fine-tuning: the negative log-prob of each target, [tokens] to [tokens], in nats."""
    return -log_probs
