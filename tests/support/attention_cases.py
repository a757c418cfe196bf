"""Packs whose attention is known from the definition: softmax over an explicit mask."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from slimefsdp.attention.call_plan import AttentionParams, Layout
from slimefsdp.batching.cp_sharding import Piece, hybrid_layout, zigzag_layout

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


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

    def scoring(self) -> AttentionParams:
        return AttentionParams(scale=0.3, window=self.window, softcap=self.softcap)

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


def largest_differences(case: Case, found: list[torch.Tensor]) -> list[float]:
    return [(a - b).abs().max().item() for a, b in zip(found, expected(case), strict=True)]
