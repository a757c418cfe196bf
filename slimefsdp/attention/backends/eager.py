"""Variable-length attention in plain torch, for what flash kernels lack: soft-capped scores, any dtype, any head size.

Scores are held for one block of queries at a time, so memory stays linear in the length. The interface is that of
`slimefsdp.attention.varlen`: the backward takes output and log-sum-exp as given. With S = scale * q k^T, capped scores
C = cap * tanh(S / cap) and P = exp(C - lse):

    dV = P^T dO      dC = P * (dO V^T - rowsum(dO * O))      dS = dC * (1 - (C / cap)^2)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch

from slimefsdp.attention.call_plan import AttentionParams, CallPlan

_BLOCK_BYTES = 32 * 2**20  # of one block's scores


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CallPlan, scoring: AttentionParams, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [q_tokens, heads, head_dim] in q's dtype and log-sum-exp [heads, q_tokens], at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:2], v.shape[-1])
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=wide)
    for qs, ks, is_hidden in _blocks(call, q, scoring.window, causal=causal):
        queries, keys, values = _grouped(q[qs], k.shape[1], wide), _keys(k[ks], wide), _keys(v[ks], wide)
        scores = _scores(queries, keys, scoring, is_hidden)
        row_lse = scores.logsumexp(-1)  # [kv_heads, group, rows]
        probabilities = (scores - row_lse.unsqueeze(-1)).exp_()
        out[qs] = _ungrouped(probabilities @ values.unsqueeze(1)).to(q.dtype)
        lse[:, qs] = row_lse.flatten(0, 1)
    return out, lse


def backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: CallPlan,
    scoring: AttentionParams,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v in their shapes and dtypes."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q)
    dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for qs, ks, is_hidden in _blocks(call, q, scoring.window, causal=causal):
        queries, keys, values = _grouped(q[qs], k.shape[1], wide), _keys(k[ks], wide), _keys(v[ks], wide)
        grads = _grouped(grad_out[qs], k.shape[1], wide)
        scores = _scores(queries, keys, scoring, is_hidden)
        row_lse = lse[:, qs].unflatten(0, (k.shape[1], -1)).unsqueeze(-1)
        probabilities = (scores - row_lse).exp_()
        dv[ks] += (probabilities.transpose(-1, -2) @ grads).sum(1).transpose(0, 1)
        delta = (grads * _grouped(out[qs], k.shape[1], wide)).sum(-1, keepdim=True)
        d_scores = probabilities * (grads @ values.unsqueeze(1).transpose(-1, -2) - delta)
        if scoring.softcap is not None:
            # a hidden score is -inf: its probability, and with it its gradient, is 0 already
            slope = 1 - (scores / scoring.softcap).square()
            d_scores *= slope if is_hidden is None else slope.masked_fill_(is_hidden, 0.0)
        d_scores *= scoring.scale
        dq[qs] = _ungrouped(d_scores @ keys.unsqueeze(1)).to(q.dtype)
        dk[ks] += (d_scores.transpose(-1, -2) @ queries).sum(1).transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, scoring: AttentionParams, is_hidden: torch.Tensor | None
) -> torch.Tensor:
    """[kv_heads, group, rows, keys], minus infinity where a query does not see."""
    scores = (queries @ keys.unsqueeze(1).transpose(-1, -2)).mul_(scoring.scale)
    if scoring.softcap is not None:
        scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    return scores if is_hidden is None else scores.masked_fill_(is_hidden, float("-inf"))


def _grouped(x: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]


def _ungrouped(x: torch.Tensor) -> torch.Tensor:
    return x.permute(2, 0, 1, 3).flatten(1, 2)  # [rows, heads, head_dim]


def _keys(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).transpose(0, 1)  # [kv_heads, keys, head_dim]


def _blocks(
    call: CallPlan, q: torch.Tensor, window: int | None, *, causal: bool
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """(queries, keys, [rows, keys] bool of what is hidden) of every block."""
    for (q0, q1), (k0, k1) in zip(pairwise(call.cu_q), pairwise(call.cu_k), strict=True):
        queries, keys = q1 - q0, k1 - k0
        more = keys - queries
        seen = keys if window is None else min(keys, window + 16)
        rows = max(16, _BLOCK_BYTES // (torch.promote_types(q.dtype, torch.float32).itemsize * q.shape[1] * seen))
        for start in range(0, queries, rows):
            end = min(start + rows, queries)
            if not causal:
                yield slice(q0 + start, q0 + end), slice(k0, k1), None
                continue
            first_key = 0 if window is None else max(0, start + more - window + 1)
            query_places = torch.arange(start + more, end + more, device=q.device)[:, None]
            distance = query_places - torch.arange(first_key, end + more, device=q.device)[None, :]
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            yield slice(q0 + start, q0 + end), slice(k0 + first_key, k0 + end + more), is_hidden
