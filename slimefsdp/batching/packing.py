"""Packs samples end to end without padding, and takes one context-parallel rank's share of a pack.

The predictions are chosen here on the whole pack, before it is split. Pair i says that packed row `rows[i]` predicts
token `targets[i]`. The target is response token `response_index[i]` of the batch, or the entry of the batch's
`target_tokens` at that index. Per-token quantities (weights, advantages, old log-probs) stay in the batch's order and
are looked up through `response_index`, so nothing is ever shifted twice.

Samples that share prefixes may form a forest in a pack: a shared prefix is one node, which is computed once, and the
rest of each sample follows as child nodes. A response token that several samples share is then a single pair, and
`fan_out` copies its value to each of them.
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
    """Holds several concatenated samples. A pair is a row and the token that it predicts.

    Without shared prefixes each sample is one node with its own pairs.
    """

    tokens: torch.Tensor  # [tokens] int64
    positions: torch.Tensor  # [tokens] int64, position of each token in its sample
    cu_seqlens: tuple[int, ...]  # [nodes + 1], first 0, last == tokens
    rows: torch.Tensor  # [pairs] int64, the packed row whose hidden state makes the prediction
    targets: torch.Tensor  # [pairs] int64, the predicted token
    response_index: torch.Tensor  # [predicted] int64, index of each predicted token among the batch's response tokens
    token_index: torch.Tensor  # [tokens] int64, index of each token among the batch's tokens; -1 for padding
    fan_out: torch.Tensor | None = None  # [predicted] int64, pair of each predicted token; None: the same index
    forest: Forest | None = None  # None means that no node has a parent


@dataclass(frozen=True, slots=True)
class LocalShare:
    """Holds one cp rank's part of a pack: its tokens, and the (row, target) pairs whose row is one of these tokens."""

    tokens: torch.Tensor  # [local_tokens] int64
    positions: torch.Tensor  # [local_tokens] int64
    rows: torch.Tensor  # [local_pairs] int64, indices of local tokens
    targets: torch.Tensor  # [local_pairs] int64
    pairs: torch.Tensor  # [local_pairs] int64, index of each local pair among the pack's pairs
    token_index: torch.Tensor | None = None  # [local_tokens] int64, as in PackedBatch; None for tokens of no batch
    # [local_tokens, layers, experts of a token] int16, to be replayed (slimefsdp.models.routing); None: routers choose
    routed_experts: torch.Tensor | None = None

    def to(self, device: torch.device) -> LocalShare:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(
            self, **{name: on_device(tensor, device) for name, tensor in tensors.items() if tensor is not None}
        )


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor to the device without waiting for pending work; to CUDA it goes through page-locked memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def pack(
    batch: RolloutBatch,
    samples: np.ndarray,
    *,
    trained_only: bool,
    multiple_of: int = 1,
    shared: SharedPrefixes | None = None,
) -> PackedBatch:
    """Packs samples of a batch.

    Args:
        samples: [samples] int64 indices. Without any, the result is a dummy pack of one token without pairs. With it a
            rank runs as many collectives as the others, and contributes exactly nothing to gradients.
        trained_only: make pairs only for tokens under the loss mask, not for every response token.
        multiple_of: pad the pack to a multiple of this number of tokens; padding is a separate sequence without pairs.
        shared: the prefixes that the pack computes once; None means that every sample is packed whole.
    """
    if len(samples) == 0:
        no_rows = torch.zeros(0, dtype=torch.int64)
        one_token = torch.zeros(1, dtype=torch.int64)
        dummy = PackedBatch(one_token, one_token, (0, 1), no_rows, no_rows, no_rows, token_index=one_token - 1)
        return _filled_up(dummy, multiple_of)
    if shared is not None:
        assert multiple_of == 1, "a pack with shared prefixes cannot be padded"
        return _shared_pack(batch, *shared.among(samples), trained_only=trained_only)
    lengths = batch.lengths[samples]
    responses = batch.response_lengths[samples]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    positions = _ranges(np.zeros_like(lengths), lengths)
    token_index = _ranges(batch.token_offsets[samples], lengths)
    tokens = batch.tokens[token_index]
    # the row before a token predicts it; the prompt's last row predicts the first response token
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
        token_index=torch.from_numpy(token_index),
    )
    return _filled_up(packed, multiple_of)


