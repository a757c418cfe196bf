"""Packing: samples laid end to end without padding, and one context-parallel rank's share of such a pack.

What is predicted is decided here, on the whole pack, before any split: pair i says that packed row `rows[i]` predicts
token `targets[i]`, which is response token `response_index[i]` of the batch, or what its `target_tokens` have there.
Per-token quantities (weights, advantages, old log-probs) stay in the batch's order and are looked up through
`response_index`, so they are never shifted twice.

Samples that begin alike may lie in a pack as a forest: what they share is one node, which is computed once, and their
own tokens follow it. A response token that several samples share is then one pair, and `fan_out` gives it to each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from slimefsdp.batching.cp_sharding import Piece
from slimefsdp.batching.prefix_tree import Forest, SharedPrefixes, forest_of
from slimefsdp.data.rollout_batch import RolloutBatch


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Several samples concatenated; without shared prefixes each sample is a node with its own pairs."""

    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, of each in its sample
    cu_seqlens: tuple[int, ...]  # [nodes + 1], first 0, last == tokens
    rows: torch.Tensor  # [pairs] int64, the packed row whose hidden state predicts
    targets: torch.Tensor  # [pairs] int64, this token
    response_index: torch.Tensor  # [predicted] int64, the places of what is predicted among the batch's response tokens
    fan_out: torch.Tensor | None = None  # [predicted] int64, the pair of each; None: pair i is of predicted token i
    forest: Forest | None = None  # None: no node goes on from another


@dataclass(frozen=True, slots=True)
class LocalShare:
    """One cp rank's part of a pack: its tokens, and the pairs whose row it owns."""

    tokens: torch.Tensor  # [local_tokens] int64
    positions: torch.Tensor  # [local_tokens] int64
    rows: torch.Tensor  # [local_pairs] int64, among the local tokens
    targets: torch.Tensor  # [local_pairs] int64
    pairs: torch.Tensor  # [local_pairs] int64, their places among the pack's pairs

    def to(self, device: torch.device) -> LocalShare:
        return LocalShare(*(on_device(getattr(self, field.name), device) for field in fields(self)))


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to the device without waiting for pending work: copies to CUDA start from page-locked memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pack(
    batch: RolloutBatch,
    samples: np.ndarray,
    *,
    trained_only: bool,
    multiple_of: int = 1,
    shared: SharedPrefixes | None = None,
) -> PackedBatch:
    """Packs the given samples.

    Args:
        batch: where they are.
        samples: [samples] int64 indices; empty makes a dummy pack of one token and no pairs, which costs a forward and
            backward and adds exactly nothing, so that every rank runs the same number of collectives.
        trained_only: pairs for tokens under the loss mask only, instead of every response token.
        multiple_of: fill the pack up to a multiple of so many tokens, with a document of its own and without pairs.
        shared: what the batch's samples share is in the pack once; None: every sample is whole.
    """
    if len(samples) == 0:
        nothing = torch.zeros(0, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        return _filled_up(PackedBatch(one, one, (0, 1), nothing, nothing, nothing), multiple_of)
    if shared is not None:
        assert multiple_of == 1, "no pack is both shared and filled up"
        return _shared_pack(batch, *shared.among(samples), trained_only=trained_only)
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
        targets=torch.from_numpy(
            tokens[rows + 1] if batch.target_tokens is None else batch.target_tokens[response_index]
        ),
        response_index=torch.from_numpy(response_index),
    )
    return _filled_up(packed, multiple_of)


def _shared_pack(batch: RolloutBatch, samples: np.ndarray, shared: np.ndarray, *, trained_only: bool) -> PackedBatch:
    """Packs the samples as a forest of shared prefixes.

    Args:
        samples, shared: of `SharedPrefixes.among`.
    """
    forest, made_by, sizes, last_node = forest_of(batch.lengths[samples], shared)
    depths = np.array(forest.depths)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    tokens = batch.tokens[_ranges(batch.token_offsets[samples[made_by]] + depths, sizes)]
    responses = batch.response_lengths[samples]
    # each sample's response runs through the last nodes of its path
    runs: list[list[tuple[int, int]]] = []  # (row, tokens) of every sample, ascending
    for node, length, response in zip(
        last_node.tolist(), batch.lengths[samples].tolist(), responses.tolist(), strict=True
    ):
        above: int | None = node
        until, path = length, []
        while above is not None and until > length - response:
            begin = max(int(depths[above]), length - response)
            path.append((int(starts[above]) + begin - int(depths[above]), until - begin))
            until, above = begin, forest.parents[above]
        runs.append(path[::-1])
    places = np.array([run for path in runs for run in path])
    response_rows = _ranges(places[:, 0], places[:, 1])
    response_index = _ranges(batch.response_offsets[samples], responses)
    if trained_only:
        trained = batch.mask[response_index]
        response_rows, response_index = response_rows[trained], response_index[trained]
    # a node's first token is predicted by its parent's last row
    predictor = np.arange(len(tokens)) - 1
    for node, parent in enumerate(forest.parents):
        predictor[starts[node]] = -1 if parent is None else ends[parent] - 1
    if batch.target_tokens is None:
        predicted, fan_out = np.unique(response_rows, return_inverse=True)
        rows, targets = predictor[predicted], tokens[predicted]
    else:  # one pair for each target of a row
        asked = batch.target_tokens[response_index]
        base = int(asked.max(initial=0)) + 1
        both, fan_out = np.unique(predictor[response_rows] * base + asked, return_inverse=True)
        rows, targets = both // base, both % base
    is_one_to_one = bool((fan_out == np.arange(len(response_rows))).all())
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(_ranges(depths, sizes)),
        cu_seqlens=(0, *ends.tolist()),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(targets),
        response_index=torch.from_numpy(response_index),
        fan_out=None if is_one_to_one else torch.from_numpy(fan_out),
        forest=forest if any(parent is not None for parent in forest.parents) else None,
    )


def local_share(packed: PackedBatch, layout: Sequence[Sequence[Piece]], cp_rank: int) -> LocalShare:
    """Returns what cp rank `cp_rank` computes of the pack, given every rank's pieces."""
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
    """Returns [start, start + size) of every entry, concatenated; int64 [sum of sizes]."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within
