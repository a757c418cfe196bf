"""Plans the kernel calls by which each rank computes the attention of a pack; all are variable-length calls over rows.

A pack is a forest of nodes, which are runs of tokens. Without shared prefixes every sample is one node without a
parent. The layout gives each context-parallel rank pieces of nodes. A piece sees all pieces of its node's ancestors,
and everything before it in its own node.

There are three kinds of plans. `RingPlan` has one causal call over the rank's own rows, and at most one non-causal call
for each rank, the source, over those keys of the source that the own rows see. The rank itself is a source if its rows
have ancestors on it. The results of all calls are merged by log-sum-exp. `GatherPlan`, which sliding windows need, has
one causal call with a segment for each piece. The keys of a segment are those of the ancestors of the piece's node, of
earlier tokens of the node, and of the piece. `UlyssesPlan` maps the rows of all ranks to the pack, for strategies that
split heads instead of tokens. This module also has the types that strategies and kernels share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch

from slimefsdp.batching.cp_sharding import Piece, ancestors, sent_pieces
from slimefsdp.batching.packing import on_device

Layout = Sequence[Sequence[Piece]]  # [rank] -> the pieces of the rank, ascending
Rows = slice | torch.Tensor  # row indices of a tensor: int64, or a slice, which avoids a copy, if they are a range
KernelName = Literal["torch", "flash_attn"]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Holds how a query scores a key, and which keys it sees in a causal call."""

    scale: float  # factor on the products of queries and keys
    window: int | None = None  # a query sees only this many of the latest keys, its own included, as in Hugging Face
    softcap: float | None = None  # scores become softcap * tanh(score / softcap), as in Gemma 2
    kernel: KernelName = "torch"


# computes (q, k, v, scoring, sinks) of this rank's tokens in one pack -> output [local_tokens, heads, head_dim]
PackAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionParams, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Describes one variable-length attention call: query segment i sees key segment i.

    No segment may be empty: the CPU kernel divides by the length, which would crash the process. All kernel calls take
    their segments from a `CallPlan`, so only its constructor checks this.
    """

    cu_q: tuple[int, ...]  # [segments + 1] offsets
    cu_k: tuple[int, ...]
    # the same offsets as int32 tensors on the device for CUDA kernels; made once for all layers
    device_cu_q: torch.Tensor
    device_cu_k: torch.Tensor

    max_q: int = field(init=False)  # length of the longest segment; computed once for all layers
    max_k: int = field(init=False)
    can_be_causal: bool = field(init=False)  # whether no segment has fewer keys than queries
    is_empty: bool = field(init=False)  # whether there are no segments
    prepared: dict[Any, Any] = field(init=False, default_factory=dict, compare=False, repr=False)  # a kernel's cache

    def __post_init__(self) -> None:
        assert len(self.cu_q) == len(self.cu_k), f"{len(self.cu_q)} query offsets, {len(self.cu_k)} key offsets"
        for offsets in (self.cu_q, self.cu_k):
            assert offsets[0] == 0 and all(a < b for a, b in pairwise(offsets)), f"empty segment in {offsets}"
        queries, keys = ([b - a for a, b in pairwise(offsets)] for offsets in (self.cu_q, self.cu_k))
        object.__setattr__(self, "max_q", max(queries, default=0))
        object.__setattr__(self, "max_k", max(keys, default=0))
        object.__setattr__(self, "can_be_causal", all(q <= k for q, k in zip(queries, keys, strict=True)))
        object.__setattr__(self, "is_empty", not queries)


@dataclass(frozen=True, slots=True)
class SourceCall:
    """Describes a non-causal kernel call of a rank's queries over those keys of one rank, the source, that they see."""

    segments: CallPlan
    q_rows: Rows  # [q_tokens], indices of local rows
    k_rows: Rows  # [k_tokens], indices of the rows that the source sends, or of local rows if the source is this rank


