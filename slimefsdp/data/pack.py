"""Packing: samples laid end to end without padding, and one context-parallel rank's share of such a pack.

What is predicted is decided here, on the whole pack, before any split: pair i says that packed row `rows[i]` predicts
token `targets[i]`, which is response token `response_index[i]` of the batch. Per-token quantities (weights, advantages,
old log-probs) stay in the batch's order and are looked up through `response_index`, so they are never shifted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from slimefsdp.data.layout import Piece
from slimefsdp.data.rollout import RolloutBatch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Several samples laid end to end."""

    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, restart at 0 at each sample
    cu_seqlens: tuple[int, ...]  # [samples + 1], first 0, last == tokens
    rows: torch.Tensor  # [pairs] int64, the packed row whose hidden state predicts
    targets: torch.Tensor  # [pairs] int64, this token
    response_index: torch.Tensor  # [pairs] int64, its place among the batch's response tokens


@dataclass(frozen=True, slots=True)
class LocalShare:
    """One cp rank's part of a pack: its tokens, and the pairs whose row it owns."""

    tokens: torch.Tensor  # [local_tokens] int64
    positions: torch.Tensor  # [local_tokens] int64
    rows: torch.Tensor  # [local_pairs] int64, among the local tokens
    targets: torch.Tensor  # [local_pairs] int64
    pairs: torch.Tensor  # [local_pairs] int64, their places among the pack's pairs

    def to(self, device: torch.device) -> LocalShare:
        """The same on another device."""
        return LocalShare(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def pack(batch: RolloutBatch, samples: np.ndarray, *, trained_only: bool, multiple_of: int = 1) -> PackedBatch:
    """The given samples as one pack.

    Args:
        batch: where they are.
        samples: [samples] int64 indices; empty makes a dummy pack of one token and no pairs, which costs a forward and
            backward and adds exactly nothing, so that every rank runs the same number of collectives.
        trained_only: pairs for tokens under the loss mask only, instead of every response token.
        multiple_of: fill the pack up to a multiple of so many tokens, with a document of its own and without pairs.
    """
    if len(samples) == 0:
        nothing = torch.zeros(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        return _filled_up(PackedBatch(one, one, (0, 1), nothing, nothing, nothing), multiple_of)
    lengths = batch.lengths[samples]
    responses = batch.response_lengths[samples]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    positions = _ranges(np.zeros_like(lengths), lengths)
    tokens = batch.tokens[
        _ranges(batch.token_offsets[samples], lengths)
    ]  # fancy indexing copies: the batch is read-only
    # token j of a sample is predicted by the row before it; the first response token by the prompt's last row
    rows = _ranges(cu_seqlens[1:] - responses - 1, responses)
    response_index = _ranges(batch.response_offsets[samples], responses)
    if trained_only:
        trained = batch.mask[response_index]
        rows, response_index = rows[trained], response_index[trained]
    packed = PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(positions),
        cu_seqlens=tuple(int(offset) for offset in cu_seqlens),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(tokens[rows + 1]),
        response_index=torch.from_numpy(response_index),
    )
    return _filled_up(packed, multiple_of)


def local_share(packed: PackedBatch, layout: Sequence[Sequence[Piece]], cp_rank: int) -> LocalShare:
    """What cp rank `cp_rank` computes of the pack, given every rank's pieces."""
    if len(layout) == 1:
        everything = torch.arange(len(packed.rows))
        return LocalShare(packed.tokens, packed.positions, packed.rows, packed.targets, everything)
    parts = [torch.arange(piece.start, piece.end) for piece in layout[cp_rank]]
    owned = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    place = torch.full((len(packed.tokens),), -1)
    place[owned] = torch.arange(len(owned))
    pairs = (place[packed.rows] >= 0).nonzero()[:, 0]
    return LocalShare(
        tokens=packed.tokens[owned],
        positions=packed.positions[owned],
        rows=place[packed.rows[pairs]],
        targets=packed.targets[pairs],
        pairs=pairs,
    )


def _filled_up(packed: PackedBatch, multiple_of: int) -> PackedBatch:
    missing = -packed.cu_seqlens[-1] % multiple_of
    if missing == 0:
        return packed
    return replace(
        packed,
        tokens=torch.cat([packed.tokens, torch.zeros(missing, dtype=torch.int64)]),
        positions=torch.cat([packed.positions, torch.arange(missing)]),
        cu_seqlens=(*packed.cu_seqlens, packed.cu_seqlens[-1] + missing),
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """[start, start + size) of every entry, end to end; int64 [sum of sizes]."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within
