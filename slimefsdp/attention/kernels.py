"""Variable-length attention with its log-sum-exp, forward and backward: one interface, a CPU and a CUDA kernel.

Both come with torch, so nothing needs compiling. `varlen_backward` takes the output and log-sum-exp it is given rather
than recomputing them, which is what lets several calls over different keys be merged and differentiated together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from slimefsdp.attention.plan import CallPlan
from slimefsdp.errors import ConfigError

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Saved:
    """What the backward needs from the forward beyond its inputs and output."""

    lse: torch.Tensor  # [heads, tokens] natural log
    rng_state: torch.Tensor | None = None  # the CUDA kernel hands these through
    unused: torch.Tensor | None = None


def check_kernel(device: torch.device, dtype: torch.dtype) -> None:
    """Whether there is a kernel for this dtype on this device.

    Raises:
        ConfigError: naming `precision.compute_dtype`.
    """
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"precision.compute_dtype={str(dtype).removeprefix('torch.')} has no variable-length kernel on CUDA",
            field="precision.compute_dtype",
            hint="use bfloat16 there, or mesh.device=cpu",
        )


def varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: CallPlan,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, Saved]:
    """Attention of each query segment over its key segment.

    Args:
        q: [q_tokens, heads, head_dim].
        k, v: [k_tokens, kv_heads, head_dim]; heads is a multiple of kv_heads (grouped-query attention).
        call: the segments.
        causal: query i of a segment sees keys 0..i; its query and key segments must then be equally long, since CPU
            and CUDA kernels align unequal ones at different ends.
        scale: factor on the scores.
        window: for causal calls alone: a query sees only the `window` newest keys, itself included, as in Hugging Face.

    Returns:
        out [q_tokens, heads, head_dim] in q's dtype, and what the backward needs.
    """
    _check(call, causal, window)
    if q.device.type == "cuda":
        out, lse, rng_state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k, 0.0, causal, False,
            scale=scale, window_size_left=_left(window), window_size_right=_right(window),
        )  # fmt: skip
        return out, Saved(lse, rng_state, unused)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for qs, ks, mask in _segments(call, window, q.dtype):
        segment_out, segment_lse = _cpu_forward(
            _heads_first(q[qs]), _heads_first(k[ks]), _heads_first(v[ks]),
            0.0, causal and mask is None, attn_mask=mask, scale=scale,
        )  # fmt: skip
        out[qs] = segment_out[0].transpose(0, 1)
        lse[:, qs] = segment_lse[0]
    return out, Saved(lse)


def varlen_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: Saved,
    call: CallPlan,
    *,
    causal: bool,
    scale: float,
    window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v, in their shapes and dtypes, for the `out` and log-sum-exp given."""
    _check(call, causal, window)
    if q.device.type == "cuda":
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_out, q, k, v, out, saved.lse, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k, 0.0, causal,
            saved.rng_state, saved.unused,
            scale=scale, window_size_left=_left(window), window_size_right=_right(window),
        )  # fmt: skip
        return dq, dk, dv
    dq = torch.empty_like(q)
    # windows make neighbouring query blocks share keys, so those gradients add up
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    for qs, ks, mask in _segments(call, window, q.dtype):
        # the CPU backward returns one gradient per query head, so it is given one key head per query head
        gq, gk, gv = _cpu_backward(
            _heads_first(grad_out[qs]), _heads_first(q[qs]),
            _heads_first(k[ks].repeat_interleave(group, 1)), _heads_first(v[ks].repeat_interleave(group, 1)),
            _heads_first(out[qs]), saved.lse[:, qs].unsqueeze(0), 0.0, causal and mask is None,
            attn_mask=mask, scale=scale,
        )  # fmt: skip
        dq[qs] = gq[0].transpose(0, 1)
        dk[ks] += _sum_groups(gk[0], group)
        dv[ks] += _sum_groups(gv[0], group)
    return dq, dk, dv


class PackedAttention(torch.autograd.Function):
    """Causal attention inside each segment of a pack; see `varlen_forward` for shapes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: CallPlan,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        out, saved = varlen_forward(q, k, v, call, causal=True, scale=scale, window=window)
        extra = [tensor for tensor in (saved.rng_state, saved.unused) if tensor is not None]
        ctx.save_for_backward(q, k, v, out, saved.lse, *extra)
        ctx.call, ctx.scale, ctx.window = call, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, *rest = ctx.saved_tensors
        dq, dk, dv = varlen_backward(
            grads[0].contiguous(), q, k, v, out, Saved(*rest), ctx.call,
            causal=True, scale=ctx.scale, window=ctx.window,
        )  # fmt: skip
        return dq, dk, dv, None, None, None


packed_attention: Callable[..., torch.Tensor] = PackedAttention.apply


def _check(call: CallPlan, causal: bool, window: int | None) -> None:
    assert not causal or call.cu_q == call.cu_k, "a causal call over keys of other lengths"
    assert causal or window is None, "a window in a call that is not causal"


def _left(window: int | None) -> int | None:
    return None if window is None else window - 1  # the kernel counts keys to the left of the query itself


def _right(window: int | None) -> int | None:
    return None if window is None else 0


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [tokens, heads, head_dim] -> [1, heads, tokens, head_dim]


def _sum_groups(grad: torch.Tensor, group: int) -> torch.Tensor:
    heads, tokens, head_dim = grad.shape
    return grad.reshape(heads // group, group, tokens, head_dim).sum(1).transpose(0, 1)


def _segments(
    call: CallPlan, window: int | None, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """The (queries, keys, additive mask) of each kernel call; a long windowed segment is cut into bands.

    A band's mask is [block, block + window] instead of [length, length], and there is one at a time.
    """
    for q0, q1, k0, k1 in zip(call.cu_q[:-1], call.cu_q[1:], call.cu_k[:-1], call.cu_k[1:], strict=True):
        if window is None or q1 - q0 <= window:
            yield slice(q0, q1), slice(k0, k1), None
            continue
        block = max(window, 64)
        for start in range(q0, q1, block):
            end = min(start + block, q1)
            first_key = max(q0, start - window + 1)
            distance = torch.arange(start, end)[:, None] - torch.arange(first_key, end)[None, :]
            mask = torch.zeros(distance.shape, dtype=dtype)
            mask[(distance < 0) | (distance >= window)] = float("-inf")
            yield slice(start, end), slice(first_key - q0 + k0, end - q0 + k0), mask
