"""Computes one micro-batch's training loss: policy loss, KL and entropy terms under the update's token weights.

Token weights are computed for the whole update (`reduction.py`), so the loss of an update is the sum of the losses of
its micro-batches over all ranks, and gradients simply add. A pack holds whole samples, so that losses of whole
sequences have all their tokens here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from slimefsdp.algorithms.kl import kl_estimate
from slimefsdp.algorithms.policy_losses import (
    PolicyLossFunction,
    PolicyOptions,
    PolicyTokens,
    Sequences,
    cross_entropy_loss,
    pair_metrics,
)
from slimefsdp.algorithms.rollout_correction import (
    CORRECTIONS,
    Correction,
    CorrectionOptions,
    Statistic,
    Statistics,
    correction_statistics,
    kept_by_opsm,
    kept_by_veto,
    mismatch_statistics,
)
from slimefsdp.batching.packing import on_device

if TYPE_CHECKING:  # losses must not import the code that reduces metrics over ranks
    from slimefsdp.training.metrics import MetricSums


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Holds the losses' inputs of each token; every tensor is [tokens], and None if the loss does not read it."""

    weights: torch.Tensor
    sample_ids: torch.Tensor  # int64, below num_samples
    num_samples: int  # of the whole batch
    group_ids: torch.Tensor | None = None  # int64, below num_samples; for losses that compare pairs
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None  # None: the current log-probs, detached
    old_is_rollout: bool = False  # old_log_probs are the engine's; the current ones then measure the mismatch
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None  # for corrections and metrics
    old_values: torch.Tensor | None = None  # the critic's values before the step
    returns: torch.Tensor | None = None  # the targets of the critic's values

    def at(self, index: torch.Tensor) -> TokenInputs:
        """Returns the inputs of the tokens at `index`, int64 [pairs]."""
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


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes a policy's loss from its terms and their coefficients."""

    policy: PolicyLossFunction | None  # None: supervised training on the cross-entropy of each token
    options: PolicyOptions = field(default_factory=PolicyOptions)
    looks_at_sequences: bool = False  # the loss of a token may depend on other tokens of its sequence
    correction: str = "none"  # or a key of CORRECTIONS
    correction_options: CorrectionOptions = field(default_factory=CorrectionOptions)
    kl_coefficient: float = 0.0  # of the KL term in the loss
    kl_estimator: str = "k3"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    trains_without_advantage: bool = False  # a token of advantage 0 has a gradient

    def __call__(self, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None = None) -> torch.Tensor:
        """Returns the 0-d loss of one pack.

        Args:
            outputs: [2 or 3, tokens], the policy's log-probs and entropies, and under kl_estimator "full" the KL over
                the whole vocabulary. The log-probs carry a graph; the others do if a term of the loss reads them.
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
