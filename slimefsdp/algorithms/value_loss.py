"""Computes the critic's loss, one number per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:  # names for mypy only: metrics are reduced over ranks, and losses know none
    from slimefsdp.algorithms.objective import TokenInputs
    from slimefsdp.training.metrics import MetricSums

# means that `value_metrics` makes variances of
_SQUARES = ("return_square", "value_error", "value_error_square")


class ValueLoss(NamedTuple):
    """What a value loss returns; both are [tokens], and only `loss` carries a graph."""

    loss: torch.Tensor
    clipped: torch.Tensor  # bool, the clip stops this token's gradient


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> ValueLoss:
    """Half the squared error, or the larger one of the clipped value: 0.5 max((v - R)^2, (v' - R)^2).

    v' is v, but no further than `clip` from the value before the step. So a value that has already moved that far
    towards its return gets no gradient, while one that moved away does. As OpenAI's baselines (ppo2) compute it; the
    squared error itself is equation 9 of PPO (arXiv 1707.06347).

    Args:
        values: [tokens], with their graph.
        old_values: [tokens], before the step, without a graph.
        returns: [tokens], without a graph.
        clip: in the unit of the returns; None: the squared error alone.
    """
    error = (values - returns).square()
    if clip is None:
        return ValueLoss(0.5 * error, torch.zeros_like(values, dtype=torch.bool))
    bounded = torch.clamp(values.detach(), old_values - clip, old_values + clip)
    bounded_error = (bounded - returns).square()
    clipped = bounded_error > error.detach()
    return ValueLoss(0.5 * torch.where(clipped, bounded_error, error), clipped)


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The critic's loss of a pack under the update's token weights; it is called like the policy's `Objective`."""

    clip: float | None = 0.2

    def __call__(self, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None = None) -> torch.Tensor:
        """Returns the 0-d loss of one pack.

        Args:
            outputs: of the critic, [1, tokens]: values, with their graph.
            sums: where metrics are added; `value_metrics` completes them once they are reduced.
        """
        values, returns = outputs[0], inputs.returns
        assert returns is not None and inputs.old_values is not None
        found = clipped_value_loss(values, inputs.old_values, returns, self.clip)
        loss = (inputs.weights * found.loss).sum()
        if sums is not None:
            error = (returns - values).detach().double()
            sums.add_total("loss", loss)
            sums.add_mean("clip_fraction", found.clipped)
            sums.add_mean("value", values)
            sums.add_mean("return", returns)
            for name, squares in zip(_SQUARES, (returns.double().square(), error, error.square()), strict=True):
                sums.add_mean(name, squares)
            sums.add_total("tokens", values.new_full((), values.numel()))
        return loss


def value_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an update from the sums that `ValueObjective` filled, with `explained_variance`.

    It is 1 - Var(R - v) / Var(R): 1 where values are right, 0 where a constant would do as well; absent where returns
    do not vary.

    Args:
        means: what `MetricSums.reduce` returned.
    """
    metrics = {name: value for name, value in means.items() if name not in _SQUARES}
    if "return" in means:
        squares, error, error_squares = (means[name] for name in _SQUARES)
        variance = squares - means["return"] ** 2
        if variance > 1e-12 * squares:  # less is what rounding leaves of none
            metrics["explained_variance"] = 1 - (error_squares - error**2) / variance
    return metrics
