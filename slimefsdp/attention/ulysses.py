"""Computes Ulysses attention: an all-to-all turns the split by tokens into a split by heads, and another turns it back.

In between, every rank has the whole pack for some heads, so any local attention works, windows and sinks included.
Key/value heads that are fewer than the ranks are repeated before the exchange; autograd sums their gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slimefsdp.attention.call_plan import UlyssesPlan
from slimefsdp.attention.cp_comm import Comm
from slimefsdp.attention.select import repeated_kv_heads

LocalAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def ulysses_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: UlyssesPlan,
    comm: Comm,
    attend: LocalAttention,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of this rank's queries, [local_tokens, heads, head_dim].

    Args:
        q: [local_tokens, heads, head_dim]; heads must be a multiple of the number of ranks.
        k, v: [local_tokens, kv_heads, head_dim].
        plan: maps the rows of all ranks to the pack.
        attend: computes the pack's attention from (q, k, v, sinks) of this rank's heads, [tokens, heads, head_dim].
        sinks: [heads], the logit of one attention sink per head.
    """
    copies = repeated_kv_heads(q.shape[1], k.shape[1], comm.size) // k.shape[1]
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    heads, kv_heads = q.shape[1] // comm.size, k.shape[1] // comm.size
    # one message to each rank, with its query, key and value heads
    parts = [x.unflatten(1, (comm.size, -1)) for x in (q, k, v)]
    mixed = torch.cat(parts, dim=2)  # [local_tokens, ranks, heads + 2 kv_heads, head_dim]
    whole_q, whole_k, whole_v = _ToHeads.apply(mixed, plan, comm).split([heads, kv_heads, kv_heads], dim=1)
    own_sinks = None if sinks is None else sinks[comm.rank * heads : (comm.rank + 1) * heads]
    whole = attend(whole_q.contiguous(), whole_k.contiguous(), whole_v.contiguous(), own_sinks)
    out: torch.Tensor = _ToTokens.apply(whole, plan, comm)
    return out.flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    """Exchanges [local_tokens, ranks, heads, head_dim] for [tokens, heads, head_dim] of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, mixed: torch.Tensor, plan: UlyssesPlan, comm: Comm) -> torch.Tensor:
        ctx.plan, ctx.comm = plan, comm
        return _to_heads(mixed, plan, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _to_tokens(grads[0], ctx.plan, ctx.comm), None, None


class _ToTokens(torch.autograd.Function):
    """Exchanges [tokens, heads, head_dim] for [local_tokens, ranks, heads, head_dim]; inverse of `_ToHeads`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, plan: UlyssesPlan, comm: Comm) -> torch.Tensor:
        ctx.plan, ctx.comm = plan, comm
        return _to_tokens(whole, plan, comm)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _to_heads(grads[0], ctx.plan, ctx.comm), None, None


def _to_heads(mixed: torch.Tensor, plan: UlyssesPlan, comm: Comm) -> torch.Tensor:
    own = mixed.shape[0]
    by_rank = mixed.transpose(0, 1).flatten(0, 1)  # [ranks * local_tokens, heads, head_dim]
    return comm.all_to_all(by_rank, [own] * comm.size, plan.counts)[plan.pack_to_ranks]


def _to_tokens(whole: torch.Tensor, plan: UlyssesPlan, comm: Comm) -> torch.Tensor:
    own = plan.counts[comm.rank]
    received = comm.all_to_all(whole[plan.ranks_to_pack], plan.counts, [own] * comm.size)
    return received.view(comm.size, own, *whole.shape[1:]).transpose(0, 1)
