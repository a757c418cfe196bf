"""The cost of a sample follows from the FLOPs of the model that computes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.cost import STRATEGIES, CostModel, Strategy
from slimefsdp.model_spec import ModelSpec

MODEL = ModelSpec(
    hidden=64, layers=6, heads=8, kv_heads=2, head_dim=16, intermediate=160, vocab=1000, window=100, windowed_layers=4
)


def flops_of(tokens: int, model: ModelSpec) -> float:
    """A forward pass, product by product, position by position."""
    layer = 2 * tokens * model.hidden * (2 * model.heads + 2 * model.kv_heads) * model.head_dim  # q, k, v, output
    layer += 2 * tokens * 3 * model.hidden * model.intermediate * model.active_experts
    positions = np.arange(1, tokens + 1)
    whole, windowed = positions.sum(), np.minimum(positions, model.window).sum()
    attention = 4 * model.heads * model.head_dim  # a pair: one product with a key, one with a value
    pairs = (model.layers - model.windowed_layers) * whole + model.windowed_layers * windowed
    return float(model.layers * layer + attention * pairs + 2 * tokens * model.hidden * model.vocab)


def test_the_default_is_a_plain_model_of_hidden_size_2048_without_its_head() -> None:
    plain = ModelSpec(
        hidden=2048, layers=24, heads=16, kv_heads=16, head_dim=128, intermediate=8192, vocab=0, mlp_matrices=2
    )
    assert CostModel.of_model(plain).quadratic == pytest.approx(CostModel().quadratic, rel=1e-12)
    eight_key_heads = ModelSpec(
        hidden=2048, layers=1, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=0, mlp_matrices=2
    )
    assert CostModel.of_model(eight_key_heads).comm == pytest.approx(CostModel().comm, rel=0.1)


@given(parts=st.lists(st.integers(0, 3000), min_size=1, max_size=6))
def test_the_work_of_a_sequence_is_that_of_its_parts(parts: list[int]) -> None:
    cost = CostModel.of_model(MODEL)
    bounds = np.cumsum([0, *parts])
    assert np.diff(cost.cost(bounds)).sum() == pytest.approx(cost.cost(bounds[-1:])[0], rel=1e-12)
    assert (np.diff(cost.cost(bounds)) >= 0).all()


def test_cp_ranks_share_a_sample_and_only_what_is_cut_is_sent() -> None:
    cost = CostModel(linear=1.0, quadratic=0.001, comm=0.5)
    lengths = np.array([10, 100, 101, 1000])
    shared = cost.cost_after_split(lengths, cp=4, is_cut=lengths > 100)
    assert shared[:2].tolist() == (cost.cost(lengths)[:2] / 4).tolist()
    assert shared[2:].tolist() == ((cost.cost(lengths)[2:] + 0.5 * 3 * lengths[2:]) / 4).tolist()
    assert np.array_equal(cost.cost_after_split(lengths, cp=1, is_cut=lengths > 100), cost.cost(lengths))


def test_sending_costs_what_the_strategy_sends() -> None:
    comm = {strategy: CostModel.of_model(MODEL, strategy=strategy).comm for strategy in STRATEGIES}
    # bytes per element: the ring sends keys and values twice in two bytes, and gradients in four
    assert comm["ring"] / comm["all_gather"] == pytest.approx(8 / 6)
    assert comm["ulysses"] == 0
    assert CostModel.of_model(MODEL, flops_per_byte=4000).comm == pytest.approx(4 * comm["ring"])
    # a step's bytes over its FLOPs: those of the formula, per token and rank
    elements = 2 * MODEL.kv_heads * MODEL.head_dim * MODEL.layers
    matrices = flops_of(1, MODEL) - 4 * MODEL.heads * MODEL.head_dim * MODEL.layers
    assert comm["ring"] == pytest.approx(1000 * elements * (2 + 2 + 4) / (3 * matrices), rel=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_ulysses_only_the_matrices_follow_the_owner_of_a_token(strategy: Strategy) -> None:
    cost = CostModel.of_model(MODEL, strategy=strategy)
    lengths = np.array([10, 5000])
    if strategy == "ulysses":
        assert cost.of_owner().cost(lengths).tolist() == [10, 5000]
    else:
        assert cost.of_owner() == cost
