"""The plans' invariants: every pair that may attend is computed once, and nothing travels that nobody needs."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.attention.call_plan import CallPlan, Layout, Rows, gather_plan, ring_plan, ulysses_plan
from slimefsdp.batching.cp_sharding import Piece, hybrid_layout, zigzag_layout
from tests.support.tiers import examples

CPU = torch.device("cpu")


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    """Offsets of the nodes, and their parents: any earlier node, or none."""
    lengths = draw(st.lists(st.integers(1, 24), min_size=1, max_size=8))
    parents = [draw(st.none() | st.integers(0, node - 1)) if node else None for node in range(len(lengths))]
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)], parents


@st.composite
def layouts(draw: st.DrawFn, cu_seqlens: list[int]) -> Layout:
    """The product's layouts, and any other: cuts anywhere, any owner."""
    cp = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["zigzag", "hybrid", "any"]))
    if kind != "any":
        return (zigzag_layout if kind == "zigzag" else hybrid_layout)(cu_seqlens, cp)
    owned: list[list[Piece]] = [[] for _ in range(cp)]
    for node, (start, end) in enumerate(pairwise(cu_seqlens)):
        inside = draw(st.sets(st.integers(start, end), max_size=3))
        for a, b in pairwise(sorted({start, end} | inside)):
            owned[draw(st.integers(0, cp - 1))].append(Piece(node, a, b))
    return owned


def rows_of(layout: Layout, rank: int) -> list[int]:
    """Tokens of the pack, in the order in which the rank holds them."""
    return [token for piece in layout[rank] for token in range(piece.start, piece.end)]


def chosen(tokens: list[int], rows: Rows) -> list[int]:
    return tokens[rows] if isinstance(rows, slice) else [tokens[row] for row in rows]


def visible_pairs(cu_seqlens: list[int], parents: list[int | None]) -> set[tuple[int, int]]:
    """(query token, key token), from the definition."""
    pairs = set()
    node_of = [node for node, (start, end) in enumerate(pairwise(cu_seqlens)) for _ in range(start, end)]
    for query, node in enumerate(node_of):
        pairs |= {(query, key) for key in range(cu_seqlens[node], query + 1)}
        above = parents[node]
        while above is not None:
            pairs |= {(query, key) for key in range(cu_seqlens[above], cu_seqlens[above + 1])}
            above = parents[above]
    return pairs


def pairs_of_call(call: CallPlan, queries: list[int], keys: list[int], *, causal: bool) -> list[tuple[int, int]]:
    pairs = []
    for (q0, q1), (k0, k1) in zip(pairwise(call.cu_q), pairwise(call.cu_k), strict=True):
        more = (k1 - k0) - (q1 - q0)
        for i in range(q1 - q0):
            last = i + more + 1 if causal else k1 - k0
            pairs += [(queries[q0 + i], keys[k0 + j]) for j in range(last)]
    return pairs


@examples(150)
@given(data=st.data())
def test_every_visible_pair_is_computed_exactly_once_by_either_plan(data: st.DataObject) -> None:
    cu_seqlens, parents = data.draw(forests())
    layout = data.draw(layouts(cu_seqlens))
    by_ring: list[tuple[int, int]] = []
    by_path: list[tuple[int, int]] = []
    needed: set[tuple[int, int]] = set()  # (owner, key) that another rank's query sees
    owner = {token: rank for rank in range(len(layout)) for token in rows_of(layout, rank)}
    expected = visible_pairs(cu_seqlens, parents)
    for query, key in expected:
        if owner[query] != owner[key]:
            needed.add((owner[key], key))
    plans = [ring_plan(layout, rank, CPU, parents) for rank in range(len(layout))]
    sent = [[rows_of(layout, rank)[row] for row in plan.sent_rows] for rank, plan in enumerate(plans)]
    for rank, plan in enumerate(plans):
        own = rows_of(layout, rank)
        assert plan.sent_counts == tuple(len(rows) for rows in sent)
        by_ring += pairs_of_call(plan.own, own, own, causal=True)
        for source, call in enumerate(plan.sources):
            if call is not None:
                keys = own if source == rank else sent[source]
                queries, seen = chosen(own, call.q_rows), chosen(keys, call.k_rows)
                assert len(set(queries)) == len(queries)  # merged rows must be distinct
                by_ring += pairs_of_call(call.segments, queries, seen, causal=False)
        path = gather_plan(layout, rank, CPU, parents)
        buffer = [*own, *(token for source, rows in enumerate(sent) if source != rank for token in rows)]
        by_path += pairs_of_call(path.call, own, [buffer[row] for row in path.key_rows], causal=True)
        assert path.sent_rows.tolist() == plan.sent_rows.tolist() and path.sent_counts == plan.sent_counts
    assert sorted(by_ring) == sorted(by_path) == sorted(expected)
    # whole pieces travel, and only those of which another rank sees something
    travelling = {(rank, token) for rank, rows in enumerate(sent) for token in rows}
    pieces = {(rank, piece) for rank in range(len(layout)) for piece in layout[rank]}
    for rank, piece in pieces:
        tokens = {(rank, token) for token in range(piece.start, piece.end)}
        assert tokens <= travelling if tokens & needed else not tokens & travelling


@examples(50)
@given(data=st.data())
def test_the_whole_plan_puts_the_ranks_rows_into_the_packs_order(data: st.DataObject) -> None:
    cu_seqlens, _ = data.draw(forests())
    layout = data.draw(layouts(cu_seqlens))
    plan = ulysses_plan(layout, CPU)
    by_rank = torch.tensor([token for rank in range(len(layout)) for token in rows_of(layout, rank)])
    assert torch.equal(by_rank[plan.pack_to_ranks], torch.arange(cu_seqlens[-1]))
    assert torch.equal(torch.arange(cu_seqlens[-1])[plan.ranks_to_pack], by_rank)
    assert plan.counts == tuple(len(rows_of(layout, rank)) for rank in range(len(layout)))