def _shared_pack(batch: RolloutBatch, samples: np.ndarray, shared: np.ndarray, *, trained_only: bool) -> PackedBatch:
    """Packs samples as a forest of shared prefixes.

    Args:
        samples, shared: as returned by `SharedPrefixes.among`.
    """
    forest, source_sample, sizes, last_node = forest_of(batch.lengths[samples], shared)
    depths = np.array(forest.depths)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    token_index = _ranges(batch.token_offsets[samples[source_sample]] + depths, sizes)
    tokens = batch.tokens[token_index]
    responses = batch.response_lengths[samples]
    # each sample's response runs through the last nodes of its path
    runs: list[list[tuple[int, int]]] = []  # of every sample: (first row, number of rows), ascending
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
    rows_and_sizes = np.array([run for path in runs for run in path])
    response_rows = _ranges(rows_and_sizes[:, 0], rows_and_sizes[:, 1])
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
    else:  # one pair for each distinct (row, target)
        wanted = batch.target_tokens[response_index]
        base = int(wanted.max(initial=0)) + 1
        row_and_target, fan_out = np.unique(predictor[response_rows] * base + wanted, return_inverse=True)
        rows, targets = row_and_target // base, row_and_target % base
    is_one_to_one = bool((fan_out == np.arange(len(response_rows))).all())
    return PackedBatch(
        tokens=torch.from_numpy(tokens),
        positions=torch.from_numpy(_ranges(depths, sizes)),
        cu_seqlens=(0, *ends.tolist()),
        rows=torch.from_numpy(rows),
        targets=torch.from_numpy(targets),
        response_index=torch.from_numpy(response_index),
        token_index=torch.from_numpy(token_index),
        fan_out=None if is_one_to_one else torch.from_numpy(fan_out),
        forest=forest if any(parent is not None for parent in forest.parents) else None,
    )


def local_share(packed: PackedBatch, layout: Sequence[Sequence[Piece]], cp_rank: int) -> LocalShare:
    """Returns one cp rank's share of a pack; `layout` has the pieces of every rank."""
    if len(layout) == 1:
        everything = torch.arange(len(packed.rows))
        return LocalShare(packed.tokens, packed.positions, packed.rows, packed.targets, everything, packed.token_index)
    parts = [torch.arange(piece.start, piece.end) for piece in layout[cp_rank]]
    owned = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    local_row = torch.full((len(packed.tokens),), -1)
    local_row[owned] = torch.arange(len(owned))
    pairs = (local_row[packed.rows] >= 0).nonzero()[:, 0]
    return LocalShare(
        tokens=packed.tokens[owned],
        positions=packed.positions[owned],
        rows=local_row[packed.rows[pairs]],
        targets=packed.targets[pairs],
        pairs=pairs,
        token_index=packed.token_index[owned],
    )


def _filled_up(packed: PackedBatch, multiple_of: int) -> PackedBatch:
    missing = -packed.cu_seqlens[-1] % multiple_of
    if missing == 0:
        return packed
    return replace(
        packed,
        tokens=torch.cat([packed.tokens, torch.zeros(missing, dtype=torch.int64)]),
        positions=torch.cat([packed.positions, torch.arange(missing)]),
        token_index=torch.cat([packed.token_index, torch.full((missing,), -1)]),
        cu_seqlens=(*packed.cu_seqlens, packed.cu_seqlens[-1] + missing),
    )


def _ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Returns [start, start + size) of every entry, concatenated; int64 [sum of sizes]."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.repeat(starts, sizes) + within
