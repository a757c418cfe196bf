"""Which rank owns which tokens: everything once, at any length, with the same causal work for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.cp_sharding import (
    Piece,
    ancestors,
    hybrid_layout,
    layout_time,
    sent_rows,
    tokens_of,
    work_of,
    zigzag_layout,
)
from slimefsdp.batching.prefix_tree import Forest
from tests.support.tiers import examples

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)
CP = st.integers(1, 4)
LAYOUTS = st.sampled_from([zigzag_layout, hybrid_layout])
MIXED_LENGTHS = st.lists(st.integers(1, 30) | st.integers(1, 5000), min_size=1, max_size=40)
COSTS = st.builds(
    CostModel,
    quadratic=st.sampled_from([0.0, 1 / 24576, 0.01]),
    windowed=st.sampled_from([0.0, 1 / 24576]),
    window=st.integers(1, 600),
    comm=st.sampled_from([0.0, 0.01, 0.05, 2.0]),
    splits_heads=st.booleans(),
)
ROUNDING = 1e-12  # of sums in another order, relative


def offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def causal_pairs(pieces: Sequence[Piece], starts: Sequence[int]) -> int:
    """(query, key) pairs whose query lies in the pieces: what a rank's attention costs, wherever the keys lie."""
    return sum(sum(range(p.start - starts[p.node] + 1, p.end - starts[p.node] + 1)) for p in pieces)


@given(lengths=LENGTHS, cp=CP, make=LAYOUTS)
def test_every_token_belongs_to_exactly_one_rank(lengths: list[int], cp: int, make: Any) -> None:
    layout = make(offsets(lengths), cp)
    owned = sorted(token for pieces in layout for piece in pieces for token in range(piece.start, piece.end))
    assert len(layout) == cp and owned == list(range(sum(lengths)))


@given(lengths=LENGTHS, cp=CP, make=LAYOUTS)
def test_a_piece_is_not_empty_and_lies_in_its_own_sequence(lengths: list[int], cp: int, make: Any) -> None:
    cu = offsets(lengths)
    for pieces in make(cu, cp):
        for piece in pieces:
            assert cu[piece.node] <= piece.start < piece.end <= cu[piece.node + 1]
        # ascending, and joined where they touch: two pieces of one sequence have a gap between them
        for one, other in pairwise(pieces):
            assert one.end < other.start or (one.end == other.start and one.node != other.node)


@given(lengths=LENGTHS, cp=st.integers(2, 4))
def test_a_sequence_is_cut_zig_zag_or_stays_whole(lengths: list[int], cp: int) -> None:
    layout = zigzag_layout(offsets(lengths), cp)
    for node, length in enumerate(lengths):
        parts = [[piece for piece in pieces if piece.node == node] for pieces in layout]
        if length < 2 * cp:
            assert sum(map(len, parts)) == 1
            continue
        # in token order the owners are 0 1 .. cp-1 cp-1 .. 1 0; the middle two chunks are one piece
        order = [rank for _, rank in sorted((piece.start, rank) for rank in range(cp) for piece in parts[rank])]
        assert order == [*range(cp), *reversed(range(cp - 1))]


@given(lengths=LENGTHS, cp=CP)
def test_ranks_hold_nearly_the_same_number_of_tokens(lengths: list[int], cp: int) -> None:
    tokens = [sum(p.end - p.start for p in pieces) for pieces in zigzag_layout(offsets(lengths), cp)]
    # a cut sequence evens out to a token or two; a whole one is shorter than 2 cp
    assert max(tokens) - min(tokens) <= 2 * cp


@pytest.mark.parametrize("cp", [2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_causal_work_of_log_normal_lengths_is_within_five_percent_of_even(cp: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(6.0, 1.0, size=24), 1, 8192).astype(int).tolist()
    starts = offsets(lengths)
    pairs = [causal_pairs(pieces, starts) for pieces in zigzag_layout(starts, cp)]
    assert max(pairs) / np.mean(pairs) <= 1.05
    # the measure tells layouts apart: contiguous shares of the same pack are less even
    bounds = [starts[-1] * rank // cp for rank in range(cp + 1)]
    contiguous = [
        sum(
            causal_pairs([Piece(node, max(start, low), min(end, high))], starts)
            for node, (start, end) in enumerate(pairwise(starts))
            if max(start, low) < min(end, high)
        )
        for low, high in pairwise(bounds)
    ]
    assert sum(contiguous) == sum(pairs) and max(contiguous) > max(pairs)


def unevenness(values: Any) -> float:
    return float(np.max(values) / np.mean(values))


@given(lengths=MIXED_LENGTHS, cp=st.integers(2, 9))
@examples(100)
def test_the_longest_are_cut_and_shorter_ones_whole(lengths: list[int], cp: int) -> None:
    layout = hybrid_layout(offsets(lengths), cp)
    owners = [sum(any(piece.node == node for piece in pieces) for pieces in layout) for node in range(len(lengths))]
    whole = [length for length, count in zip(lengths, owners, strict=True) if count == 1]
    cut = [length for length, count in zip(lengths, owners, strict=True) if count > 1]
    assert not whole or not cut or max(whole) <= max(cut)
    assert layout == hybrid_layout(tuple(offsets(lengths)), cp), "equal on every rank"


def test_sequences_stay_whole_where_cutting_buys_nothing_and_are_cut_where_it_does() -> None:
    equal = offsets([1000] * 16)
    assert sent_rows(hybrid_layout(equal, 8)) == [0] * 8
    assert sum(sent_rows(hybrid_layout(offsets([1000] * 15), 8))) > 0
    one_long = offsets([8000, *[100] * 80])
    layout = hybrid_layout(one_long, 8)
    assert all(pieces[0].node == 0 for pieces in layout), "every rank has some of the long one"
    assert 0 < sum(sent_rows(layout)) <= 8000, "and only that travels"


def test_a_pack_of_a_thousand_short_samples_is_laid_out_in_milliseconds() -> None:
    cu = offsets(np.random.default_rng(0).integers(16, 128, 1000).tolist())
    took_s = []
    for _ in range(3):
        start = time.process_time()
        hybrid_layout(cu, 8)
        took_s.append(time.process_time() - start)
    assert min(took_s) <= 0.05  # 5 ms on one unloaded core; zig-zag's 16,000 pieces alone would take 15


def forest_from(lengths: Sequence[int], parents: Sequence[int | None]) -> Forest:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + lengths[parent])
    return Forest(tuple(parents), tuple(depths))


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], Forest]:
    """Nodes of any length that hang from an earlier one or from none."""
    lengths = draw(MIXED_LENGTHS)
    parents = [draw(st.none() | st.integers(0, node - 1)) if node else None for node in range(len(lengths))]
    return lengths, forest_from(lengths, parents)


