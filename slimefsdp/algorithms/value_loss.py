"""Computes the critic's loss, one number per token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from slimefsdp.algorithms.objective import MetricSums, TokenInputs

# names of the means from which `value_metrics` computes variances
_SQUARES = ("return_square", "value_error", "value_error_square")


class ValueLoss(NamedTuple):
    """Holds the result of a value loss; both fields are [tokens], and only `loss` carries a graph."""

    loss: torch.Tensor
    clipped: torch.Tensor  # bool, True where clipping stops the gradient


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> ValueLoss:
    """Returns 0.5 max((v - R)^2, (v' - R)^2), where v' is v clipped to within `clip` of the value before the step.

    A value that has moved by `clip` or more towards its return gets no gradient. A value that has moved away does.
    This is the value loss of OpenAI's baselines (ppo2); the squared error is in equation 9 of PPO (arXiv 1707.06347).

    Args:
        values: [tokens], with their graph.
        old_values: [tokens], the values before the step, without a graph.
        returns: [tokens], without a graph.
        clip: in the unit of the returns; None disables clipping, and the loss is half the squared error.
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
    """Computes the critic's loss of a pack under the update's token weights; has the interface of `Objective`."""

    clip: float | None = 0.2

    def __call__(self, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums | None = None) -> torch.Tensor:
        """Returns the 0-d loss of one pack.

        Args:
            outputs: [1, tokens], the critic's values, with their graph.
            sums: receives the metrics; `value_metrics` completes them after the reduction.
        """
        values, returns = outputs[0], inputs.returns
        assert returns is not None and inputs.old_values is not None
        value_loss = clipped_value_loss(values, inputs.old_values, returns, self.clip)
        loss = (inputs.weights * value_loss.loss).sum()
        if sums is not None:
            error = (returns - values).detach().double()
            sums.add_total("loss", loss)
            sums.add_mean("clip_fraction", value_loss.clipped)
            sums.add_mean("value", values)
            sums.add_mean("return", returns)
            for name, squares in zip(_SQUARES, (returns.double().square(), error, error.square()), strict=True):
                sums.add_mean(name, squares)
            sums.add_total("tokens", values.new_full((), values.numel()))
        return loss


def value_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of an update, adding `explained_variance`, 1 - Var(R - v) / Var(R).

    The explained variance is 1 if the values are exact, 0 if a constant is as good, and absent if returns do not vary.

    Args:
        means: the reduced sums of `ValueObjective`.
    """
    metrics = {name: value for name, value in means.items() if name not in _SQUARES}
    if "return" in means:
        squares, error, error_squares = (means[name] for name in _SQUARES)
        variance = squares - means["return"] ** 2
        if variance > 1e-12 * squares:  # smaller values are rounding errors
            metrics["explained_variance"] = 1 - (error_squares - error**2) / variance
    return metrics
