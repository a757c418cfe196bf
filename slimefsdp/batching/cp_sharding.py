"""Decides which context-parallel rank owns which tokens of a pack.

A sequence is either kept whole on one rank or cut zig-zag: each rank gets one chunk counted from the start and one of
the same size counted from the end. A rank's share of the causal attention then equals its share of the tokens, for all
sizes of its chunks, so sequences of any length need no padding. Keys and values of whole sequences are not sent.

If samples share prefixes, the sequences of a pack are the nodes of a forest. A token attends to its own node and to
all ancestors of this node, so a node must be sent if a descendant is on another rank. Therefore a tree is kept whole on
one rank, or its root is cut; then each subtree below the root is kept whole or cut in the same way.
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

MAX_IMBALANCE = 1.05  # work of the busiest cp rank / mean work, at most, in a layout that keeps sequences whole


class Piece(NamedTuple):
    """Tokens [start, end) of the pack, all of the sequence `node`."""

    node: int
    start: int
    end: int


Layout = list[list[Piece]]  # [cp rank] -> the rank's pieces, ascending


def zigzag_layout(cu_seqlens: Sequence[int], cp: int) -> Layout:
    """Cuts every sequence into 2*cp chunks of nearly equal size.

    A sequence of fewer than 2*cp tokens stays whole, on the rank with the fewest tokens.

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
            for _ in range(remainder):  # at most one more token in each of a rank's two chunks
                tokens, rank = poorest[0]
                shares[rank] += 1
                if shares[rank] < 2 * base + 2:
                    heapreplace(poorest, (tokens + 1, rank))
                else:
                    heappop(poorest)
        _give(owned, sequence, shares)
        load = [total + share for total, share in zip(load, shares, strict=True)]
    return [_joined(sorted(pieces)) for pieces in owned]


def hybrid_layout(
    cu_seqlens: Sequence[int], cp: int, cost: CostModel = DEFAULT_COST_MODEL, forest: Forest | None = None
) -> Layout:
    """Cuts the longest sequences and keeps the others whole, choosing the number to cut by the least estimated time.

    No rank gets more than its even share of the tokens, rounded up, so a pack of at most cp times a rank's cap keeps
    every rank within the cap. If `zigzag_layout` also satisfies this and is faster by the estimate (`layout_time`), its
    result is returned. Whole sequences are assigned longest first, each to the rank that is then least full. Cut
    sequences, shortest first, then fill all ranks up to the same number of tokens. Unless all sequences are cut, the
    work of the ranks is even within MAX_IMBALANCE.

    Args:
        cu_seqlens: [sequences + 1] offsets of the sequences in the pack, first 0.
        cp: number of context-parallel ranks.
        cost: the cost model, which must be equal on all ranks, or they compute different layouts.
        forest: the tree structure of the sequences, if samples share prefixes. A tree then counts as one sequence
            until its root is cut; after that each subtree below the root counts as one.
    """
    if cp == 1:
        return [_whole(cu_seqlens)]
    pack = _Pack(cu_seqlens, cp, cost.of_owner(), forest)
    best: _Placement | None = None
    for num_cut in _numbers_to_cut(len(pack.nodes)):
        if best is not None and pack.least_time(num_cut) >= best.time:
            break  # cutting more only sends more
        placement = pack.placed(num_cut)
        if placement is None or (placement.imbalance > MAX_IMBALANCE and num_cut < len(pack.nodes)):
            continue
        if best is None or placement.time < best.time:
            best = placement
    assert best is not None  # if all sequences are cut, all ranks are even
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
    """Returns the pieces of every rank whose keys and values must be sent because other ranks attend to them.

    Another rank attends to a piece if it owns a later piece of the same node, or a piece of a descendant.

    Args:
        parents: the parent of every node of the forest; None means that no node has a parent.
    """
    last_starts: dict[int, list[tuple[int, int]]] = {}  # node -> (start of a rank's last piece, rank)
    needed_by: dict[int, set[int]] = {}  # node -> ranks that own pieces of the node's descendants
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
    """Returns the ancestors of a node, root first."""
    above: list[int] = []
    parent = None if parents is None else parents[node]
    while parents is not None and parent is not None:
        above.append(parent)
        parent = parents[parent]
    return above[::-1]


def sent_rows(layout: Layout, parents: Sequence[int | None] | None = None) -> list[int]:
    """Returns for every rank the number of its tokens in `sent_pieces`, [cp]; see there for the arguments."""
    return tokens_of(sent_pieces(layout, parents))


def work_of(layout: Layout, cu_seqlens: Sequence[int], cost: CostModel, forest: Forest | None = None) -> np.ndarray:
    """Returns the estimated work of every rank for the tokens that it owns, attention included; float64 [cp]."""
    pieces = [piece for owned in layout for piece in owned]
    nodes, starts, ends = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    beginnings = np.asarray(cu_seqlens, dtype=np.int64)
    if forest is not None:
        beginnings = beginnings[:-1] - forest.depths  # where a sample that contains this node would begin
    origins = beginnings[nodes]
    ranks = np.repeat(np.arange(len(layout)), [len(owned) for owned in layout])
    return np.bincount(ranks, cost.cost(ends - origins) - cost.cost(starts - origins), len(layout))


