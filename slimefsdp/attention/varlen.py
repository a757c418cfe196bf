"""Computes variable-length attention and its log-sum-exp with one of several kernels, and ring attention from it.

The default is torch's own flash kernels for CPU and CUDA, which need no compilation. Calls that they do not support
(soft-capped scores, wide heads, float32 on CUDA) use a kernel in plain torch. The flash-attn package is used on
request. `varlen_backward` takes the output and log-sum-exp as arguments instead of recomputing them, so that several
calls over different keys can be merged and differentiated together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from slimefsdp.attention.backends import eager, flash_attn_package
from slimefsdp.attention.call_plan import AttentionParams, CallPlan, RingPlan
from slimefsdp.attention.cp_comm import Comm, Transfer
from slimefsdp.attention.lse_merge import absorb_sinks, add_rows, merge_rows, sinks_grad
from slimefsdp.attention.select import is_flash_head_dim

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_HALVES = (torch.bfloat16, torch.float16)
# torch's CPU kernel skips masked keys only in blocks of 512, so it computes up to twice as many scores as needed. For
# these sequence lengths it is faster to call it on bands of queries with only the keys that they see.
_BANDED_LENGTHS = range(128, 1025)
# query rows of a masked call, for fewer keys than _BANDED_LENGTHS.stop and for more; a mask is [band, keys]
_BAND, _LONG_BAND = 64, 512


@dataclass(frozen=True, slots=True)
class Saved:
    """Holds what the backward needs from the forward, besides inputs and output."""

    lse: torch.Tensor  # [heads, tokens] natural log, at least float32
    rng_state: torch.Tensor | None = None  # this and the next field pass from torch's CUDA forward to its backward
    unused: torch.Tensor | None = None

    @property
    def of_kernel(self) -> list[torch.Tensor]:
        """Returns all tensors but the log-sum-exp; `Saved(lse, *tensors)` restores the object."""
        return [tensor for tensor in (self.rng_state, self.unused) if tensor is not None]


def varlen_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CallPlan, scoring: AttentionParams, *, causal: bool
) -> tuple[torch.Tensor, Saved]:
    """Computes the attention of each query segment over its key segment.

    Args:
        q: [q_tokens, heads, head_dim].
        k, v: [k_tokens, kv_heads, head_dim]; heads is a multiple of kv_heads (grouped-query attention).
        call: the segments; without segments the result is empty.
        causal: a query sees no later keys. The last query of a segment is aligned with the segment's last key: with n
            more keys than queries, query i sees keys 0..i + n.

    Returns:
        out [q_tokens, heads, head_dim] in q's dtype, and the values that the backward needs.
    """
    _check(call, causal, scoring)
    if call.is_empty:
        return torch.empty_like(q), Saved(q.new_empty(q.shape[1], 0, dtype=_wide(q.dtype)))
    kernel = _kernel_for(q, scoring)
    if kernel == "plain":
        out, lse = eager.forward(q, k, v, call, scoring, causal=causal)
        return out, Saved(lse)
    if kernel == "flash_attn":
        out, lse = flash_attn_package.forward(q, k, v, call, scoring, causal=causal)
        return out, Saved(lse)
    if kernel == "cuda":
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k, 0.0, causal, False,
            scale=scoring.scale, window_size_left=_left(scoring), window_size_right=_right(scoring),
        )  # fmt: skip
        return out, Saved(lse, rng_state, unused)
    # there may be many short segments, so masks and layouts are prepared for all of them at once
    segments = _masked_segments(call, scoring.window, q.dtype, causal=causal)
    keys, values = _heads_first(k), _heads_first(v)
    outs, lses = [], []
    for queries, (_, start, end, mask) in zip(_by_segment(q, segments), segments, strict=True):
        segment_out, segment_lse = _cpu_forward(
            queries, keys.narrow(2, start, end - start), values.narrow(2, start, end - start),
            0.0, causal and mask is None, attn_mask=mask, scale=scoring.scale,
        )  # fmt: skip
        outs.append(segment_out.transpose(1, 2))
        lses.append(segment_lse)
    return _joined(outs, 1)[0], Saved(_joined(lses, 2)[0])


def varlen_backward(
    grad_out: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    saved: Saved,
    call: CallPlan,
    scoring: AttentionParams,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of q, k and v, in their shapes and dtypes, for the given `out` and log-sum-exp."""
    q, k, v = qkv
    _check(call, causal, scoring)
    if call.is_empty:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel = _kernel_for(q, scoring)
    if kernel == "plain":
        return eager.backward(grad_out, qkv, out, saved.lse, call, scoring, causal=causal)
    if kernel == "flash_attn":
        return flash_attn_package.backward(grad_out, qkv, out, saved.lse, call, scoring, causal=causal)
    if kernel == "cuda":
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, saved.lse, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k, 0.0, causal,
            saved.rng_state, saved.unused,
            scale=scoring.scale, window_size_left=_left(scoring), window_size_right=_right(scoring),
        )  # fmt: skip
        return dq, dk, dv
    segments = _masked_segments(call, scoring.window, q.dtype, causal=causal)
    keys, values = _heads_first(k), _heads_first(v)
    # bands of one segment share keys, so the gradients of keys and values are accumulated
    dk, dv = (torch.zeros_like(x, dtype=_wide(x.dtype)) for x in (k, v))
    into_dk, into_dv = _heads_first(dk), _heads_first(dv)
    lses = saved.lse.unsqueeze(0).split([rows for rows, *_ in segments], 2)
    by_segment = zip(*(_by_segment(x, segments) for x in (grad_out, q, out)), lses, segments, strict=True)
    dqs = []
    for grads, queries, outs, lse, (_, start, end, mask) in by_segment:
        length = end - start
        gq, gk, gv = _cpu_backward(
            grads, queries, keys.narrow(2, start, length), values.narrow(2, start, length), outs, lse,
            0.0, causal and mask is None, attn_mask=mask, scale=scoring.scale,
        )  # fmt: skip
        dqs.append(gq.transpose(1, 2))
        into_dk.narrow(2, start, length).add_(gk)
        into_dv.narrow(2, start, length).add_(gv)
    return _joined(dqs, 1)[0], dk.to(k.dtype), dv.to(v.dtype)


