"""One micro-batch's training loss: policy loss, KL and entropy terms under the update's token weights.

The weights were decided for the whole update (`reduce.py`), so the loss of an update is the plain sum of its
micro-batches' losses over all ranks, and gradients simply add.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Literal

import torch

from slimefsdp.loss.kl import KLEstimator, kl_estimate
from slimefsdp.loss.policy import clipped_policy_loss, cross_entropy_loss

if TYPE_CHECKING:  # a name for mypy only: metrics are reduced over ranks, and losses know none
    from slimefsdp.metrics import MetricSums

LossName = Literal["policy", "sft"]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What the loss reads about each token; all [tokens], None where nothing reads it."""

    weights: torch.Tensor
    advantages: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None  # None: the current ones, detached
    ref_log_probs: torch.Tensor | None = None
    rollout_log_probs: torch.Tensor | None = None  # metrics only

    def at(self, index: torch.Tensor) -> TokenInputs:
        """The tokens at `index` [pairs]."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value[index] for name, value in given.items() if value is not None})

    def to(self, device: torch.device, dtype: torch.dtype) -> TokenInputs:
        """On `device`, as `dtype`."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device, dtype) for name, value in given.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Objective:
    """The terms of the loss and their coefficients."""

    loss: LossName
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coefficient: float = 0.0
    kl_estimator: KLEstimator = "k3"
    entropy_coefficient: float = 0.0
    old_is_rollout: bool = False  # the old log-probs are the engine's, so its mismatch shows in the current ones

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None = None
    ) -> torch.Tensor:
        """The 0-d loss of one pack; differentiable in log_probs [tokens] and, with a coefficient, entropy [tokens].

        Args:
            sums: where metrics are added.
        """
        is_sft = self.loss == "sft"
        per_token = cross_entropy_loss(log_probs) if is_sft else self._policy_terms(log_probs, inputs, sums)
        if self.entropy_coefficient:
            per_token = per_token - self.entropy_coefficient * entropy
        loss = (inputs.weights * per_token).sum()
        if sums is not None:
            sums.add_total("loss", loss)
            sums.add_mean("entropy", entropy)
            sums.add_total("tokens", torch.tensor(float(log_probs.numel())))
        return loss

    def _policy_terms(self, log_probs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None) -> torch.Tensor:
        assert inputs.advantages is not None
        current = log_probs.detach()
        old = current if inputs.old_log_probs is None else inputs.old_log_probs
        policy = clipped_policy_loss(log_probs, old, inputs.advantages, self.clip_low, self.clip_high)
        per_token = policy.loss
        if inputs.ref_log_probs is not None:
            kl = kl_estimate(log_probs, inputs.ref_log_probs, self.kl_estimator)
            per_token = per_token + self.kl_coefficient * kl
            if sums is not None:
                sums.add_mean("kl_ref", kl)
        if sums is not None:
            sums.add_mean("ratio", policy.ratio)
            sums.add_max("ratio_deviation_max", (policy.ratio - 1).abs())
            sums.add_mean("clip_fraction_low", policy.clipped_low)
            sums.add_mean("clip_fraction_high", policy.clipped_high)
            if inputs.rollout_log_probs is not None:
                mismatch = ((current if self.old_is_rollout else old) - inputs.rollout_log_probs).abs()
                sums.add_mean("rollout_mismatch", mismatch)
                sums.add_max("rollout_mismatch_max", mismatch)
        return per_token
