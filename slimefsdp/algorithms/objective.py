"""Computes one micro-batch's training loss and its metrics: policy loss, KL and entropy terms under token weights.

Token weights are computed for the whole update (`reduction.py`), so the loss of an update is the sum of the losses of
its micro-batches over all ranks, and gradients simply add. A pack holds whole samples, so a loss of whole sequences
gets all tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import torch

from slimefsdp.algorithms.policy_losses import (
    PolicyLossFunction,
    PolicyOptions,
    PolicyTokens,
    Sequences,
    cross_entropy_loss,
    kl_estimate,
    pair_metrics,
)
from slimefsdp.batching.packing import on_device


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Holds the inputs of a loss for each token; every tensor is [tokens], or None if the loss does not read it."""

    weights: torch.Tensor
    sample_ids: torch.Tensor  # int64, below num_samples
    num_samples: int  # of the whole batch
    group_ids: torch.Tensor | None = None  # int64, below num_samples; for losses that compare pairs
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None  # None means that the current log-probs, detached, are used
    old_is_rollout: bool = False  # old_log_probs are the engine's; the mismatch is then that of current log-probs
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None  # for corrections and metrics
    old_values: torch.Tensor | None = None  # the critic's values before the step
    returns: torch.Tensor | None = None  # the targets of the critic's values

    def at(self, index: torch.Tensor) -> TokenInputs:
        """Returns the inputs of the tokens at these positions; index: int64 [predicted tokens of a pack]."""
        return self._each(lambda value: value[index])

    def to(self, device: torch.device) -> TokenInputs:
        return self._each(lambda value: on_device(value, device))

    def as_dtype(self, dtype: torch.dtype) -> TokenInputs:
        return self._each(lambda value: value.to(dtype) if value.is_floating_point() else value)

    @property
    def sequences(self) -> Sequences:
        """Returns the sample that each token belongs to."""
        return Sequences(self.sample_ids, self.num_samples)

    @property
    def groups(self) -> Sequences | None:
        """Returns the pair that each token belongs to; None if no loss compares pairs."""
        return None if self.group_ids is None else Sequences(self.group_ids, self.num_samples)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenInputs:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        changed: dict[str, Any] = {n: change(v) for n, v in values.items() if isinstance(v, torch.Tensor)}
        return replace(self, **changed)


