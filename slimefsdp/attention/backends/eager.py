"""Computes variable-length attention in plain torch, for soft-capped scores and any dtype and head size.

Scores are kept for one block of queries at a time, so memory is linear in the sequence length. On CUDA, where each
operation is a kernel launch, blocks are larger and hold pieces of several segments with similar numbers of queries and
keys; the shorter pieces are padded with their last row, which is masked. As in `slimefsdp.attention.varlen`, the
backward takes output and log-sum-exp as arguments. With S = scale * q k^T, capped scores C = cap * tanh(S / cap) and
P = exp(C - lse):

    dV = P^T dO      dC = P * (dO V^T - rowsum(dO * O))      dS = dC * (1 - (C / cap)^2)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from slimefsdp.attention.call_plan import AttentionParams, CallPlan, Rows
from slimefsdp.batching.packing import on_device

_FILL = 2  # every piece of a block has at least 1/_FILL of the scores of the block's shape
_FAR = 2**60  # a position after all rows
_SHARE_OF_MEMORY = 128  # a block's scores take 1/128 of the GPU's memory; a backward pass needs about five times that


@dataclass(frozen=True, slots=True)
class Blocking:
    score_bytes: int  # bytes of the scores of one block
    joins_segments: bool  # whether a block holds pieces of several segments


def blocking_on(device: torch.device) -> Blocking:
    """Returns small blocks for a CPU, to fit its caches, and large ones for a GPU, to save kernel launches."""
    if device.type == "cpu":
        return Blocking(32 * 2**20, joins_segments=False)
    memory = torch.cuda.get_device_properties(device).total_memory
    return Blocking(memory // _SHARE_OF_MEMORY, joins_segments=True)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CallPlan, scoring: AttentionParams, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output, [q_tokens, heads, head_dim] in q's dtype, and the log-sum-exp, [heads, q_tokens].

    The log-sum-exp is at least float32.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=wide)
    for block in _blocks(call, q, scoring.window, causal=causal):
        qs, ks = block.queries, block.keys
        queries, keys, values = _grouped(q[qs], k.shape[1], wide), _keys(k[ks], wide), _keys(v[ks], wide)
        scores = _scores(queries, keys, scoring, block.is_hidden)
        row_lse = scores.logsumexp(-1)  # [.., kv_heads, group, rows]
        probabilities = (scores - row_lse.unsqueeze(-1)).exp_()
        out[qs] = _ungrouped(probabilities @ values.unsqueeze(-3)).to(q.dtype)
        lse[:, qs] = row_lse.flatten(-3, -2).movedim(-2, 0)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
    call: CallPlan,
    scoring: AttentionParams,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = qkv
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for block in _blocks(call, q, scoring.window, causal=causal):
        qs, ks = block.queries, block.keys
        queries, keys, values = _grouped(q[qs], k.shape[1], wide), _keys(k[ks], wide), _keys(v[ks], wide)
        grads = _grouped(grad_out[qs], k.shape[1], wide)
        if block.is_filler is not None:
            grads = grads.masked_fill(block.is_filler, 0.0)
        scores = _scores(queries, keys, scoring, block.is_hidden)
        row_lse = lse[:, qs].movedim(0, -2).unflatten(-2, (k.shape[1], -1)).unsqueeze(-1)
        probabilities = (scores - row_lse).exp_()
        _add(dv, ks, (probabilities.transpose(-1, -2) @ grads).sum(-3).transpose(-3, -2))
        delta = (grads * _grouped(out[qs], k.shape[1], wide)).sum(-1, keepdim=True)
        d_scores = probabilities * (grads @ values.unsqueeze(-3).transpose(-1, -2) - delta)
        if scoring.softcap is not None:
            # the probability of a hidden key is 0, but its score -inf would give an infinite slope
            slope = 1 - (scores / scoring.softcap).square()
            d_scores *= slope if block.is_hidden is None else slope.masked_fill_(block.is_hidden, 0.0)
        d_scores *= scoring.scale
        d_queries = _ungrouped(d_scores @ keys.unsqueeze(-3))
        if isinstance(qs, slice):
            dq[qs] = d_queries
        else:
            _add(dq, qs, d_queries)
        _add(dk, ks, (d_scores.transpose(-1, -2) @ queries).sum(-3).transpose(-3, -2))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _add(into: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        into[rows] += values
    else:  # a row may occur several times: pieces of one segment share keys, and padding repeats rows with zeros
        into.index_add_(0, rows.flatten(), values.flatten(0, 1))


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, scoring: AttentionParams, is_hidden: torch.Tensor | None
) -> torch.Tensor:
    """Returns scores [.., kv_heads, group, rows, keys], minus infinity at hidden keys."""
    scores = (queries @ keys.unsqueeze(-3).transpose(-1, -2)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores if is_hidden is None else scores.masked_fill_(is_hidden, float("-inf"))


def _grouped(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).unflatten(-2, (kv_heads, -1)).movedim(-4, -2)  # [.., kv_heads, group, rows, head_dim]


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(-2, -4).flatten(-3, -2)  # [.., rows, heads, head_dim]


def _keys(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).transpose(-3, -2)  # [.., kv_heads, keys, head_dim]


# ---------------------------------------------------------------------- blocks


@dataclass(frozen=True, slots=True)
class _Block:
    """Holds the rows of queries and of the keys that they may see, of one piece, or of pieces padded to one length."""

    queries: Rows
    keys: Rows
    is_hidden: torch.Tensor | None  # [(pieces, 1, 1,) rows, keys]; None means that every query sees every key
    is_filler: torch.Tensor | None = None  # [pieces, 1, 1, rows, 1], True for padding queries, which repeat a row


@dataclass(frozen=True, slots=True)
class _Piece:
    """Holds ranges of queries and keys of one segment, as rows of q and of k."""

    q0: int
    q1: int
    k0: int
    k1: int
    own: int  # the latest key that the first query sees

    @property
    def scores(self) -> int:
        return (self.q1 - self.q0) * (self.k1 - self.k0)


def _blocks(call: CallPlan, q: torch.Tensor, window: int | None, *, causal: bool) -> Iterator[_Block]:
    blocking = blocking_on(q.device)
    most_scores = blocking.score_bytes // (torch.promote_types(q.dtype, torch.float32).itemsize * q.shape[1])
    if blocking.joins_segments:
        for joined in _joined(call.cu_q, call.cu_k, window, causal, most_scores, q.device):
            yield joined.block(window, causal=causal)
        return
    for piece in _pieces(call.cu_q, call.cu_k, window, causal, most_scores):
        is_hidden = None
        if causal:
            query_positions = torch.arange(piece.own, piece.own + piece.q1 - piece.q0, device=q.device)[:, None]
            distance = query_positions - torch.arange(piece.k0, piece.k1, device=q.device)[None, :]
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        yield _Block(slice(piece.q0, piece.q1), slice(piece.k0, piece.k1), is_hidden)


def _pieces(
    cu_q: tuple[int, ...], cu_k: tuple[int, ...], window: int | None, causal: bool, most_scores: int
) -> Iterator[_Piece]:
    """Cuts the segments into pieces of queries with at most about `most_scores` scores per head, and yields them."""
    for (q0, q1), (k0, k1) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        queries, keys = q1 - q0, k1 - k0
        extra_keys = keys - queries
        span = keys if window is None else min(keys, window + 16)
        rows = max(16, most_scores // span)
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            first_key = 0 if window is None or not causal else max(0, start + extra_keys - window + 1)
            last_key = end + extra_keys if causal else keys
            yield _Piece(q0 + start, q0 + end, k0 + first_key, k0 + last_key, k0 + start + extra_keys)


@dataclass(frozen=True, slots=True)
class _Joined:
    """Holds pieces of attention (queries and the keys that they see) that are computed together.

    `queries` and `keys` are int64 row indices in the packed queries and keys. Shorter pieces repeat their last index.
    """

    queries: torch.Tensor  # [pieces, rows]
    keys: torch.Tensor  # [pieces, keys]
    newest: torch.Tensor  # [pieces, rows], the latest key that each query sees
    key_positions: torch.Tensor  # [pieces, keys], equal to `keys`, but after all queries for padding
    is_filler: torch.Tensor  # [pieces, rows] bool, True for padding

    def block(self, window: int | None, *, causal: bool) -> _Block:
        """Returns the block with its mask; the mask is too large to be cached."""
        distance = self.newest.unsqueeze(-1) - self.key_positions.unsqueeze(-2)
        is_hidden = distance < 0
        if causal and window is not None:
            is_hidden |= distance >= window
        return _Block(self.queries, self.keys, is_hidden[:, None, None], self.is_filler[:, None, None, :, None])


@lru_cache(maxsize=16)  # every layer needs the result in forward and backward; a pack has few kinds of layers and calls
def _joined(
    cu_q: tuple[int, ...],
    cu_k: tuple[int, ...],
    window: int | None,
    causal: bool,
    most_scores: int,
    device: torch.device,
) -> tuple[_Joined, ...]:
    most_of_piece = most_scores
    if window is not None and causal:  # in larger pieces most queries would not see most keys
        most_of_piece = min(most_scores, max(window, 128) * (window + 16))
    pieces = sorted(_pieces(cu_q, cu_k, window, causal, most_of_piece), key=lambda piece: -piece.scores)
    joined: list[_Joined] = []
    while pieces:
        count, rows, keys = 0, 0, 0
        for piece in pieces:
            more_rows, more_keys = max(rows, piece.q1 - piece.q0), max(keys, piece.k1 - piece.k0)
            is_full = (count + 1) * more_rows * more_keys > most_scores
            if count and (is_full or _FILL * piece.scores < more_rows * more_keys):
                break
            count, rows, keys = count + 1, more_rows, more_keys
        joined.append(_join(pieces[:count], rows, keys, causal, device))
        del pieces[:count]
    return tuple(joined)


def _join(pieces: list[_Piece], rows: int, keys: int, causal: bool, device: torch.device) -> _Joined:
    q0, q1, k0, k1, own = (
        torch.tensor([getattr(piece, name) for piece in pieces])[:, None] for name in ("q0", "q1", "k0", "k1", "own")
    )
    queries, key_rows = q0 + torch.arange(rows), k0 + torch.arange(keys)
    query_rows = torch.minimum(queries, q1 - 1)
    newest = own + query_rows - q0 if causal else torch.full_like(queries, _FAR)
    return _Joined(
        queries=on_device(query_rows, device),
        keys=on_device(torch.minimum(key_rows, k1 - 1), device),
        newest=on_device(newest, device),
        key_positions=on_device(key_rows.masked_fill(key_rows >= k1, 2 * _FAR), device),
        is_filler=on_device(queries >= q1, device),
    )
