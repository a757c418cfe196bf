"""Which context-parallel rank owns which token ranges of a pack.

A sequence that is cut is cut zig-zag: r's chunk counted from the start and r's chunk counted from the end have the same
size, so that a rank's share of the causal work equals its share of the tokens, whatever those sizes are. Any length
will do and nothing is padded. A sequence that stays whole sends nothing. With cp == 1 the one rank owns all of them.

Where samples share prompts, the sequences of a pack are the nodes of a forest. What reaches back to a node's beginning
reaches back over the nodes above it, too, and a node travels where one below it is on another rank: so a whole tree
stays on a rank, or its root is cut and what hangs from it stays whole, and so on down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from slimefsdp.batching.cost import DEFAULT_COST_MODEL, CostModel
from slimefsdp.batching.prefix_tree import Forest

MAX_IMBALANCE = 1.05  # work of the busiest cp rank over the mean; whole sequences must not cost more than that


class Piece(NamedTuple):
    """Tokens [start, end) of the pack, all of the sequence `node`."""

    node: int
    start: int
    end: int


Layout = list[list[Piece]]  # the pieces of every cp rank, each rank's in ascending order


def zigzag_layout(cu_seqlens: Sequence[int], cp: int) -> Layout:
    """Cuts every sequence into 2*cp chunks of nearly equal size; a shorter sequence stays whole, on the rank with the
    fewest tokens.

    Args:
        cu_seqlens: [sequences + 1] offsets of the sequences in the pack, first 0.
        cp: number of context-parallel ranks.
    """
    if cp == 1:
        return [_whole(cu_seqlens)]
    owned: Layout = [[] for _ in range(cp)]
    load = [0] * cp
    longest_first = sorted(_whole(cu_seqlens), key=lambda piece: piece.start - piece.end)
    for sequence in longest_first:
        length = sequence.end - sequence.start
        shares = [0] * cp
        if length < 2 * cp:
            shares[load.index(min(load))] = length
        else:
            base, remainder = divmod(length, 2 * cp)
            shares = [2 * base] * cp
            poorest = [(tokens, rank) for rank, tokens in enumerate(load)]
            heapify(poorest)
            for _ in range(remainder):  # at most one more in each of a rank's two chunks
                tokens, rank = poorest[0]
                shares[rank] += 1
                if shares[rank] < 2 * base + 2:
                    heapreplace(poorest, (tokens + 1, rank))
                else:
                    heappop(poorest)
        _give(owned, sequence, shares)
        load = [held + share for held, share in zip(load, shares, strict=True)]
    return [_joined(sorted(pieces)) for pieces in owned]


def hybrid_layout(
    cu_seqlens: Sequence[int], cp: int, cost: CostModel = DEFAULT_COST_MODEL, forest: Forest | None = None
) -> Layout:
    """Cuts the longest sequences and keeps the others whole; the number to cut is the one with the least estimated
    time.

    No rank holds more than its even share of the tokens, rounded up, so a pack of at most cp times a rank's cap keeps
    every rank below it. Never slower by the estimate (`layout_time`) than `zigzag_layout` where that keeps this too.
    Whole sequences go, longest first, to the rank where they stick out least; cut ones, shortest first, fill ranks up
    to equally many tokens. Work is even within 5 %, or everything is cut.

    Args:
        cu_seqlens: [sequences + 1] offsets of the sequences in the pack, first 0.
        cp: number of context-parallel ranks.
        cost: what a token costs, also sent between ranks. Equal on all ranks, or they disagree on who owns what.
        forest: how the sequences hang together, where they are nodes; a tree then counts as a sequence until its root
            is cut, and after that what hangs from the root.
    """
    if cp == 1:
        return [_whole(cu_seqlens)]
    pack = _Pack(cu_seqlens, cp, cost.of_owner(), forest)
    best: _Placement | None = None
    for num_cut in _numbers_to_cut(len(pack.nodes)):
        if best is not None and pack.least_time(num_cut) >= best.time:
            break  # the more is cut, the more is sent
        placement = pack.placed(num_cut)
        if placement is None or (placement.imbalance > MAX_IMBALANCE and num_cut < len(pack.nodes)):
            continue
        if best is None or placement.time < best.time:
            best = placement
    assert best is not None  # with everything cut all ranks are even
    layout = pack.layout(best)
    time = layout_time(layout, cu_seqlens, cost, forest)
    if time > pack.least_time_of_zigzag():
        zigzag = zigzag_layout(cu_seqlens, cp)
        if max(tokens_of(zigzag)) <= pack.max_tokens and layout_time(zigzag, cu_seqlens, cost, forest) < time:
            return zigzag
    return layout


def tokens_of(layout: Layout) -> list[int]:
    return [sum(piece.end - piece.start for piece in pieces) for pieces in layout]


def sent_pieces(layout: Sequence[Sequence[Piece]], parents: Sequence[int | None] | None = None) -> Layout:
    """Returns the pieces of every rank whose keys and values other ranks need; only these are sent.

    A piece is needed where another rank has a later piece of its node, or a piece of a node below it.

    Args:
        parents: of every node, where nodes share prompts; None: no node has one.
    """
    last_starts: dict[int, list[tuple[int, int]]] = {}  # of each node: (start of a rank's last piece, rank)
    needed_by: dict[int, set[int]] = {}  # of each node above others: the ranks with pieces below it
    for rank, pieces in enumerate(layout):
        for node, start in {piece.node: piece.start for piece in pieces}.items():
            last_starts.setdefault(node, []).append((start, rank))
            for above in ancestors(node, parents):
                needed_by.setdefault(above, set()).add(rank)
    latest = {node: sorted(starts, reverse=True)[:2] for node, starts in last_starts.items()}
    return [
        [
            piece
            for piece in pieces
            if any(start >= piece.end for start, owner in latest[piece.node] if owner != rank)
            or needed_by.get(piece.node, set()) - {rank}
        ]
        for rank, pieces in enumerate(layout)
    ]


def ancestors(node: int, parents: Sequence[int | None] | None) -> list[int]:
    """Returns the nodes above a node, root first."""
    above: list[int] = []
    parent = None if parents is None else parents[node]
    while parents is not None and parent is not None:
        above.append(parent)
        parent = parents[parent]
    return above[::-1]


def sent_rows(layout: Layout, parents: Sequence[int | None] | None = None) -> list[int]:
    """Returns how many tokens of every rank other ranks need as keys and values, [cp]; arguments as for
    `sent_pieces`.
    """
    return tokens_of(sent_pieces(layout, parents))


def work_of(layout: Layout, cu_seqlens: Sequence[int], cost: CostModel, forest: Forest | None = None) -> np.ndarray:
    """Returns the estimated work of the tokens that every rank owns, attention included; float64 [cp]."""
    pieces = [piece for owned in layout for piece in owned]
    nodes, starts, ends = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    beginnings = np.asarray(cu_seqlens, dtype=np.int64)
    if forest is not None:
        beginnings = beginnings[:-1] - forest.depths  # where the samples of a node would begin
    origins = beginnings[nodes]
    ranks = np.repeat(np.arange(len(layout)), [len(owned) for owned in layout])
    return np.bincount(ranks, cost.cost(ends - origins) - cost.cost(starts - origins), len(layout))


def layout_time(layout: Layout, cu_seqlens: Sequence[int], cost: CostModel, forest: Forest | None = None) -> float:
    """Returns the estimated time of a pack. Ranks meet in every layer's attention. So what precedes it takes as long as
    on the rank with the most tokens, and attention as long as on the rank with the most pairs to compute and rows to
    send.
    """
    local = cost.of_owner()
    tokens = np.array(tokens_of(layout)) * local.linear
    attention = work_of(layout, cu_seqlens, local, forest) - tokens
    parents = None if forest is None else forest.parents
    sent = local.comm * (len(layout) - 1) * np.array(sent_rows(layout, parents))
    return float(tokens.max() + (attention + sent).max())


class _Placement(NamedTuple):
    time: float
    imbalance: float  # of work, most over mean
    whole: list[tuple[int, int]]  # (node at the top of what stays whole, rank)
    cut: list[tuple[int, list[int]]]  # (node, tokens for every rank)


class _Pack:
    """What all candidate layouts of a pack share: its nodes, in the order in which they are cut."""

    def __init__(self, cu_seqlens: Sequence[int], cp: int, cost: CostModel, forest: Forest | None) -> None:
        self.nodes = _whole(cu_seqlens)
        self.lengths = [piece.end - piece.start for piece in self.nodes]
        self.parents = (None,) * len(self.nodes) if forest is None else forest.parents
        depths = np.zeros(len(self.nodes)) if forest is None else np.array(forest.depths)
        work: list[float] = (cost.cost(depths + self.lengths) - cost.cost(depths)).tolist()
        self.attention = [of_all - length * cost.linear for of_all, length in zip(work, self.lengths, strict=True)]
        # of a node and all below it, which stay whole with it
        self.whole_tokens, self.whole_attention = list(self.lengths), list(self.attention)
        children: dict[int | None, list[int]] = {}
        for node in reversed(range(len(self.nodes))):
            if (parent := self.parents[node]) is not None:
                self.whole_tokens[parent] += self.whole_tokens[node]
                self.whole_attention[parent] += self.whole_attention[node]
            children.setdefault(parent, []).append(node)
        self.largest_first = sorted(range(len(self.nodes)), key=lambda node: -self.whole_tokens[node])
        self.cut_order: list[int] = []
        wholes = [(-self.whole_tokens[node], node) for node in children[None]]
        heapify(wholes)
        while wholes:
            node = heappop(wholes)[1]
            self.cut_order.append(node)
            for child in children.get(node, ()):
                heappush(wholes, (-self.whole_tokens[child], child))
        self.cut_place = {node: place for place, node in enumerate(self.cut_order)}
        self.has_children = children.keys()
        self.cp = cp
        self.linear = cost.linear
        self.sending = cost.comm * (cp - 1)  # of one token that travels
        self.cut_tokens = [0, *accumulate(self.lengths[node] for node in self.cut_order)]
        self.max_tokens = -(-self.cut_tokens[-1] // cp)
        self.total_work = sum(work)
        self.per_token = cp / self.cut_tokens[-1]  # makes the mean over ranks 1
        self.per_attention = cp / total if (total := sum(self.attention)) > 0 else 0.0

    def least_time(self, num_cut: int) -> float:
        """Returns a lower bound, up to rounding, on the time of every layout with this many nodes cut."""
        return (self.total_work + self.sending * self.cut_tokens[num_cut]) / self.cp

    def least_time_of_zigzag(self) -> float:
        chunks = 2 * self.cp
        sent = sum(length - (length // chunks + 1) for length in self.lengths if length >= chunks)  # all but the last
        return (self.total_work + self.sending * sent) / self.cp

    def placed(self, num_cut: int) -> _Placement | None:
        """Returns the layout with the first `num_cut` nodes cut and the others whole; None if a whole one
        does not fit.
        """
        tokens = [0] * self.cp
        attention = [0.0] * self.cp
        whole: list[tuple[int, int]] = []
        for node in self.largest_first:
            parent = self.parents[node]
            if self.cut_place[node] < num_cut or not (parent is None or self.cut_place[parent] < num_cut):
                continue
            length, pairs = self.whole_tokens[node], self.whole_attention[node]
            rank = self._best_rank(tokens, attention, length, pairs)
            if rank is None:
                return None
            tokens[rank] += length
            attention[rank] += pairs
            whole.append((node, rank))
        sent = [0.0] * self.cp
        cut: list[tuple[int, list[int]]] = []
        for node in sorted(self.cut_order[:num_cut], key=lambda node: (self.lengths[node], -node)):
            length = self.lengths[node]
            shares = _filled_up(tokens, length)
            per_token = self.attention[node] / length  # cut zig-zag: a rank's share of it is that of the tokens
            travels = max(shares) < length or node in self.has_children
            for rank, share in enumerate(shares):
                tokens[rank] += share
                attention[rank] += share * per_token
                sent[rank] += share * self.sending * travels
            cut.append((node, shares))
        work = max(held * self.linear + pairs for held, pairs in zip(tokens, attention, strict=True))
        time = max(tokens) * self.linear + max(pairs + comm for pairs, comm in zip(attention, sent, strict=True))
        return _Placement(time, work * self.cp / self.total_work, whole, cut)

    def _best_rank(self, tokens: list[int], attention: list[float], length: int, pairs: float) -> int | None:
        """Returns the rank with room that would be least full, by tokens or attention, whichever is larger relative to
        the mean.

        Balancing their sum would let a rank with one long sequence wait for another with many short ones.
        """
        best, least = None, (inf, inf)
        for rank in range(self.cp):
            held = tokens[rank] + length
            if held > self.max_tokens:
                continue
            by_tokens, by_attention = held * self.per_token, (attention[rank] + pairs) * self.per_attention
            fullness = (max(by_tokens, by_attention), by_tokens + by_attention)
            if fullness < least:
                best, least = rank, fullness
        return best

    def layout(self, placement: _Placement) -> Layout:
        owned: Layout = [[] for _ in range(self.cp)]
        owner = dict(placement.whole)
        for node, piece in enumerate(self.nodes):
            parent = self.parents[node]
            if node not in owner and parent in owner:
                owner[node] = owner[parent]
            if node in owner:
                owned[owner[node]].append(piece)
        for node, shares in placement.cut:
            _give(owned, self.nodes[node], shares)
        return [_joined(sorted(pieces)) for pieces in owned]


def _numbers_to_cut(num_sequences: int) -> Iterator[int]:
    """Yields how many nodes to cut: none, one, two, ..., then in growing strides, at last all."""
    number = 0
    while number < num_sequences:
        yield number
        number += 1 if number < 16 else number // 4
    yield num_sequences


def _filled_up(tokens: Sequence[int], amount: int) -> list[int]:
    """Distributes `amount` more tokens so that ranks become as even as possible, [cp]."""
    ranks = sorted(range(len(tokens)), key=lambda rank: (tokens[rank], rank))
    held = 0
    for count, rank in enumerate(ranks, start=1):
        held += tokens[rank]
        if count == len(ranks) or held + amount <= count * tokens[ranks[count]]:
            break  # the others have more than what these are filled up to
    level, remainder = divmod(held + amount, count)
    shares = [0] * len(tokens)
    for position, rank in enumerate(ranks[:count]):
        shares[rank] = level + (position < remainder) - tokens[rank]
    return shares


def _give(owned: Layout, sequence: Piece, shares: Sequence[int]) -> None:
    """Cuts a sequence so that rank r gets shares[r] tokens: half from the front, and half equally far from the back."""
    start, end = sequence.start, sequence.end
    for rank, share in enumerate(shares):
        front, back = share - share // 2, share // 2
        if front:
            owned[rank].append(Piece(sequence.node, start, start + front))
        if back:
            owned[rank].append(Piece(sequence.node, end - back, end))
        start, end = start + front, end - back


def _whole(cu_seqlens: Sequence[int]) -> list[Piece]:
    return [Piece(node, int(start), int(end)) for node, (start, end) in enumerate(pairwise(cu_seqlens))]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].node == piece.node and joined[-1].end == piece.start:
            joined[-1] = joined[-1]._replace(end=piece.end)
        else:
            joined.append(piece)
    return joined
