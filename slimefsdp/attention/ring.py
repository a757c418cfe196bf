"""Computes ring attention: keys and values pass round the ranks, and each rank merges the results over all of them.

While a rank computes with the keys of one source rank, it receives the keys of the next. In backward the keys pass
round again. Their gradients follow one step behind in an accumulator, to which every rank adds before it returns to the
owner. With a single rank this is plain packed attention, in which nodes may still attend to their parents.
"""

from __future__ import annotations

from typing import Any

import torch

from slimefsdp.attention.call_plan import AttentionParams, RingPlan
from slimefsdp.attention.cp_comm import Comm, Transfer
from slimefsdp.attention.lse_merge import absorb_sinks, add_rows, merge_rows, sinks_grad
from slimefsdp.attention.varlen import Saved, varlen_backward, varlen_forward


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: RingPlan,
    comm: Comm | None,
    scoring: AttentionParams,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the attention of this rank's queries, [local_tokens, heads, head_dim].

    Args:
        q: [local_tokens, heads, head_dim].
        k, v: [local_tokens, kv_heads, head_dim].
        plan: the calls of this rank.
        comm: communication with the other ranks; None: there are none.
        scoring: may have a window only if the plan has no call besides its own causal one.
        sinks: [heads], the logit of one attention sink per head.
    """
    has_sources = any(call is not None for call in plan.sources)
    assert scoring.window is None or not has_sources, "a window cannot be cut into calls by source"
    out: torch.Tensor = _RingAttention.apply(q, k, v, sinks, plan, comm, scoring)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: RingPlan,
        comm: Comm | None,
        scoring: AttentionParams,
    ) -> torch.Tensor:
        ring = _Ring(plan, comm)
        incoming = ring.start(k, v)
        out, saved = varlen_forward(q, k, v, plan.own, scoring, causal=True)
        lse = saved.lse
        if any(plan.sources):
            # copied, because activation checkpointing may have saved the kernel's own outputs
            out, lse = out.to(lse.dtype, copy=True), lse.clone()
        elif sinks is not None:
            out = out.to(lse.dtype)
        keys, values = k, v
        for step, source in enumerate(ring.order):
            if step > 0:
                keys, values = keys_values = ring.received(incoming)
                incoming = ring.pass_on(keys_values, step)
            if call := plan.sources[source]:
                part, part_saved = varlen_forward(
                    q[call.q_rows], keys[call.k_rows], values[call.k_rows], call.segments, scoring, causal=False
                )
                merge_rows(out, lse, call.q_rows, part, part_saved.lse)
        if sinks is not None:
            out, lse = absorb_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse, *saved.of_kernel)
        ctx.plan, ctx.comm, ctx.scoring = plan, comm, scoring
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse, *extra = ctx.saved_tensors
        plan, scoring, grad_out = ctx.plan, ctx.scoring, grads[0].contiguous()
        ring = _Ring(plan, ctx.comm)
        incoming = ring.start(k, v)
        dq, dk, dv = varlen_backward(grad_out, (q, k, v), out, Saved(lse, *extra), plan.own, scoring, causal=True)
        if any(plan.sources) or ring.travels:
            dq, dk, dv = (grad.to(lse.dtype) for grad in (dq, dk, dv))
        keys, values = k, v
        returning: Transfer | None = None
        for step, source in enumerate(ring.order):
            if step > 0:
                keys, values = keys_values = ring.received(incoming)
                incoming = ring.pass_on(keys_values, step)
            grads_of_keys = None
            if call := plan.sources[source]:
                rows, segments = call.q_rows, call.segments
                part_q, part_k, part_v = varlen_backward(
                    grad_out[rows], (q[rows], keys[call.k_rows], values[call.k_rows]), out[rows],
                    Saved(lse[:, rows].contiguous(), *extra), segments, scoring, causal=False,
                )  # fmt: skip
                add_rows(dq, rows, part_q)
                grads_of_keys = (part_k, part_v)
            travelling = ring.accumulator(returning, source, like=keys, dtype=lse.dtype) if step > 0 else None
            if call is not None and grads_of_keys is not None:
                for total, part in zip((dk, dv) if travelling is None else travelling, grads_of_keys, strict=True):
                    add_rows(total, call.k_rows, part)
            if travelling is not None:
                returning = ring.hand_over(travelling, source)
        if returning is not None:  # after the last step the sums of a rank's own keys return to it
            returned = returning.wait()[0]
            dk.index_add_(0, plan.sent_rows, returned[0])
            dv.index_add_(0, plan.sent_rows, returned[1])
        d_sinks = None if sinks is None else sinks_grad(grad_out, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None, None, None


class _Ring:
    """Passes keys, values and their gradients round the ranks, as seen from one rank."""

    def __init__(self, plan: RingPlan, comm: Comm | None) -> None:
        self._plan = plan
        self._comm = comm
        self.travels = any(plan.sent_counts)
        rank, size = (comm.rank, comm.size) if comm is not None else (0, 1)
        # the rank itself first, then the others in the order in which their rows arrive
        self.order = [(rank - step) % size for step in range(size if self.travels else 1)]

    def start(self, k: torch.Tensor, v: torch.Tensor) -> Transfer | None:
        """Sends those of this rank's own rows that other ranks attend to."""
        if len(self.order) == 1:
            return None
        rows = self._plan.sent_rows
        return self.pass_on(torch.stack([k[rows], v[rows]]), 0)

    def pass_on(self, keys_values: torch.Tensor, step: int) -> Transfer | None:
        """Sends the rows that arrived at `step` to the next rank, unless every rank has had them."""
        if step + 1 >= len(self.order):
            return None
        assert self._comm is not None
        return self._comm.pass_on(keys_values, self._plan.sent_counts[self.order[step + 1]])

    @staticmethod
    def received(transfer: Transfer | None) -> torch.Tensor:
        """Returns a source's keys and values, [2, rows, kv_heads, head_dim]."""
        assert transfer is not None
        return transfer.wait()[0]

    def accumulator(
        self, returning: Transfer | None, source: int, *, like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns the gradient sums of a source's keys and values from the previous rank; zeros on the first rank."""
        if returning is not None:
            return returning.wait()[0]
        return like.new_zeros(2, self._plan.sent_counts[source], *like.shape[1:], dtype=dtype)

    def hand_over(self, sums: torch.Tensor, source: int) -> Transfer:
        """Sends gradient sums to the next rank and receives those of the next source; an owner's own come last."""
        assert self._comm is not None
        return self._comm.pass_on(sums, self._plan.sent_counts[(source - 1) % self._comm.size])
