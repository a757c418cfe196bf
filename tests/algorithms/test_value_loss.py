"""The value loss against the formula token by token, and metrics that do not depend on how tokens were split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.algorithms.objective import TokenInputs
from slimefsdp.algorithms.value_loss import ValueObjective, clipped_value_loss, value_metrics

CLIP = 0.2
NUMBER = st.floats(-3, 3)
TOKENS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), min_size=1, max_size=30)  # value, old value, return


def columns(tokens: list[tuple[float, float, float]]) -> list[torch.Tensor]:
    return list(torch.tensor(tokens, dtype=torch.float64).unbind(1))


def by_the_formula(value: float, old: float, target: float) -> tuple[float, float, bool]:
    """(loss, d loss / d value, whether the clip decided) of one token."""
    bounded = min(max(value, old - CLIP), old + CLIP)
    if (bounded - target) ** 2 > (value - target) ** 2:
        return 0.5 * (bounded - target) ** 2, 0.0, True
    return 0.5 * (value - target) ** 2, value - target, False


@given(TOKENS)
def test_loss_gradient_and_flag_are_the_formula_token_by_token(tokens: list[tuple[float, float, float]]) -> None:
    values, old, returns = columns(tokens)
    values.requires_grad_()
    loss, clipped = clipped_value_loss(values, old, returns, CLIP)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    expected = [by_the_formula(*token) for token in tokens]
    np.testing.assert_allclose(loss.detach(), [found[0] for found in expected], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(gradient, [found[1] for found in expected], rtol=1e-12, atol=1e-14)
    assert clipped.tolist() == [found[2] for found in expected]


class Sums:
    """What `MetricSums` does, written plainly."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self.values: dict[str, list[float]] = {}

    def add_total(self, name: str, value: torch.Tensor) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value.item()

    def add_mean(self, name: str, values: torch.Tensor) -> None:
        self.values.setdefault(name, []).extend(values.double().tolist())

    def reduced(self) -> dict[str, float]:
        return self.totals | {name: float(np.mean(values)) for name, values in self.values.items() if values}


def objective_over(splits: list[slice], inputs: TokenInputs, values: torch.Tensor, clip: float | None) -> Any:
    sums, loss = Sums(), torch.zeros((), dtype=torch.float64)
    for split in splits:
        index = torch.arange(len(values))[split]
        loss = loss + ValueObjective(clip)(values[None, index], inputs.at(index), sums)  # type: ignore[arg-type]
    return loss, value_metrics(sums.reduced())


def some_inputs(count: int = 40) -> tuple[TokenInputs, torch.Tensor]:
    rng = np.random.default_rng(0)
    old, returns, noise = (torch.tensor(rng.normal(size=count)) for _ in range(3))
    weights = torch.tensor(rng.random(count))
    inputs = TokenInputs(weights, torch.zeros(count, dtype=torch.int64), 1, old_values=old, returns=returns * 2 + 5)
    return inputs, 0.5 * returns + noise


@pytest.mark.parametrize("clip", [CLIP, None])
def test_the_loss_weighs_tokens_and_packs_add_up(clip: float | None) -> None:
    inputs, values = some_inputs()
    whole, metrics = objective_over([slice(None)], inputs, values, clip)
    assert inputs.old_values is not None and inputs.returns is not None
    found = clipped_value_loss(values, inputs.old_values, inputs.returns, clip)
    np.testing.assert_allclose(whole, float((inputs.weights * found.loss).sum()), rtol=1e-12)
    assert metrics["clip_fraction"] == float(found.clipped.double().mean()) and metrics["tokens"] == 40
    # packs of unequal sizes, one of them without a token
    parts, split = objective_over([slice(0, 3), slice(3, 3), slice(3, 40)], inputs, values, clip)
    np.testing.assert_allclose(parts, whole, rtol=1e-12)
    assert split.keys() == metrics.keys()
    np.testing.assert_allclose([split[name] for name in metrics], list(metrics.values()), rtol=1e-12)


def test_explained_variance_is_that_of_all_tokens_together() -> None:
    inputs, values = some_inputs()
    _, metrics = objective_over([slice(0, 7), slice(7, 40)], inputs, values, CLIP)
    assert inputs.returns is not None
    returns, ours = inputs.returns.numpy(), values.numpy()
    np.testing.assert_allclose(metrics["explained_variance"], 1 - np.var(returns - ours) / np.var(returns), rtol=1e-10)
    np.testing.assert_allclose([metrics["value"], metrics["return"]], [ours.mean(), returns.mean()], rtol=1e-12)
    assert metrics.keys() == {"loss", "tokens", "clip_fraction", "value", "return", "explained_variance"}