class MetricSums:
    """Accumulates the metrics of one update on one rank. Every rank must add the same names.

    No method waits for the device. All ranks that share a pack hold the same values of the pack, so the values of only
    one of these ranks count.

    Args:
        counted: whether this rank's values count; if False, zeros are added in their place.
    """

    def __init__(self, device: torch.device, *, counted: bool = True) -> None:
        self._device = device
        self._counted = counted
        self.sums: dict[str, torch.Tensor] = {}
        self.counts: dict[str, torch.Tensor] = {}
        self.maxima: dict[str, torch.Tensor] = {}

    def add_total(self, name: str, value: torch.Tensor) -> None:
        """Adds a 0-d value to a total over micro-batches and ranks, such as a weighted loss."""
        self._accumulate(self.sums, name, value.detach().double())

    def add_mean(self, name: str, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Adds values [n], possibly none, to a mean over the update.

        Args:
            counted: [n] bool, the values that count; None means all values.
        """
        values = values.detach().double()
        if counted is None:
            count = torch.full((), float(values.numel()), dtype=torch.float64, device=self._device)
        else:
            values, count = values.masked_fill(~counted, 0.0), counted.sum(dtype=torch.float64)
        self.add_total(name, values.sum())
        self._accumulate(self.counts, name, count)

    def add_max(self, name: str, values: torch.Tensor, counted: torch.Tensor | None = None) -> None:
        """Adds values >= 0 to a maximum over the update; arguments as for `add_mean`."""
        nothing = torch.zeros((), dtype=torch.float64, device=self._device)
        values = values.detach().double()
        if counted is not None:
            values = values.masked_fill(~counted, 0.0)
        largest = values.max().to(self._device) if values.numel() and self._counted else nothing
        self.maxima[name] = torch.maximum(self.maxima[name], largest) if name in self.maxima else largest

    def _accumulate(self, into: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
        value = value.to(self._device) if self._counted else torch.zeros_like(value, device=self._device)
        into[name] = into[name] + value if name in into else value


# ---------------------------------------------------------------------- the engine's probabilities
#
# Corrects for the difference between the rollout engine's token probabilities and the trainer's.
#
# rho of a token is its probability under the trainer at the start of the step / its probability under the engine;
# log_rho is old_log_probs - rollout_log_probs, in nats. A correction is a weight on each token's policy loss. A dropped
# token has weight 0 but stays in the denominators of `reduction.py`, which are computed before any log-prob is known.
#
# Weighting by rho while clipping the ratio to the old policy is decoupled PPO (arXiv 2110.00641; for stale data AReaL,
# arXiv 2505.24298): the old policy is the proximal policy, the engine's the behaviour policy.
#
# Nothing here carries a graph. rho may be infinite, and a pack may have no tokens.


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Holds the bounds on rho, and the thresholds of `kept_by_veto` and `kept_by_opsm`; None switches one off."""

    low: float | None = None
    high: float | None = None
    veto_below: float | None = None  # for `kept_by_veto`
    opsm_threshold: float | None = None  # for `kept_by_opsm`


class Correction(NamedTuple):
    """Holds the result of a correction; every field is [tokens]."""

    weights: torch.Tensor
    below: torch.Tensor  # bool, True where the token is dropped because its rho, or its sequence's, is below `low`
    above: torch.Tensor  # bool, True where the weight is truncated or dropped because this rho is above `high`

    def dropping(self, dropped: torch.Tensor) -> Correction:
        """Returns the same correction with weight 0 where `dropped`, [tokens] bool, is True."""
        return self._replace(weights=self.weights.masked_fill(dropped, 0.0))


def _truncated(rho: torch.Tensor, options: CorrectionOptions) -> Correction:
    assert options.high is not None
    return Correction(rho.clamp(max=options.high), torch.zeros_like(rho, dtype=torch.bool), rho > options.high)


def _masked(rho: torch.Tensor, judged: torch.Tensor, options: CorrectionOptions) -> Correction:
    """Returns the weight `rho` where the quantity `judged` is within the bounds, else 0; both are [tokens]."""
    nowhere = torch.zeros_like(judged, dtype=torch.bool)
    below = nowhere if options.low is None else judged < options.low
    above = nowhere if options.high is None else judged > options.high
    return Correction(rho.masked_fill(below | above, 0.0), below, above)


def _tis(log_rho: torch.Tensor, sequences: Sequences, options: CorrectionOptions) -> Correction:
    return _truncated(log_rho.exp(), options)


def _mis(log_rho: torch.Tensor, sequences: Sequences, options: CorrectionOptions) -> Correction:
    rho = log_rho.exp()
    return _masked(rho, rho, options)


def _sequence_tis(log_rho: torch.Tensor, sequences: Sequences, options: CorrectionOptions) -> Correction:
    return _truncated(sequences.spread(sequences.sum(log_rho)).exp(), options)


def _sequence_mis(log_rho: torch.Tensor, sequences: Sequences, options: CorrectionOptions) -> Correction:
    rho = sequences.spread(sequences.sum(log_rho)).exp()
    return _masked(rho, rho, options)


def _geometric_mis(log_rho: torch.Tensor, sequences: Sequences, options: CorrectionOptions) -> Correction:
    return _masked(log_rho.exp(), sequences.spread(sequences.mean(log_rho)).exp(), options)


CORRECTIONS: dict[str, Callable[[torch.Tensor, Sequences, CorrectionOptions], Correction]] = {
    "importance": _mis,
    "tis": _tis,
    "mis": _mis,
    "icepop": _mis,
    "sequence_tis": _sequence_tis,
    "sequence_mis": _sequence_mis,
    "geometric_mis": _geometric_mis,
}
"""Name in the settings -> function of (log_rho [tokens] without a graph, sequences of the tokens, bounds).

| name          | weight             | outside the bounds                                        | source           |
|---------------|--------------------|-----------------------------------------------------------|------------------|
| importance    | rho                | tokens of rho > high dropped, if high is set              | arXiv 2505.24298 |
| tis           | min(rho, high)     | truncated above                                           | off-policy-rl    |
| mis           | rho                | tokens of rho > high dropped, and < low if low is set     | rl-collapse      |
| icepop        | rho                | tokens of rho outside [low, high] dropped                 | arXiv 2510.18855 |
| sequence_tis  | min(product, high) | truncated above                                           | rl-collapse      |
| sequence_mis  | product            | sequences of product > high, and < low if set, dropped    | rl-collapse      |
| geometric_mis | rho                | sequences of a geometric mean outside [low, high] dropped | rl-collapse      |

The product and the geometric mean are those of rho over a sequence. off-policy-rl is
https://fengyao.notion.site/off-policy-rl, rl-collapse https://richardli.xyz/rl-collapse.
"""


def kept_by_veto(log_rho: torch.Tensor, sequences: Sequences, veto_below: float) -> torch.Tensor:
    """Returns False for all tokens of sequences in which any token's rho is below `veto_below`; [tokens] bool.

    A token that the trainer would almost never have sampled spoils all tokens after it (rl-collapse, as above).
    """
    vetoes = (log_rho.exp() < veto_below).to(log_rho.dtype)
    return sequences.spread(sequences.sum(vetoes) == 0)


def kept_by_opsm(
    log_probs: torch.Tensor,
    behaviour_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: Sequences,
    opsm_threshold: float,
) -> torch.Tensor:
    """Returns False for tokens of negative advantage in sequences that are too far off-policy; [tokens] bool.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): a sequence is too far off-policy if the mean of
    behaviour_log_probs - log_probs over its tokens exceeds the threshold, in nats a token.

    Args:
        log_probs: [tokens], log-probs of the policy in training, without a graph.
        behaviour_log_probs: [tokens]; the paper uses the engine's log-probs, so that mismatch and staleness both count.
    """
    divergence = sequences.spread(sequences.mean(behaviour_log_probs - log_probs))
    return (advantages >= 0) | (divergence <= opsm_threshold)


class Statistic(NamedTuple):
    """Holds a quantity whose mean or maximum over the update is reported."""

    kind: Literal["mean", "max"]
    values: torch.Tensor  # one per token, or one per sequence of `Sequences`
    counted: torch.Tensor | None = None  # bool per value, False for sequences without tokens in the pack


Statistics = dict[str, Statistic]


def mismatch_statistics(log_rho: torch.Tensor, sequences: Sequences) -> Statistics:
    """Measures how far the engine's probabilities are from the trainer's, before any correction.

    | name                     | value per token, or per sequence (s), of which the mean or maximum is reported     |
    |--------------------------|------------------------------------------------------------------------------------|
    | rollout_k1, rollout_k3   | -log rho; rho - 1 - log rho: estimates of KL(engine, trainer), nats a token        |
    | rollout_rho              | rho; its mean is 1 if the engine samples from the probabilities that it reports    |
    | rollout_chi2             | rho^2 - 1; its mean is the chi-square divergence                                   |
    | rollout_log_ppl_diff     | (s) the sequence's mean of -log rho: log perplexity of the trainer - of the engine |
    | rollout_log_ppl_diff_max | (s) absolute value of rollout_log_ppl_diff                                         |

    The effective sample size, as a share of the tokens, is rollout_rho^2 / (rollout_chi2 + 1) of the reduced values.
    """
    log_rho = log_rho.double()  # squares of rho overflow float32 from 44 nats on
    log_ppl_diff, occurs = -sequences.mean(log_rho), sequences.occurs()
    return {
        "rollout_k1": Statistic("mean", -log_rho),
        "rollout_k3": Statistic("mean", torch.expm1(log_rho) - log_rho),
        "rollout_rho": Statistic("mean", log_rho.exp()),
        "rollout_chi2": Statistic("mean", torch.expm1(2 * log_rho)),
        "rollout_log_ppl_diff": Statistic("mean", log_ppl_diff, occurs),
        "rollout_log_ppl_diff_max": Statistic("max", log_ppl_diff.abs(), occurs),
    }


def correction_statistics(correction: Correction, sequences: Sequences) -> Statistics:
    """Measures the effect of a correction, in which a veto or OPSM may have set further weights to 0.

    | name                         | value per token, or per sequence (s), of which the mean is reported        |
    |------------------------------|----------------------------------------------------------------------------|
    | correction_weight            | the weight                                                                 |
    | correction_below             | 1 where dropped because rho, or the sequence's, is below `low`             |
    | correction_above             | 1 where truncated or dropped because rho is above `high`                   |
    | correction_dropped           | 1 where the weight is 0, for any reason                                    |
    | correction_dropped_sequences | (s) 1 where no token has a weight                                          |
    """
    dropped = correction.weights == 0
    kept = sequences.sum((~dropped).to(correction.weights.dtype))
    return {
        "correction_weight": Statistic("mean", correction.weights),
        "correction_below": Statistic("mean", correction.below),
        "correction_above": Statistic("mean", correction.above),
        "correction_dropped": Statistic("mean", dropped),
        "correction_dropped_sequences": Statistic("mean", kept == 0, sequences.occurs()),
    }


# ---------------------------------------------------------------------- the loss of a pack


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes a policy's loss from its terms and their coefficients."""

    policy: PolicyLossFunction | None  # None means supervised training by the cross-entropy of each token
    options: PolicyOptions = field(default_factory=PolicyOptions)
    looks_at_sequences: bool = False  # whether the loss of a token may depend on other tokens of its sequence
    correction: str = "none"  # or a key of CORRECTIONS
    correction_options: CorrectionOptions = field(default_factory=CorrectionOptions)
    kl_coefficient: float = 0.0  # of the KL term in the loss
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    trains_without_advantage: bool = False  # whether a token of advantage 0 has a gradient

    def __call__(self, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None = None) -> torch.Tensor:
        """Returns the 0-d loss of one pack.

        Args:
            outputs: [2 or 3, tokens], the policy's log-probs and entropies, and under kl_estimator "full" the KL over
                the whole vocabulary. The log-probs carry a graph; each other row does if a term of the loss reads it.
            sums: receives the metrics.
        """
        log_probs, entropy = outputs[0], outputs[1]
        if self.policy is None:
            per_token = cross_entropy_loss(log_probs)
        else:
            per_token = self._policy_terms(self.policy, outputs, inputs, sums)
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * entropy
        loss = (inputs.weights * per_token).sum()
        if sums is not None:
            sums.add_total("loss", loss)
            sums.add_mean("entropy", entropy)
            sums.add_total("tokens", log_probs.new_full((), log_probs.numel()))
        return loss

    def _policy_terms(
        self, policy: PolicyLossFunction, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None
    ) -> torch.Tensor:
        assert inputs.advantages is not None
        log_probs, sequences = outputs[0], inputs.sequences
        current = log_probs.detach()
        old = current if inputs.old_log_probs is None else inputs.old_log_probs
        weights = self._correction(current, old, inputs, sums)
        # tokens without effect on the loss get weight 0 and ratio 1, because an infinite rho or ratio times 0 is nan
        has_no_advantage = inputs.advantages == 0
        weights = weights.masked_fill(has_no_advantage & weights.isinf(), 0.0)
        if self.looks_at_sequences:
            dropped = sequences.spread(sequences.sum(weights)) == 0
        else:
            dropped = weights * (1 if self.trains_without_advantage else inputs.advantages) == 0
        counted = torch.where(dropped, old, log_probs)
        tokens = PolicyTokens(counted, old, inputs.advantages, sequences, inputs.groups, inputs.ref_log_probs)
        policy_loss = policy(tokens, self.options)
        per_token = policy_loss.loss * weights
        if inputs.ref_log_probs is not None or len(outputs) > 2:
            kl = self._kl(outputs, old, inputs.ref_log_probs)
            if self.kl_coefficient:
                per_token = per_token + self.kl_coefficient * kl
        if sums is not None:
            sums.add_mean("ratio", policy_loss.ratio)
            sums.add_max("ratio_deviation_max", (policy_loss.ratio - 1).abs())
            sums.add_mean("clip_fraction_low", policy_loss.clipped_low)
            sums.add_mean("clip_fraction_high", policy_loss.clipped_high)
            sums.add_mean("kl_old", kl_estimate(old, current, "k3"))
            if inputs.ref_log_probs is not None or len(outputs) > 2:
                sums.add_mean("kl_ref", kl)
            if inputs.groups is not None and inputs.ref_log_probs is not None:
                pair_values, occurs = pair_metrics(tokens, self.options.beta)
                for name, values in pair_values.items():
                    sums.add_mean(name, values, occurs)
        return per_token

    def _kl(self, outputs: torch.Tensor, old: torch.Tensor, ref_log_probs: torch.Tensor | None) -> torch.Tensor:
        if len(outputs) > 2:
            return outputs[2]
        assert ref_log_probs is not None
        sampled_at = old if self.kl_unbiased else None
        return kl_estimate(outputs[0], ref_log_probs, self.kl_estimator, sampled_at)

    def _correction(
        self, current: torch.Tensor, old: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None
    ) -> torch.Tensor:
        """Returns the importance weights that correct for the engine's probabilities, [tokens], without a graph."""
        assert inputs.advantages is not None
        sequences, options = inputs.sequences, self.correction_options
        nowhere = torch.zeros_like(current, dtype=torch.bool)
        correction = Correction(torch.ones_like(current), nowhere, nowhere)
        log_rho = None
        if inputs.rollout_log_probs is not None:
            log_rho = (current if inputs.old_is_rollout else old) - inputs.rollout_log_probs
            if self.correction != "none":
                correction = CORRECTIONS[self.correction](log_rho, sequences, options)
            if options.veto_below is not None:
                correction = correction.dropping(~kept_by_veto(log_rho, sequences, options.veto_below))
        if options.opsm_threshold is not None:
            sampled = old if inputs.rollout_log_probs is None else inputs.rollout_log_probs
            kept = kept_by_opsm(current, sampled, inputs.advantages, sequences, options.opsm_threshold)
            correction = correction.dropping(~kept)
        if sums is not None:
            self._report_correction(correction, log_rho, sequences, sums)
        return correction.weights

    def _report_correction(
        self, correction: Correction, log_rho: torch.Tensor | None, sequences: Sequences, sums: MetricSums
    ) -> None:
        statistics: Statistics = {}
        if log_rho is not None:
            statistics |= mismatch_statistics(log_rho, sequences)
            statistics["rollout_mismatch"] = Statistic("mean", log_rho.abs())
            statistics["rollout_mismatch_max"] = Statistic("max", log_rho.abs())
        options = self.correction_options
        if self.correction != "none" or options.veto_below is not None or options.opsm_threshold is not None:
            statistics |= correction_statistics(correction, sequences)
        for name, (kind, values, counted) in statistics.items():
            (sums.add_mean if kind == "mean" else sums.add_max)(name, values, counted)
