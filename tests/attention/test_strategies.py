"""Ring, Ulysses and all-gather attention equal one process in outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from tests.support.all_pairs import all_pairs
from tests.support.attention_cases import (
    CPU,
    HEADS,
    Case,
    inputs,
    largest_differences,
)
from tests.support.rank_pool import RankPool
from tests.support.tiers import examples

STRATEGIES = ("ring", "ulysses", "all_gather")


def of_ranks(rank: int, case: Case, strategy: Any) -> list[torch.Tensor]:
    """The same over the ranks, put together again."""
    cp = dist.get_world_size()
    attention = Attention(Choice(strategy, "test"), dist.group.WORLD)
    layout = case.layout_over(cp)
    attend = attention.for_pack(layout, CPU, case.parents)
    rows = torch.tensor([t for piece in layout[rank] for t in range(piece.start, piece.end)], dtype=torch.int64)
    q, k, v, sinks, grad = inputs(case)
    leaves = [q[rows].requires_grad_(), k[rows].requires_grad_(), v[rows].requires_grad_()]
    sinks.requires_grad_()
    out = attend(*leaves, case.scoring(), sinks if case.sinks else None)
    out.backward(grad[rows])
    results = []
    for local, whole in zip([out.detach(), *(x.grad for x in leaves)], (q, q, k, v), strict=True):
        assert local is not None and local.dtype == case.dtype
        full = torch.zeros_like(whole, dtype=torch.float64)
        full[rows] = local.double()
        dist.all_reduce(full)
        results.append(full)
    if case.sinks:
        assert sinks.grad is not None
        total = sinks.grad.double()
        dist.all_reduce(total)
        results.append(total)
    return results


RAGGED = (33, 7, 1, 90, 2, 50, 3)
TREE = (40, 13, 1, 25, 30, 5, 9, 20), (None, 0, 0, 0, None, 4, 5, 5)


@pytest.mark.parametrize(
    ("cp", "strategy", "layout"),
    all_pairs(
        (1, 2, 3, 4), STRATEGIES, ("zigzag", "hybrid", "contiguous", "one rank has everything"),
        where=lambda cp, strategy, _: strategy != "ulysses" or HEADS % cp == 0,
    ),
)  # fmt: skip
def test_packed_sequences_equal_one_process_in_float64(ranks: RankPool, cp: int, strategy: str, layout: str) -> None:
    case = Case(RAGGED, layout=layout)
    for found in ranks.run(cp, of_ranks, case, strategy):
        assert max(largest_differences(case, found)) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(1,), (3, 1), (5, 2, 200)])
def test_shorter_sequences_than_chunks_and_ranks_without_tokens(
    ranks: RankPool, strategy: str, lengths: tuple[int, ...]
) -> None:
    case = Case(lengths)
    assert max(largest_differences(case, ranks.run(4, of_ranks, case, strategy)[0])) <= 1e-12


@pytest.mark.parametrize(("cp", "strategy", "sinks"), all_pairs((1, 2, 4), STRATEGIES, (False, True)))
def test_float32_stays_within_5e_6_of_the_definition(ranks: RankPool, cp: int, strategy: str, sinks: bool) -> None:
    case = Case((300, 2, 64, 17), dtype=torch.float32, sinks=sinks)
    assert max(largest_differences(case, ranks.run(cp, of_ranks, case, strategy)[0])) <= 5e-6


@pytest.mark.parametrize(
    ("cp", "strategy", "softcap", "sinks", "layout"),
    all_pairs((1, 2, 4), STRATEGIES, (None, 1.5), (False, True), ("zigzag", "contiguous")),
)
def test_shared_prompts_soft_caps_and_sinks_in_any_combination(
    ranks: RankPool, cp: int, strategy: str, softcap: float | None, sinks: bool, layout: str
) -> None:
    lengths, parents = TREE
    case = Case(lengths, parents, softcap=softcap, sinks=sinks, layout=layout)
    assert max(largest_differences(case, ranks.run(cp, of_ranks, case, strategy)[0])) <= 1e-12


@st.composite
def forest_cases(draw: st.DrawFn) -> Case:
    """Trees of any depth with nodes down to one token, and whatever changes how scores are computed."""
    lengths = draw(st.lists(st.integers(1, 3) | st.integers(1, 90), min_size=1, max_size=9))
    # each hangs from the one before with some luck, so that trees become deep
    parents = [
        draw(st.none() | st.just(node - 1) | st.integers(0, node - 1)) if node else None for node in range(len(lengths))
    ]
    return Case(
        tuple(lengths),
        tuple(parents),
        window=draw(st.none() | st.integers(1, 120)),
        softcap=draw(st.none() | st.just(1.5)),
        sinks=draw(st.booleans()),
    )


@examples(60)
@given(case=forest_cases())
def test_any_forest_on_one_rank_equals_the_definition(case: Case) -> None:
    attention = Attention(Choice("local", "test"))
    q, k, v, sinks, grad = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    attend = attention.for_pack(attention.layout(case.cu_seqlens), CPU, case.parents)
    out = attend(q, k, v, case.scoring(), sinks if case.sinks else None)
    found = torch.autograd.grad(out, leaves[: 4 if case.sinks else 3], grad)
    assert max(largest_differences(case, [out.detach(), *found])) <= 1e-12


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
@pytest.mark.parametrize("layout", ["zigzag", "hybrid", "contiguous", "one rank has everything"])
def test_shared_prompts_on_three_ranks_some_of_them_without_tokens(ranks: RankPool, strategy: str, layout: str) -> None:
    lengths, parents = TREE
    for case in (Case(lengths, parents, layout=layout), Case((1, 1, 1), (None, 0, 1), layout=layout)):
        for found in ranks.run(3, of_ranks, case, strategy):
            assert max(largest_differences(case, found)) <= 1e-12


@pytest.mark.parametrize(
    ("cp", "strategy", "window", "tree"),
    all_pairs((1, 2, 4), ("ulysses", "all_gather"), (1, 8, 40, 1000), (False, True)),
)
def test_sliding_windows_reach_across_ranks_and_into_shared_prompts(
    ranks: RankPool, cp: int, strategy: str, window: int, tree: bool
) -> None:
    lengths, parents = TREE if tree else (RAGGED, None)
    case = Case(lengths, parents, window=window, sinks=True, softcap=2.0 if window == 8 else None)
    assert max(largest_differences(case, ranks.run(cp, of_ranks, case, strategy)[0])) <= 1e-12
