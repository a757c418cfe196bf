"""A schedule adds up the packs of a plan, and attention sends what the formula says, on ranks that really send it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.attention.call_plan import AttentionParams
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice, repeated_kv_heads
from slimefsdp.batching.cost import STRATEGIES, CostModel, Strategy
from slimefsdp.batching.cp_sharding import Layout, hybrid_layout, sent_rows, tokens_of, zigzag_layout
from slimefsdp.batching.packing import pack
from slimefsdp.batching.prefix_tree import Forest
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError
from slimefsdp.estimate.schedule import Schedule, draw_lengths, measure_schedule, read_samples
from slimefsdp.estimate.setup import ByteSizes, MeshShape, TrainingSetup, setup_of
from slimefsdp.estimate.traffic import attention_comm_bytes
from slimefsdp.model_spec import ModelSpec
from slimefsdp.training.metrics import Throughput
from slimefsdp.training.plan import plan_training
from tests.support.plans import plan_of
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused

MODEL = ModelSpec(
    hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128_256, is_tied=True
)
LENGTHS = draw_lengths("lognormal(1500, 1.0, 16, 8000)", 150, seed=3)
FOREST = Forest(parents=(None, 0, 0, None, 3, 4), depths=(0, 150, 150, 0, 3, 67))


def scheduled(
    mesh: MeshShape, lengths: np.ndarray = LENGTHS, strategy: Strategy = "ring", cap: int = 8192, **how: Any
) -> Schedule:
    cost = CostModel.of_model(MODEL, strategy=strategy)
    counted = how.pop("counted_share", 1.0)
    plan = plan_of(lengths, dp=mesh.data_ranks, max_pack_tokens=cap * mesh.cp, cost_model=cost, cp=mesh.cp, **how)
    setup = TrainingSetup(MODEL, mesh)
    return measure_schedule(plan, lengths, setup, strategy=strategy, cost=cost, counted_share=counted)


def batch_of_groups() -> RolloutBatch:
    """Groups of eight samples with a prompt in common; the first group's rewards are equal."""
    rng = np.random.default_rng(5)
    prompts = rng.integers(3, 100, (6, 400)).tolist()
    return RolloutBatch.from_samples(
        {
            "tokens": [*prompts[group], *rng.integers(3, 100, length).tolist()],
            "response_length": length,
            "reward": float(group > 0 and rng.random()),
            "group_id": group,
            "loss_mask": [token % 5 > 0 for token in range(length)],
        }
        for group in range(6)
        for length in rng.integers(20, 200, 8).tolist()
    )


@pytest.mark.parametrize("how", ["always", "never"])
@pytest.mark.parametrize("mesh", [MeshShape(dp=2), MeshShape(dp_replicate=2, cp=2)], ids=str)
def test_a_schedule_adds_up_the_packs_that_training_computes(mesh: MeshShape, how: str) -> None:
    model = ModelSpec(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)
    batch = batch_of_groups()
    config = config_from_dict(
        {
            "model": {"path": "unread"},
            "optim": {"total_updates": 10},
            "mesh": {"dp_replicate": mesh.dp_replicate, "dp": mesh.dp, "cp": mesh.cp},
            "batch": {"max_tokens_per_rank": 2048, "samples_per_update": 20, "share_prefixes": how},
        }
    )
    setup, cost = setup_of(config, model, mesh, on_cpu=True), CostModel.of_model(model)
    plan = plan_training(config, batch, cost)
    share = float(batch.mask.sum() / batch.num_tokens)
    found = measure_schedule(plan, batch.lengths, setup, strategy="ring", cost=cost, counted_share=share)
    packs = [
        pack(batch, samples, trained_only=False, shared=plan.shared)
        for update in plan.updates for of_rank in update for samples in of_rank if len(samples)
    ]  # fmt: skip
    assert [update.micro_batches for update in found.updates] == [len(update[0]) for update in plan.updates]
    assert found.samples == 40 and len(found.updates) == 3, "the first group is left out"
    assert found.computed_tokens == sum(len(one.tokens) for one in packs) <= found.tokens
    assert (found.computed_tokens < 0.7 * found.tokens) == (how == "always")
    layouts = [hybrid_layout(one.cu_seqlens, mesh.cp, cost, one.forest) for one in packs]
    assert found.largest.tokens == max(max(tokens_of(layout)) for layout in layouts) <= 2048
    sent = np.zeros(2)
    for layout, one in zip(layouts, packs, strict=True):
        parents = None if one.forest is None else one.forest.parents
        sent += attention_comm_bytes(layout, "ring", model, setup.sizes, parents)
    assert found.comm["ring"] == tuple(sent / 3)
    throughput = Throughput(mesh.ranks, model, has_vocabulary_head=False)
    tflops = throughput.metrics(plan, batch, 1.0, updates=range(3))["tflops_per_rank"]
    needed = (found.needed_flops.layers + found.needed_flops.attention) * 3
    assert needed / mesh.ranks / 1e12 == pytest.approx(tflops, rel=1e-12)
    assert found.forward_flops.head * 3 / (2 * 100 * 64) == pytest.approx(found.tokens * share, abs=1)


def test_a_strategy_that_cannot_divide_the_heads_is_left_out_or_refused_when_chosen() -> None:
    assert scheduled(MeshShape(cp=5)).comm["ulysses"] is None
    with refused(ConfigError, "attention.strategy", 32, "mesh.cp=5"):
        scheduled(MeshShape(cp=5), strategy="ulysses")


def layouts_of(lengths: Sequence[int], cp: int, forest: Forest | None = None) -> list[Layout]:
    cu = [0, *accumulate(lengths)]
    return [zigzag_layout(cu, cp), hybrid_layout(cu, cp, forest=forest)]