def layout_time(layout: Layout, cu_seqlens: Sequence[int], cost: CostModel, forest: Forest | None = None) -> float:
    """Returns the estimated time of a pack.

    Ranks wait for each other in the attention of every layer. The matrix products therefore take as long as on the rank
    with the most tokens, and attention as long as on the rank with the most pairs to compute and rows to send.
    """
    local = cost.of_owner()
    tokens = np.array(tokens_of(layout)) * local.linear
    attention = work_of(layout, cu_seqlens, local, forest) - tokens
    parents = None if forest is None else forest.parents
    sent = local.comm * (len(layout) - 1) * np.array(sent_rows(layout, parents))
    return float(tokens.max() + (attention + sent).max())


class _Placement(NamedTuple):
    time: float
    imbalance: float  # work of the busiest rank / mean work
    whole: list[tuple[int, int]]  # (root of a subtree that stays whole, rank)
    cut: list[tuple[int, list[int]]]  # (node, tokens of every rank)


class _Pack:
    """Computes and compares layouts of a pack; holds its nodes, their costs and the order in which nodes are cut."""

    def __init__(self, cu_seqlens: Sequence[int], cp: int, cost: CostModel, forest: Forest | None) -> None:
        self.nodes = _whole(cu_seqlens)
        self.lengths = [piece.end - piece.start for piece in self.nodes]
        self.parents = (None,) * len(self.nodes) if forest is None else forest.parents
        depths = np.zeros(len(self.nodes)) if forest is None else np.array(forest.depths)
        work: list[float] = (cost.cost(depths + self.lengths) - cost.cost(depths)).tolist()
        self.attention = [of_all - length * cost.linear for of_all, length in zip(work, self.lengths, strict=True)]
        # of the subtree below each node; the subtree stays whole if the node does
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
        self.cut_position = {node: position for position, node in enumerate(self.cut_order)}
        self.has_children = children.keys()
        self.cp = cp
        self.linear = cost.linear
        self.sending = cost.comm * (cp - 1)  # cost of sending one token to all other ranks
        self.cut_tokens = [0, *accumulate(self.lengths[node] for node in self.cut_order)]
        self.max_tokens = -(-self.cut_tokens[-1] // cp)
        self.total_work = sum(work)
        self.per_token = cp / self.cut_tokens[-1]  # scales tokens so that their mean over ranks is 1
        self.per_attention = cp / total if (total := sum(self.attention)) > 0 else 0.0

    def least_time(self, num_cut: int) -> float:
        """Returns a lower bound, up to rounding, on the time of every layout that cuts `num_cut` nodes."""
        return (self.total_work + self.sending * self.cut_tokens[num_cut]) / self.cp

    def least_time_of_zigzag(self) -> float:
        chunks = 2 * self.cp
        # all chunks of a sequence but the last are sent
        sent = sum(length - (length // chunks + 1) for length in self.lengths if length >= chunks)
        return (self.total_work + self.sending * sent) / self.cp

    def placed(self, num_cut: int) -> _Placement | None:
        """Places all nodes and cuts the first `num_cut` of `cut_order`; returns None if a whole node does not fit."""
        tokens = [0] * self.cp
        attention = [0.0] * self.cp
        whole: list[tuple[int, int]] = []
        for node in self.largest_first:
            parent = self.parents[node]
            if self.cut_position[node] < num_cut or not (parent is None or self.cut_position[parent] < num_cut):
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
            # in a zig-zag cut, a rank's share of the attention equals its share of the tokens
            per_token = self.attention[node] / length
            is_sent = max(shares) < length or node in self.has_children
            for rank, share in enumerate(shares):
                tokens[rank] += share
                attention[rank] += share * per_token
                sent[rank] += share * self.sending * is_sent
            cut.append((node, shares))
        work = max(count * self.linear + pairs for count, pairs in zip(tokens, attention, strict=True))
        time = max(tokens) * self.linear + max(pairs + comm for pairs, comm in zip(attention, sent, strict=True))
        return _Placement(time, work * self.cp / self.total_work, whole, cut)

    def _best_rank(self, tokens: list[int], attention: list[float], length: int, pairs: float) -> int | None:
        """Returns the rank that would be least full with this node; None if no rank has room.

        The fullness of a rank is the larger of its tokens and its attention, each relative to the mean. Balancing their
        sum would let a rank with one long sequence wait for another with many short ones.
        """
        best, least = None, (inf, inf)
        for rank in range(self.cp):
            total = tokens[rank] + length
            if total > self.max_tokens:
                continue
            by_tokens, by_attention = total * self.per_token, (attention[rank] + pairs) * self.per_attention
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
    """Yields the numbers of nodes to cut in trials: 0, 1, 2, ..., then in growing strides, and finally all."""
    number = 0
    while number < num_sequences:
        yield number
        number += 1 if number < 16 else number // 4
    yield num_sequences


def _filled_up(tokens: Sequence[int], amount: int) -> list[int]:
    """Divides `amount` further tokens to make ranks as even as possible; returns each rank's share of these, [cp]."""
    ranks = sorted(range(len(tokens)), key=lambda rank: (tokens[rank], rank))
    total = 0
    for count, rank in enumerate(ranks, start=1):
        total += tokens[rank]
        if count == len(ranks) or total + amount <= count * tokens[ranks[count]]:
            break  # the other ranks already have more than this level
    level, remainder = divmod(total + amount, count)
    shares = [0] * len(tokens)
    for position, rank in enumerate(ranks[:count]):
        shares[rank] = level + (position < remainder) - tokens[rank]
    return shares


def _give(owned: Layout, sequence: Piece, shares: Sequence[int]) -> None:
    """Cuts a sequence zig-zag so that rank r gets shares[r] tokens: half from the front and half from the back."""
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
