"""What the simulator reports is what planning, layouts and formulas give, and mixed lengths come out even."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.cost import CostModel, Strategy
from slimefsdp.batching.cp_sharding import hybrid_layout, layout_time, tokens_of
from slimefsdp.errors import BatchError, ConfigError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.lengths import sample_lengths
from slimefsdp.perf_model.memory import ByteSizes, Computing, MicroBatches, sharding_traffic, step_memory
from slimefsdp.perf_model.simulate import MeshShape, Simulation, attention_comm_bytes, simulate
from tests.support.plans import plan_of
from tests.support.refusals import refused
from tests.support.tiers import examples

ROOT = Path(__file__).parents[2]
MODEL = ModelSpec(
    hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128_256, is_tied=True
)
RECOMPUTED = Computing(recompute="full", recompute_every=2)
LENGTHS = sample_lengths("lognormal(1500, 1.0, 16, 20000)", 150, seed=3)


def simulated(mesh: MeshShape, lengths: np.ndarray = LENGTHS, **options: Any) -> Simulation:
    return simulate(lengths, MODEL, mesh, **{"max_tokens_per_rank": 8192, **options})


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_the_report_adds_up_the_packs_of_the_plan(strategy: Strategy) -> None:
    mesh = MeshShape(dp_replicate=2, dp=2, cp=4)
    found = simulated(mesh, strategy=strategy, samples_per_update=60, computing=RECOMPUTED)
    cost = CostModel.of_model(MODEL, strategy=strategy)
    plan = plan_of(LENGTHS, dp=4, max_pack_tokens=4 * 8192, samples_per_update=60, cost_model=cost, cp=4)
    assert [(u.samples, u.tokens, u.micro_batches) for u in found.updates] == [
        (len(plan.samples_of(u)), LENGTHS[plan.samples_of(u)].sum(), len(plan.updates[u][0])) for u in range(3)
    ]
    slowest = mean = 0.0
    tokens, sent = np.zeros((4, 4)), np.zeros(2)
    at_once = 0
    for update in plan.updates:
        times = np.zeros(4)
        for rank, packs in enumerate(update):
            for pack in packs:
                cu = [0, *accumulate(LENGTHS[pack].tolist())]
                layout = hybrid_layout(cu, 4, cost)
                times[rank] += layout_time(layout, cu, cost)
                tokens[rank] += tokens_of(layout)
                at_once = max(at_once, *tokens_of(layout))
                sent += attention_comm_bytes(
                    layout, strategy, heads=32, kv_heads=8, head_dim=64, bytes_per_element=2, grad_bytes_per_element=4
                )
        slowest, mean = slowest + times.max(), mean + times.mean()
    assert found.imbalance.data_ranks == pytest.approx(slowest / mean, rel=1e-12)
    assert found.tokens_per_rank == (tokens.min(), tokens.mean(), tokens.max())
    assert found.most_tokens_at_once == at_once <= 8192
    comm = found.comm[strategy]
    assert comm is not None and comm.forward == round(sent[0] * 1.5 / 3) and comm.backward == round(sent[1] / 3)
    assert found.attention_bytes_per_rank == comm.total * 16 // 16  # layers over ranks


def test_micro_batches_multiply_what_sharding_sends_and_the_largest_fills_memory() -> None:
    mesh, sizes = MeshShape(dp_replicate=2, dp=4), ByteSizes(optimizer_states=1)
    found = simulated(mesh, LENGTHS.clip(max=8000), samples_per_update=75, sharding="full", sizes=sizes)
    per_update = sum(update.micro_batches for update in found.updates) / 2
    assert len(found.updates) == 2 and per_update > 1
    each = sharding_traffic(MODEL, "full", dp_replicate=2, shard_ranks=4, sizes=sizes)
    assert found.sharding.total == pytest.approx(each.total * per_update, rel=1e-9)
    largest = MicroBatches(
        found.most_tokens_at_once, found.most_tokens_at_once, max(u.micro_batches for u in found.updates)
    )
    assert found.largest == largest
    for level, held in found.memory.items():
        assert held == step_memory(MODEL, level, largest, shard_ranks=4, copies=2, sizes=sizes)


def test_operations_are_those_of_an_update_and_fewer_where_fewer_tokens_count() -> None:
    whole, half = (simulated(MeshShape(dp=2), LENGTHS.clip(max=8000), counted_share=share) for share in (1.0, 0.5))
    assert whole.forward_flops.head == 2.0 * MODEL.vocab * MODEL.hidden * whole.tokens
    assert half.forward_flops.head == pytest.approx(whole.forward_flops.head / 2, rel=1e-4)  # of whole rows
    assert whole.forward_flops.layers == half.forward_flops.layers
    parts = simulated(MeshShape(dp=2), LENGTHS.clip(max=8000), samples_per_update=75)
    assert parts.needed_flops.total == pytest.approx(whole.needed_flops.total / 2)
    assert whole.needed_flops.total == pytest.approx(3 * whole.forward_flops.total)


def test_one_rank_has_nothing_to_balance_or_send() -> None:
    found = simulated(MeshShape(), LENGTHS.clip(max=8000))
    imbalance = found.imbalance
    assert imbalance.data_ranks == imbalance.micro_batches == 1
    assert imbalance.cp == imbalance.zigzag and imbalance.cp.tokens == imbalance.cp.worst_work == 1
    assert all(sent is not None and sent.total == 0 for sent in found.comm.values())
    assert found.sharding.total == 0 and found.tokens_per_rank[0] == found.tokens == LENGTHS.clip(max=8000).sum()


@given(
    seed=st.integers(0, 2**32 - 1),
    mean=st.sampled_from([500, 1000, 4000]),
    sigma=st.sampled_from([0.5, 0.8, 1.0, 1.2]),
    budget=st.sampled_from([4096, 8192]),
)
@examples(40)
def test_log_normal_lengths_are_within_five_percent_of_even_at_cp_8(
    seed: int, mean: int, sigma: float, budget: int
) -> None:
    lengths = sample_lengths(f"lognormal({mean}, {sigma}, 16, 32768)", 192, seed=seed)
    imbalance = simulated(MeshShape(dp=2, cp=8), lengths, max_tokens_per_rank=budget).imbalance
    assert max(imbalance.zigzag.tokens, imbalance.zigzag.pairs, imbalance.zigzag.work) <= 1.05
    assert max(imbalance.cp.worst_tokens, imbalance.cp.worst_work) <= 1.05, "not even in the worst pack"
    costs = CostModel.of_model(MODEL).cost(lengths)
    # one sample of 40 % of all work fills a pack, and the cap keeps the other rank from taking as much
    assert imbalance.data_ranks <= 1.05 or costs.max() > 0.1 * costs.sum()


def test_data_ranks_are_even_whether_packs_hold_one_long_sequence_or_many_short_ones() -> None:
    lengths = np.array([60_000, 45_000, *[512] * 1600])
    found = simulated(MeshShape(dp=4, cp=8), lengths)
    assert found.imbalance.data_ranks <= 1.05
    # by tokens alone the ranks with the long ones would be late: their attention costs as much as their matrices
    cost = CostModel.of_model(MODEL)
    assert cost.cost(lengths[:1])[0] / 60_000 > 1.5 * cost.cost(lengths[-1:])[0] / 512


def test_whole_sequences_save_traffic_and_long_ones_cannot() -> None:
    short = simulated(MeshShape(cp=8), np.full(512, 500)).comm["ring"]
    long = simulated(MeshShape(cp=8), np.array([60_000] * 4)).comm["ring"]
    assert short is not None and long is not None
    assert short.total == 0 and long.forward > 0
    assert long.backward == 3 * long.forward, "keys again, and their gradients in twice as many bytes"


def test_a_strategy_that_cannot_serve_the_model_is_left_out_or_refused_when_chosen() -> None:
    mesh = MeshShape(cp=5)
    assert simulated(mesh).comm["ulysses"] is None
    with pytest.raises(ConfigError) as caught:
        simulated(mesh, strategy="ulysses")
    assert caught.value.field == "attention.strategy"


def test_a_sample_over_the_budget_is_refused() -> None:
    with refused(BatchError, "batch.max_tokens_per_rank", "sample 0", 20_000):
        simulated(MeshShape(cp=2), np.array([20_000]))