@dataclass(frozen=True, slots=True)
class RingPlan:
    """Holds the kernel calls by which one rank computes the attention of one pack."""

    own: CallPlan  # causal, over the rank's own rows
    sources: tuple[SourceCall | None, ...]  # [rank] -> the call over the keys of this rank, if any
    sent_rows: torch.Tensor  # int64, the local rows that other ranks attend to, ascending
    sent_counts: tuple[int, ...]  # [rank] -> number of rows that the rank sends


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Holds one causal call of one rank; its keys are among the rank's own rows and the rows that other ranks send."""

    call: CallPlan
    key_rows: torch.Tensor  # int64 [k_tokens], indices among own rows followed by received rows
    sent_rows: torch.Tensor  # as in `RingPlan`
    sent_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UlyssesPlan:
    """Maps the rows of all ranks, concatenated by rank, to the rows of the pack."""

    counts: tuple[int, ...]  # [rank] -> number of the rank's rows
    pack_to_ranks: torch.Tensor  # int64 [tokens], for every row of the pack its index among the ranks' rows
    ranks_to_pack: torch.Tensor  # the inverse of pack_to_ranks


def ring_plan(layout: Layout, rank: int, device: torch.device, parents: Sequence[int | None] | None = None) -> RingPlan:
    """Returns the ring plan of `rank`.

    Args:
        layout: the pieces of each rank.
        parents: the parent of every node; None means that no node has a parent.
    """
    forest = _Forest(layout, parents)
    lengths: list[int] = []
    for previous, piece in zip([None, *layout[rank]], layout[rank], strict=False):
        size = piece.end - piece.start
        # pieces of one node form one causal segment, because a later piece sees all earlier ones
        if previous is not None and previous.node == piece.node:
            lengths[-1] += size
        else:
            lengths.append(size)
    sent = sent_pieces(layout, parents)
    sources = []
    for source in range(len(layout)):
        is_self = source == rank
        offsets = _offsets(layout[rank] if is_self else sent[source])
        sources.append(_source_call(forest, rank, source, offsets, device))
    return RingPlan(
        own=_call(lengths, lengths, device),
        sources=tuple(sources),
        sent_rows=_rows(sent[rank], _offsets(layout[rank]), device),
        sent_counts=tuple(_tokens(pieces) for pieces in sent),
    )


def gather_plan(
    layout: Layout, rank: int, device: torch.device, parents: Sequence[int | None] | None = None
) -> GatherPlan:
    """Returns the all-gather plan of `rank`; arguments as for `ring_plan`."""
    forest = _Forest(layout, parents)
    sent = sent_pieces(layout, parents)
    # keys are looked up among the rank's own rows, followed by the rows that the other ranks send
    own_offsets = _offsets(layout[rank])
    offset_of: dict[Piece, int] = dict(own_offsets)
    end = _tokens(layout[rank])
    for source, pieces in enumerate(sent):
        if source != rank:
            for piece in pieces:
                offset_of[piece] = end
                end += piece.end - piece.start
    q_lengths, k_lengths, keys = [], [], []
    for piece in layout[rank]:
        path = [*forest.seen_by(piece, None), piece]
        keys += path
        q_lengths.append(piece.end - piece.start)
        k_lengths.append(_tokens(path))
    return GatherPlan(
        call=_call(q_lengths, k_lengths, device),
        key_rows=_rows(keys, offset_of, device),
        sent_rows=_rows(sent[rank], own_offsets, device),
        sent_counts=tuple(_tokens(pieces) for pieces in sent),
    )


def ulysses_plan(layout: Layout, device: torch.device) -> UlyssesPlan:
    """Returns the Ulysses plan, which is the same on every rank."""
    pieces = [piece for owned in layout for piece in owned]
    parts = [torch.arange(piece.start, piece.end) for piece in pieces]
    ranks_to_pack = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return UlyssesPlan(
        counts=tuple(_tokens(owned) for owned in layout),
        pack_to_ranks=on_device(torch.argsort(ranks_to_pack), device),
        ranks_to_pack=on_device(ranks_to_pack, device),
    )


