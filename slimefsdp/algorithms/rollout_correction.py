"""Corrects for the difference between the rollout engine's token probabilities and the trainer's.

rho of a token is its probability under the trainer at the start of the step / its probability under the engine;
log_rho is old_log_probs - rollout_log_probs, in nats. A correction is a weight on each token's policy loss. A dropped
token has weight 0 but stays in the denominators of `reduction.py`, which are computed before any log-prob is known.

Weighting by rho while clipping the ratio to the old policy is decoupled PPO (arXiv 2110.00641; for stale data AReaL,
arXiv 2505.24298): the old policy is the proximal policy, the engine's the behaviour policy.

Nothing here carries a graph. rho may be infinite, and a pack may have no tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from slimefsdp.algorithms.policy_losses import Sequences


@dataclass(frozen=True, slots=True)
class CorrectionOptions:
    """Holds the bounds on rho and the other criteria that drop sequences; None: no bound."""

    low: float | None = None
    high: float | None = None
    veto_below: float | None = None  # for `kept_by_veto`
    opsm_threshold: float | None = None  # for `kept_by_opsm`


class Correction(NamedTuple):
    """Holds the result of a correction; every field is [tokens]."""

    weights: torch.Tensor
    below: torch.Tensor  # bool, dropped because the rho of the token or of its sequence is below `low`
    above: torch.Tensor  # bool, truncated or dropped because this rho is above `high`

    def dropping(self, dropped: torch.Tensor) -> Correction:
        """Returns the same correction with weight 0 where `dropped`, [tokens] bool, is True."""
        return self._replace(weights=self.weights.masked_fill(dropped, 0.0))


def _truncated(rho: torch.Tensor, options: CorrectionOptions) -> Correction:
    assert options.high is not None
    return Correction(rho.clamp(max=options.high), torch.zeros_like(rho, dtype=torch.bool), rho > options.high)


def _masked(rho: torch.Tensor, judged: torch.Tensor, options: CorrectionOptions) -> Correction:
    """Returns the weight `rho` where `judged` is within the bounds, else 0."""
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
| mis           | rho                | tokens of rho > high dropped, and < low if that is set    | rl-collapse      |
| icepop        | rho                | tokens of rho outside [low, high] dropped                 | arXiv 2510.18855 |
| sequence_tis  | min(product, high) | truncated above                                           | rl-collapse      |
| sequence_mis  | product            | sequences of such a product dropped, as tokens under mis  | rl-collapse      |
| geometric_mis | rho                | sequences of a geometric mean outside [low, high] dropped | rl-collapse      |

The product and the geometric mean are those of rho over a sequence. off-policy-rl is
https://fengyao.notion.site/off-policy-rl, rl-collapse https://richardli.xyz/rl-collapse.
"""


def kept_by_veto(log_rho: torch.Tensor, sequences: Sequences, veto_below: float) -> torch.Tensor:
    """Returns False for all tokens of sequences in which any token's rho is below `veto_below`; [tokens] bool.

    A token that the trainer would almost never have sampled spoils all that follows it (rl-collapse, as above).
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
        behaviour_log_probs: [tokens]; the paper uses the engine's, so that mismatch and staleness both count.
    """
    divergence = sequences.spread(sequences.mean(behaviour_log_probs - log_probs))
    return (advantages >= 0) | (divergence <= opsm_threshold)


class Statistic(NamedTuple):
    """Holds a quantity whose mean or maximum over the update is reported."""

    kind: Literal["mean", "max"]
    values: torch.Tensor  # one per token, or one per sequence of `Sequences`
    counted: torch.Tensor | None = None  # bool per value, False for sequences without tokens in the pack; None: all


Statistics = dict[str, Statistic]


def mismatch_statistics(log_rho: torch.Tensor, sequences: Sequences) -> Statistics:
    """Measures how far the engine's probabilities are from the trainer's, before any correction.

    | name                     | value per token, or per sequence (s), of which the mean or maximum is reported     |
    |--------------------------|------------------------------------------------------------------------------------|
    | rollout_k1, rollout_k3   | -log rho; rho - 1 - log rho: estimates of KL(engine, trainer), nats a token        |
    | rollout_rho              | rho; its mean is 1 if the engine samples from the probabilities that it reports    |
    | rollout_chi2             | rho^2 - 1; its mean is the chi-square divergence                                   |
    | rollout_log_ppl_diff     | (s) the sequence's mean of -log rho: log perplexity of the trainer - of the engine |
    | rollout_log_ppl_diff_max | (s) its absolute value                                                             |

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
    """Measures the effect of a correction, whose weights a veto or OPSM may have zeroed further.

    | name                         | value per token, or per sequence (s), of which the mean is reported        |
    |------------------------------|----------------------------------------------------------------------------|
    | correction_weight            | the weight                                                                 |
    | correction_below             | 1 where dropped because rho, or the sequence's, is below `low`             |
    | correction_above             | 1 where truncated or dropped because it is above `high`                    |
    | correction_dropped           | 1 where the weight is 0, for whatever reason                               |
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