def _kernel_for(q: torch.Tensor, scoring: AttentionParams) -> Literal["cpu", "cuda", "plain", "flash_attn"]:
    """Returns the kernel of a call, the same in forward and backward."""
    if scoring.kernel == "flash_attn":
        return "flash_attn"
    if scoring.softcap is not None:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    # the CUDA kernel needs supported head sizes; only scaled_dot_product_attention itself would pad them
    return "cuda" if q.dtype in _HALVES and is_flash_head_dim(q.shape[-1]) else "plain"


def _check(call: CallPlan, causal: bool, scoring: AttentionParams) -> None:
    assert call.can_be_causal or not causal, "a causal call over too few keys"
    assert causal or scoring.window is None, "a window in a call that is not causal"


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _left(scoring: AttentionParams) -> int | None:
    # the kernel counts only the keys to the left of the query, without the query's own
    return None if scoring.window is None else scoring.window - 1


def _right(scoring: AttentionParams) -> int | None:
    return None if scoring.window is None else 0


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [tokens, heads, head_dim] -> [1, heads, tokens, head_dim]


def _joined(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _by_segment(x: torch.Tensor, segments: Sequence[_Segment]) -> tuple[torch.Tensor, ...]:
    """Splits a tensor, [tokens, heads, head_dim], into one tensor for each segment, [1, heads, rows, head_dim]."""
    return _heads_first(x).split([segment.rows for segment in segments], 2)


class _Segment(NamedTuple):
    """Describes one call of the CPU kernel: the number of its queries, its range of keys, and its mask.

    The kernel's calls for a `CallPlan` take the plan's queries in order, without gaps.
    """

    rows: int  # number of queries
    first_key: int
    end_of_keys: int
    mask: torch.Tensor | None  # additive, [rows, keys]


def _masked_segments(call: CallPlan, window: int | None, dtype: torch.dtype, *, causal: bool) -> list[_Segment]:
    """Returns the CPU kernel's calls for a call plan, cached because every layer needs them in forward and backward."""
    key = (window, dtype, causal)
    if key not in call.prepared:
        call.prepared[key] = list(_make_segments(call, window, dtype, causal=causal))
    segments: list[_Segment] = call.prepared[key]
    return segments


def _make_segments(call: CallPlan, window: int | None, dtype: torch.dtype, *, causal: bool) -> Iterator[_Segment]:
    """Yields the CPU kernel's calls.

    The kernel's own causal mask aligns the first query with the first key, which is right only for segments with as
    many queries as keys. Other segments are cut into bands of queries, each with a mask, and so are segments for which
    bands are faster.
    """
    triangles: dict[int, torch.Tensor] = {}
    masks: dict[tuple[int, ...], torch.Tensor] = {}
    for (q0, q1), (k0, k1) in zip(pairwise(call.cu_q), pairwise(call.cu_k), strict=True):
        queries, extra_keys = q1 - q0, (k1 - k0) - (q1 - q0)
        sees_all = window is None or k1 - k0 <= window
        if not causal or (extra_keys == 0 and sees_all and queries not in _BANDED_LENGTHS):
            yield _Segment(queries, k0, k1, None)
        elif sees_all:
            band = _BAND if k1 - k0 < _BANDED_LENGTHS.stop else _LONG_BAND
            if band not in triangles:
                triangles[band] = _triangle(band, call.max_k + band, dtype)
            triangle = triangles[band]
            for start in range(0, queries, band):
                end = min(start + band, queries)
                last = triangle.shape[1] - band + end - start
                mask = triangle[: end - start, last - (end + extra_keys) : last]
                yield _Segment(end - start, k0, k0 + end + extra_keys, mask)
        else:
            assert window is not None
            yield from _windowed_segments(k0, queries, extra_keys, window, dtype, masks)


def _triangle(band: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns the mask, [band, keys], of a band of queries whose last query sees all keys.

    Masks for fewer queries or keys are slices of this mask.
    """
    mask = torch.zeros(band, keys, dtype=dtype)
    mask[:, -band:].masked_fill_(torch.ones(band, band, dtype=torch.bool).triu(1), float("-inf"))
    return mask


def _windowed_segments(
    k0: int, queries: int, extra_keys: int, window: int, dtype: torch.dtype, masks: dict[tuple[int, ...], torch.Tensor]
) -> Iterator[_Segment]:
    """Yields the CPU kernel's calls for one segment of a plan with a window.

    Args:
        k0: the segment's first key.
        queries: number of the segment's queries.
        extra_keys: number of the segment's keys, minus `queries`.
        masks: cache of masks by shape, because most bands have the same mask.
    """
    band = max(window, 64)
    for start in range(0, queries, band):
        end = min(start + band, queries)
        first_key = max(0, start + extra_keys - window + 1)
        shape = (end - start, end + extra_keys - first_key)
        if shape not in masks:
            distance = (torch.arange(start, end) + extra_keys)[:, None] - torch.arange(first_key, end + extra_keys)[
                None, :
            ]
            mask = torch.zeros(distance.shape, dtype=dtype)
            masks[shape] = mask.masked_fill_((distance < 0) | (distance >= window), float("-inf"))
        yield _Segment(end - start, k0 + first_key, k0 + end + extra_keys, masks[shape])


# ---------------------------------------------------------------------- the ring
#
# Keys and values pass round the ranks, and each rank merges the results over all of them. While a rank computes with
# the keys of one source rank, it receives the keys of the next. In backward the keys pass round again. Their gradients
# follow one step behind in an accumulator; every rank adds to it, and finally it returns to the owner of the keys. With
# a single rank this is plain packed attention, in which nodes may still attend to their parents.


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
        comm: communication with the other ranks; None means that there are none.
        scoring: may have a window only if the plan's only call is the causal call over the rank's own rows.
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
        """Sends this rank's own rows that other ranks attend to; does nothing if no rows travel."""
        if len(self.order) == 1:
            return None
        rows = self._plan.sent_rows
        return self.pass_on(torch.stack([k[rows], v[rows]]), 0)

    def pass_on(self, keys_values: torch.Tensor, step: int) -> Transfer | None:
        """Sends the rows that arrived at `step` to the next rank, unless that rank is their owner."""
        if step + 1 >= len(self.order):
            return None
        assert self._comm is not None
        return self._comm.pass_on(keys_values, self._plan.sent_counts[self.order[step + 1]])

    @staticmethod
    def received(transfer: Transfer | None) -> torch.Tensor:
        """Waits for the keys and values that the previous rank sends; returns them as [2, rows, kv_heads, head_dim]."""
        assert transfer is not None
        return transfer.wait()[0]

    def accumulator(
        self, returning: Transfer | None, source: int, *, like: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Returns the gradient sums of a source's keys and values so far.

        The sums come from the previous rank; on the rank where the sums begin, zeros are returned.
        """
        if returning is not None:
            return returning.wait()[0]
        return like.new_zeros(2, self._plan.sent_counts[source], *like.shape[1:], dtype=dtype)

    def hand_over(self, sums: torch.Tensor, source: int) -> Transfer:
        """Sends gradient sums to the next rank; receives the next source's, and in the last step those of own keys."""
        assert self._comm is not None
        return self._comm.pass_on(sums, self._plan.sent_counts[(source - 1) % self._comm.size])