class _Forest:
    """Finds the pieces that a piece sees."""

    def __init__(self, layout: Layout, parents: Sequence[int | None] | None) -> None:
        self.layout = layout
        self._parents = parents
        self._by_node: list[dict[int, list[Piece]]] = []
        for owned in layout:
            pieces: dict[int, list[Piece]] = {}
            for piece in owned:
                pieces.setdefault(piece.node, []).append(piece)
            self._by_node.append(pieces)
        self._all_parts: dict[int, list[Piece]] = {}  # node -> the pieces of all ranks, ascending
        for node, part in sorted((part.node, part) for owned in layout for part in owned):
            self._all_parts.setdefault(node, []).append(part)

    def seen_by(self, piece: Piece, source: int | None, *, own_node: bool = True) -> list[Piece]:
        """Returns the pieces that `piece` sees: those of its node's ancestors, root first, then those of its own node.

        Args:
            source: the rank whose pieces are returned, ascending within each node; None means all ranks.
            own_node: whether to include the earlier pieces of the same node.
        """
        pieces = [part for node in ancestors(piece.node, self._parents) for part in self._parts(node, source)]
        if own_node:
            pieces += [part for part in self._parts(piece.node, source) if part.end <= piece.start]
        return pieces

    def _parts(self, node: int, source: int | None) -> list[Piece]:
        return (self._all_parts if source is None else self._by_node[source]).get(node, [])


def _source_call(
    forest: _Forest, rank: int, source: int, key_offsets: dict[Piece, int], device: torch.device
) -> SourceCall | None:
    """Builds the call over the keys of one source; pieces that see the same keys share a segment."""
    queries_of: dict[tuple[Piece, ...], list[Piece]] = {}
    for piece in forest.layout[rank]:
        # the rank's own causal call already covers its pieces of the same node
        if keys := tuple(forest.seen_by(piece, source, own_node=source != rank)):
            queries_of.setdefault(keys, []).append(piece)
    if not queries_of:
        return None
    query_offsets = _offsets(forest.layout[rank])
    return SourceCall(
        segments=_call([_tokens(pieces) for pieces in queries_of.values()], [_tokens(k) for k in queries_of], device),
        q_rows=_range_or_rows([piece for pieces in queries_of.values() for piece in pieces], query_offsets, device),
        k_rows=_range_or_rows([piece for keys in queries_of for piece in keys], key_offsets, device),
    )


def _tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.end - piece.start for piece in pieces)


def _offsets(pieces: Iterable[Piece]) -> dict[Piece, int]:
    """Returns the offset of each piece when the pieces are concatenated."""
    offsets, end = {}, 0
    for piece in pieces:
        offsets[piece] = end
        end += piece.end - piece.start
    return offsets


def _rows(pieces: Iterable[Piece], offsets: dict[Piece, int], device: torch.device) -> torch.Tensor:
    parts = [torch.arange(offsets[piece], offsets[piece] + piece.end - piece.start) for piece in pieces]
    return on_device(torch.cat(parts), device) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def _range_or_rows(pieces: Sequence[Piece], offsets: dict[Piece, int], device: torch.device) -> Rows:
    start = end = offsets[pieces[0]]
    for piece in pieces:
        if offsets[piece] != end:
            return _rows(pieces, offsets, device)
        end += piece.end - piece.start
    return slice(start, end)


def _call(q_lengths: Sequence[int], k_lengths: Sequence[int], device: torch.device) -> CallPlan:
    cu_q, cu_k = _cumulative(q_lengths), _cumulative(k_lengths)
    return CallPlan(cu_q, cu_k, *(on_device(torch.tensor(cu, dtype=torch.int32), device) for cu in (cu_q, cu_k)))


def _cumulative(lengths: Sequence[int]) -> tuple[int, ...]:
    total, offsets = 0, [0]
    for length in lengths:
        total += length
        offsets.append(total)
    return tuple(offsets)
