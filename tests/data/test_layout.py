"""Which rank owns which tokens: everything once, at any length, with the same causal work for all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.data.layout import Piece, zigzag_layout

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=12)
CP = st.integers(1, 4)


def offsets(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def causal_pairs(pieces: Sequence[Piece], starts: Sequence[int]) -> int:
    """(query, key) pairs whose query lies in the pieces: what a rank's attention costs, wherever the keys lie."""
    return sum(sum(range(p.start - starts[p.node] + 1, p.end - starts[p.node] + 1)) for p in pieces)


@given(lengths=LENGTHS, cp=CP)
def test_every_token_belongs_to_exactly_one_rank(lengths: list[int], cp: int) -> None:
    layout = zigzag_layout(offsets(lengths), cp)
    owned = sorted(token for pieces in layout for piece in pieces for token in range(piece.start, piece.end))
    assert len(layout) == cp and owned == list(range(sum(lengths)))


@given(lengths=LENGTHS, cp=CP)
def test_a_piece_is_not_empty_and_lies_in_its_own_sequence(lengths: list[int], cp: int) -> None:
    cu = offsets(lengths)
    for pieces in zigzag_layout(cu, cp):
        for piece in pieces:
            assert cu[piece.node] <= piece.start < piece.end <= cu[piece.node + 1]
        # ascending, and joined where they touch: two pieces of one sequence have a gap between them
        for one, other in pairwise(pieces):
            assert one.end < other.start or (one.end == other.start and one.node != other.node)


@given(lengths=LENGTHS)
def test_one_rank_owns_every_sequence_whole(lengths: list[int]) -> None:
    cu = offsets(lengths)
    assert zigzag_layout(cu, 1) == [[Piece(i, cu[i], cu[i + 1]) for i in range(len(lengths))]]


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


def test_the_measured_imbalance_of_one_long_sequence_is_one() -> None:
    pairs = [causal_pairs(pieces, [0, 16_384]) for pieces in zigzag_layout([0, 16_384], 8)]
    assert len(set(pairs)) == 1 and sum(pairs) == 16_384 * 16_385 // 2