def groups(count: int, prompt: int, responses: int, length: int) -> tuple[list[int], Forest]:
    lengths: list[int] = []
    parents: list[int | None] = []
    for _ in range(count):
        root = len(lengths)
        lengths += [prompt, *[length] * responses]
        parents += [None, *[root] * responses]
    return lengths, forest_from(lengths, parents)


def conversation(turns: int) -> tuple[list[int], Forest]:
    """Every turn's answer hangs from the history before it, and so does what the next turn adds to that."""
    lengths, parents, history = [256], [None], 0
    for _ in range(turns):
        lengths += [128, 64]
        parents += [history, history]
        history = len(lengths) - 1
    return lengths, forest_from(lengths, parents)


def system_prompt() -> tuple[list[int], Forest]:
    lengths, parents = [500], [None]
    for prompt in (200, 250, 300, 350):
        root = len(lengths)
        lengths += [prompt, *range(100, 178, 13)]
        parents += [0, *[root] * 6]
    return lengths, forest_from(lengths, parents)


@given(nodes=forests(), cp=st.integers(2, 5), cost=COSTS)
@examples(200)
def test_layouts_of_forests_are_partitions_within_the_cap_and_no_slower_than_zig_zag(
    nodes: tuple[list[int], Forest], cp: int, cost: CostModel
) -> None:
    lengths, forest = nodes
    cu = offsets(lengths)
    layout, zigzag = hybrid_layout(cu, cp, cost, forest), zigzag_layout(cu, cp)
    owned = sorted(token for pieces in layout for piece in pieces for token in range(piece.start, piece.end))
    assert owned == list(range(sum(lengths)))
    assert all(cu[p.node] <= p.start < p.end <= cu[p.node + 1] for pieces in layout for p in pieces)
    share = -(-sum(lengths) // cp)
    assert max(tokens_of(layout)) == share
    if max(tokens_of(zigzag)) == share:
        assert layout_time(layout, cu, cost, forest) <= layout_time(zigzag, cu, cost, forest) * (1 + ROUNDING)


@given(nodes=forests(), cp=st.integers(2, 4))
@examples(60)
def test_the_work_of_a_forest_is_that_of_its_tokens_at_their_depths(nodes: tuple[list[int], Forest], cp: int) -> None:
    lengths, forest = nodes
    cost = CostModel(quadratic=0.001, windowed=0.002, window=50)
    layout = hybrid_layout(offsets(lengths), cp, cost, forest)
    one_by_one = cost.cost(np.arange(1, 300_000)) - cost.cost(np.arange(299_999))
    expected = np.zeros(cp)
    for rank, pieces in enumerate(layout):
        for node, start, end in pieces:
            depth = forest.depths[node] - offsets(lengths)[node]
            expected[rank] += one_by_one[start + depth : end + depth].sum()
    np.testing.assert_allclose(work_of(layout, offsets(lengths), cost, forest), expected, rtol=1e-9)


@given(nodes=forests(), cp=st.integers(2, 4))
@examples(100)
def test_of_a_forest_travels_what_another_rank_sees(nodes: tuple[list[int], Forest], cp: int) -> None:
    lengths, forest = nodes
    layout = hybrid_layout(offsets(lengths), cp, CostModel(), forest)
    expected = [0] * cp
    for rank, pieces in enumerate(layout):
        others = [piece for other, theirs in enumerate(layout) if other != rank for piece in theirs]
        for piece in pieces:
            is_seen = any(
                piece.node in ancestors(query.node, forest.parents)
                or (query.node == piece.node and query.start >= piece.end)
                for query in others
            )
            expected[rank] += (piece.end - piece.start) * is_seen
    assert sent_rows(layout, forest.parents) == expected


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("cost", [CostModel(), CostModel(quadratic=0.01)], ids=["large model", "small model"])
@pytest.mark.parametrize(
    "nodes",
    [groups(1, 1024, 16, 128), groups(2, 1024, 16, 128), groups(1, 128, 16, 1024), conversation(10), system_prompt()],
    ids=["group", "two groups", "long responses", "conversation", "system prompt"],
)
def test_work_of_shared_prompts_is_within_five_percent_of_even(
    nodes: tuple[list[int], Forest], cp: int, cost: CostModel
) -> None:
    lengths, forest = nodes
    cu = offsets(lengths)
    assert unevenness(work_of(hybrid_layout(cu, cp, cost, forest), cu, cost, forest)) <= 1.05