def messages(layout: Layout, strategy: Strategy, heads: int, kv_heads: int) -> tuple[int, int]:
    """Counts (forward, backward) bytes message by message, for heads of 16 in bfloat16 with float32 gradients."""
    rows, tokens, cp = sent_rows(layout), tokens_of(layout), len(layout)
    pairs = [(sender, receiver) for sender in range(cp) for receiver in range(cp) if sender != receiver]
    keys = 2 * kv_heads * 16
    if strategy == "ring":  # every rank passes on what it holds until all have seen it; gradients follow home
        hops = [rows[source] for source in range(cp) for _hop in range(cp - 1)]
        return sum(hops) * keys * 2, sum(hops) * keys * (2 + 4)
    if strategy == "all_gather":
        return sum(rows[s] for s, _ in pairs) * keys * 2, sum(rows[r] for _, r in pairs) * keys * 4
    of_inputs = (heads + 2 * repeated_kv_heads(heads, kv_heads, cp)) // cp * 16 * 2  # q, k, v of the receiver's heads
    one_way = sum(tokens[s] * of_inputs + tokens[r] * heads // cp * 16 * 2 for s, r in pairs)
    return one_way, one_way


@given(
    lengths=st.lists(st.integers(1, 80), min_size=1, max_size=10),
    cp=st.sampled_from([1, 2, 3, 4, 6]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
)
def test_the_formula_counts_what_is_sent(lengths: list[int], cp: int, kv_heads: int) -> None:
    model = ModelSpec(64, 1, 12, kv_heads, 16, 64, 97)
    for layout in layouts_of(lengths, cp):
        for strategy in STRATEGIES:
            found = attention_comm_bytes(layout, strategy, model, ByteSizes())
            assert found == messages(layout, strategy, 12, kv_heads)


def really_sent(
    rank: int, lengths: Sequence[int], strategy: Strategy, dtype: torch.dtype, forest: Forest | None
) -> list[tuple[int, int]]:
    """Returns the (forward, backward) bytes that this rank's attention counted, of both layouts."""
    sent = []
    parents = None if forest is None else forest.parents
    for layout in layouts_of(lengths, dist.get_world_size(), forest):
        attention = Attention(Choice(strategy, "test"), dist.group.WORLD)
        attend, comm = attention.for_pack(layout, torch.device("cpu"), parents), attention.comm
        assert comm is not None
        tokens = tokens_of(layout)[rank]
        q, k, v = (torch.randn(tokens, heads, 16, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
        out = attend(q, k, v, AttentionParams(scale=0.25), None)
        forward = comm.sent_bytes
        out.sum().backward()
        sent.append((forward, comm.sent_bytes - forward))
    return sent


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "forest"), [(torch.bfloat16, None), (torch.float64, None), (torch.float32, FOREST)])
def test_the_formula_is_what_ranks_really_send(
    ranks: RankPool, world_size: int, strategy: Strategy, dtype: torch.dtype, forest: Forest | None
) -> None:
    lengths, model = [150, 31, 9, 3, 64, 1], ModelSpec(128, 1, 8, 2, 16, 64, 97)
    counted = np.array(ranks.run(world_size, really_sent, lengths, strategy, dtype, forest)).sum(axis=0)
    parents = None if forest is None else forest.parents
    for layout, found in zip(layouts_of(lengths, world_size, forest), counted.tolist(), strict=True):
        expected = attention_comm_bytes(layout, strategy, model, ByteSizes(compute=dtype.itemsize), parents)
        assert tuple(found) == expected and min(expected) > 0


def test_distributions_have_the_shape_they_are_named_by() -> None:
    assert draw_lengths("fixed(512)", 3).tolist() == [512] * 3
    uniform = draw_lengths("uniform(10, 20)", 5000)
    assert set(uniform) == set(range(10, 21))
    drawn = draw_lengths("lognormal(1000, 0.8)", 200_000)
    assert drawn.dtype == np.int64 and drawn.min() >= 1
    assert drawn.mean() == pytest.approx(1000, rel=0.02) and np.log(drawn).std() == pytest.approx(0.8, rel=0.02)
    cut = draw_lengths(" lognormal( 1000 ,0.8, 900, 1100) ", 1000)
    assert (cut.min(), cut.max()) == (900, 1100)


def test_files_give_the_lengths_that_they_hold(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([5, 3, 1024]))
    lengths = read_samples(str(tmp_path / "lengths.json"), 99)
    assert isinstance(lengths, np.ndarray) and lengths.tolist() == [5, 3, 1024]
    batch = RolloutBatch.from_samples(
        [
            {"tokens": list(range(2, 2 + length)), "response_length": 1, "reward": 0.0, "group_id": 0}
            for length in (4, 9)
        ]
    )
    batch.save(tmp_path / "batch.safetensors")
    loaded = read_samples(str(tmp_path / "batch.safetensors"), 99)
    assert isinstance(loaded, RolloutBatch) and loaded.same_as(batch)


@pytest.mark.parametrize(
    "text",
    [
        "fixed()", "fixed(0)", "fixed(1.5)", "fixed(nan)", "fixed(1e30)", "uniform(5, 3)", "uniform(1, inf)",
        "lognormal(100)", "lognormal(100, -1)", "lognormal(100, 1, 9, 3)", "gamma(1, 2)", "nothing.json", "", "a\0b",
        "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_neither_a_distribution_nor_a_file_is_answered_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_samples(text, 10)
    assert caught.value.field == "--lengths" and repr(text) in caught.value.message
    assert caught.value.hint
