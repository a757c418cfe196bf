"""Ring, Ulysses and all-gather attention equal one process in outputs and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from slimefsdp.attention.choice import Choice
from slimefsdp.attention.kernels import Scoring
from slimefsdp.attention.plan import Layout
from slimefsdp.attention.strategy import Attention
from slimefsdp.data.layout import Piece, hybrid_layout, zigzag_layout
from tests.rank_pool import RankPool

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
STRATEGIES = ("ring", "ulysses", "all_gather")


@dataclass(frozen=True)
class Case:
    """Nodes of a pack, and how scores are computed."""

    lengths: tuple[int, ...]
    parents: tuple[int | None, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: str = "zigzag"
    dtype: torch.dtype = torch.float64

    @property
    def cu_seqlens(self) -> list[int]:
        return [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)]

    def scoring(self) -> Scoring:
        return Scoring(scale=0.3, window=self.window, softcap=self.softcap)

    def layout_over(self, cp: int) -> Layout:
        if self.layout == "one rank has everything":
            return [
                [Piece(node, start, end) for node, (start, end) in enumerate(pairwise(self.cu_seqlens))],
                *([] for _ in range(cp - 1)),
            ]
        if self.layout == "contiguous":
            total = self.cu_seqlens[-1]
            cuts = [total * rank // cp for rank in range(cp + 1)]
            spans = list(enumerate(pairwise(self.cu_seqlens)))
            return [
                [Piece(n, max(a, lo), min(b, hi)) for n, (a, b) in spans if max(a, lo) < min(b, hi)]
                for lo, hi in pairwise(cuts)
            ]
        return (hybrid_layout if self.layout == "hybrid" else zigzag_layout)(self.cu_seqlens, cp)


def inputs(case: Case) -> list[torch.Tensor]:
    """q, k, v, sinks and the output's gradient for the whole pack, equal on every rank."""
    generator = torch.Generator().manual_seed(sum(case.lengths))
    tokens = case.cu_seqlens[-1]
    shapes = [(tokens, HEADS, HEAD_DIM), (tokens, KV_HEADS, HEAD_DIM), (tokens, KV_HEADS, HEAD_DIM), (HEADS,)]
    shapes.append(shapes[0])
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]


def dense(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Softmax over an explicit mask, from the definition: a token sees itself, and what precedes it on its path."""
    path_of: list[list[int]] = []
    for node, (start, end) in enumerate(pairwise(case.cu_seqlens)):
        parent = case.parents[node] if case.parents else None
        before = [] if parent is None else path_of[case.cu_seqlens[parent + 1] - 1]
        for token in range(start, end):
            path_of.append([*before, *range(start, token + 1)])
    visible = torch.zeros(len(path_of), len(path_of), dtype=torch.bool)
    for token, path in enumerate(path_of):
        visible[token, path[-case.window :] if case.window else path] = True
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    if case.softcap:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if case.sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(path_of), 1)], dim=-1)
    weights = scores.softmax(-1)[..., : len(path_of)]
    return torch.einsum("hqk,khd->qhd", weights, v)


def expected(case: Case) -> list[torch.Tensor]:
    """out, dq, dk, dv, dsinks of the definition, in float64."""
    q, k, v, sinks, grad = (x.double() for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v, sinks)]
    out = dense(case, *leaves)
    grads = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    return [out.detach(), *grads[:3], *([grads[3]] if case.sinks else [])]


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


def largest_differences(case: Case, found: list[torch.Tensor]) -> list[float]:
    return [(a - b).abs().max().item() for a, b in zip(found, expected(case), strict=True)]


RAGGED = (33, 7, 1, 90, 2, 50, 3)
TREE = (40, 13, 1, 25, 30, 5, 9, 20), (None, 0, 0, 0, None, 4, 5, 5)


@pytest.mark.parametrize(
    ("strategy", "cp"),
    [(name, cp) for name in STRATEGIES for cp in (1, 2, 3, 4) if name != "ulysses" or HEADS % cp == 0],
)
@pytest.mark.parametrize("layout", ["zigzag", "hybrid", "contiguous", "one rank has everything"])
def test_packed_sequences_equal_one_process_in_float64(ranks: RankPool, cp: int, strategy: str, layout: str) -> None:
    case = Case(RAGGED, layout=layout)
    for found in ranks.run(cp, of_ranks, case, strategy):
        assert max(largest_differences(case, found)) <= 1e-12


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 1), (7,), (1, 1, 1, 1, 1), (5, 2, 200)])
def test_shorter_sequences_than_chunks_and_ranks_without_tokens(
    ranks: RankPool, strategy: str, lengths: tuple[int, ...]
) -> None:
    case = Case(lengths)
    assert max(largest_differences(case, ranks.run(4, of_ranks, case, strategy)[0])) <= 1e-12


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sinks", [False, True])
def test_float32_stays_within_5e_6_of_the_definition(ranks: RankPool, cp: int, strategy: str, sinks: bool) -> None:
    case = Case((300, 2, 64, 17), dtype=torch.float32, sinks=sinks)
    assert max(largest_differences(case, ranks.run(cp, of_ranks, case, strategy)[0])) <= 5e-6


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
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


@hypothesis_settings(max_examples=60)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("cp", [1, 2])
def test_shared_prompts_in_bfloat16_are_as_close_as_whole_samples_are(ranks: RankPool, cp: int, strategy: str) -> None:
    lengths, parents = TREE
    errors = {}
    for name, case in {
        "shared": Case(lengths, parents, dtype=torch.bfloat16),
        "whole": Case((sum(lengths),), dtype=torch.bfloat16),
    }.items():
        found = ranks.run(cp, of_ranks, case, strategy)[0]
        errors[name] = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected(case), strict=True))
    assert errors["shared"] <= 1.5 * errors["whole"] < 0.05


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["ulysses", "all_gather"])
@pytest.mark.parametrize("window", [1, 8, 40, 1000])
@pytest.mark.parametrize("tree", [False, True])
def test_sliding_windows_reach_across_ranks_and_into_shared_prompts(
    ranks: RankPool, cp: int, strategy: str, window: int, tree: bool
) -> None:
    lengths, parents = TREE if tree else (RAGGED, None)
    case = Case(lengths, parents, window=window, sinks=True, softcap=2.0 if window == 8 else None)
    assert max(largest_differences(case, ranks.run(cp, of_ranks, case, strategy)[0])) <= 1e-12
