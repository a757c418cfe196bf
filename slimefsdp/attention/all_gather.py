"""Computes all-gather attention: each rank fetches the keys and values that it attends to, and calls one causal kernel.

The keys of a piece are those of its node's ancestors, and of its node up to its end, so that sliding windows work as on
one rank. Keys and values are kept for the backward, which sends gradients to their owners in at least float32.
"""

from __future__ import annotations

from typing import Any

import torch

from slimefsdp.attention.call_plan import AttentionParams, GatherPlan
from slimefsdp.attention.cp_comm import Comm
from slimefsdp.attention.lse_merge import absorb_sinks, sinks_grad
from slimefsdp.attention.varlen import Saved, varlen_backward, varlen_forward


def all_gather_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: GatherPlan,
    comm: Comm | None,
    scoring: AttentionParams,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of this rank's queries, [local_tokens, heads, head_dim]; see `ring_attention` for Args."""
    out: torch.Tensor = _AllGatherAttention.apply(q, k, v, sinks, plan, comm, scoring)
    return out


class _AllGatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: GatherPlan,
        comm: Comm | None,
        scoring: AttentionParams,
    ) -> torch.Tensor:
        keys_values = torch.stack([k, v])  # [2, local_tokens, kv_heads, head_dim]
        if comm is not None and any(plan.sent_counts):
            sent = keys_values[:, plan.sent_rows]
            fetched = [keys_values.new_empty(2, rows, *keys_values.shape[2:]) for rows in plan.sent_counts]
            comm.exchange([sent] * comm.size, fetched).wait()
            keys_values = torch.cat([keys_values, *_without(fetched, comm.rank)], dim=1)
        keys, values = keys_values[:, plan.key_rows]
        out, saved = varlen_forward(q, keys, values, plan.call, scoring, causal=True)
        lse = saved.lse
        if sinks is not None:
            out, lse = absorb_sinks(out.to(lse.dtype), lse, sinks)
            out = out.to(q.dtype)
        ctx.save_for_backward(q, keys_values, sinks, out, lse, *saved.of_kernel)
        ctx.plan, ctx.comm, ctx.scoring = plan, comm, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, keys_values, sinks, out, lse, *extra = ctx.saved_tensors
        plan, comm, grad_out = ctx.plan, ctx.comm, grads[0].contiguous()
        keys, values = keys_values[:, plan.key_rows]
        dq, dk, dv = varlen_backward(
            grad_out, (q, keys, values), out, Saved(lse, *extra), plan.call, ctx.scoring, causal=True
        )
        # a row may be a key of several pieces, so its gradients are summed, in at least float32
        sums = torch.zeros_like(keys_values, dtype=lse.dtype)
        sums[0].index_add_(0, plan.key_rows, dk.to(lse.dtype))
        sums[1].index_add_(0, plan.key_rows, dv.to(lse.dtype))
        own = sums[:, : q.shape[0]]
        if comm is not None and any(plan.sent_counts):
            others = _without(plan.sent_counts, comm.rank)
            parts = list(sums[:, q.shape[0] :].split(others, dim=1))
            parts = [part.contiguous() for part in parts]
            outgoing = [*parts[: comm.rank], sums[:, :0], *parts[comm.rank :]]
            arriving = [sums.new_empty(2, len(plan.sent_rows), *sums.shape[2:]) for _ in range(comm.size)]
            comm.exchange(outgoing, arriving).wait()
            for part in _without(arriving, comm.rank):
                own.index_add_(1, plan.sent_rows, part)
        d_sinks = None if sinks is None else sinks_grad(grad_out, out, lse, sinks)
        return dq, own[0].to(keys_values.dtype), own[1].to(keys_values.dtype), d_sinks, None, None, None


def _without(items: Any, index: int) -> list[Any]:
    return [*items[:index], *items[index + 1 :]]
