"""Which context-parallel rank owns which token ranges of a pack.

Each sequence is cut into 2*cp chunks and rank r takes chunks r and 2*cp-1-r (zig-zag), so that every rank has the same
causal work; any length will do, nothing is padded. A sequence too short to cut stays whole on the rank with the fewest
tokens. With cp == 1 the one rank owns every sequence whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple


class Piece(NamedTuple):
    """Tokens [start, end) of the pack, all of sequence `node`."""

    node: int
    start: int
    end: int


def zigzag_layout(cu_seqlens: Sequence[int], cp: int) -> list[list[Piece]]:
    """The pieces of every cp rank, each rank's in ascending order.

    Args:
        cu_seqlens: [sequences + 1] offsets of the sequences in the pack, first 0.
        cp: number of context-parallel ranks.
    """
    if cp == 1:
        return [[Piece(node, start, end) for node, (start, end) in enumerate(_spans(cu_seqlens))]]
    owned: list[list[Piece]] = [[] for _ in range(cp)]
    load = [0] * cp
    longest_first = sorted(enumerate(_spans(cu_seqlens)), key=lambda item: item[1][0] - item[1][1])
    for node, (start, end) in longest_first:
        if end - start < 2 * cp:
            pieces = {load.index(min(load)): [Piece(node, start, end)]}
        else:
            pieces = _cut(node, start, end, load)
        for rank, parts in pieces.items():
            owned[rank] += parts
            load[rank] += sum(part.end - part.start for part in parts)
    return [_joined(sorted(parts, key=lambda part: part.start)) for parts in owned]


def _spans(cu_seqlens: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(cu_seqlens))


def _cut(node: int, start: int, end: int, load: Sequence[int]) -> dict[int, list[Piece]]:
    """One sequence in 2*cp chunks, the remainder's tokens to the ranks with the fewest so far."""
    cp = len(load)
    base, remainder = divmod(end - start, 2 * cp)
    owner = [min(chunk, 2 * cp - 1 - chunk) for chunk in range(2 * cp)]
    longer = set(sorted(range(2 * cp), key=lambda chunk: (load[owner[chunk]], chunk))[:remainder])
    pieces: dict[int, list[Piece]] = {}
    for chunk in range(2 * cp):
        size = base + (chunk in longer)
        pieces.setdefault(owner[chunk], []).append(Piece(node, start, start + size))
        start += size
    return pieces


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].node == piece.node and joined[-1].end == piece.start:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined
