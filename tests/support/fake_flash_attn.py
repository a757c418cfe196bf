"""Stands in for the flash-attn package where there is no GPU: its calling convention, computed by the plain kernel.

The names, order and defaults of the parameters are those of flash-attn 2.8's `flash_attn_interface`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from slimefsdp.attention.backends import eager
from slimefsdp.attention.call_plan import AttentionParams, CallPlan

CALLS: list[dict[str, Any]] = []


@contextmanager
def installed() -> Iterator[list[dict[str, Any]]]:
    """Makes `import flash_attn` find the stand-in in this process for the block; yields the calls it saw."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for name in ("_flash_attn_forward", "_flash_attn_backward"):
        setattr(interface, name, None)  # ring-flash-attn imports them; its llama3 style calls neither
    interface._flash_attn_varlen_forward = _flash_attn_varlen_forward  # type: ignore[attr-defined]
    interface._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
    package.flash_attn_interface = interface  # type: ignore[attr-defined]
    package.__spec__ = interface.__spec__ = __spec__  # find_spec asks for it
    CALLS.clear()
    installed_as = {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    sys.modules.update(installed_as)
    try:
        yield CALLS
    finally:
        for name in installed_as:
            del sys.modules[name]


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    call = _call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check(dropout_p, causal, window_size_left, window_size_right)
    scoring = _scoring(softmax_scale, window_size_left, softcap)
    out, lse = eager.forward(q, k, v, call, scoring, causal=causal)
    CALLS.append({"pass": "forward", "causal": causal, "window": scoring.window, "softcap": scoring.softcap})
    return out, lse, None, torch.zeros(2)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    call = _call(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _check(dropout_p, causal, window_size_left, window_size_right)
    assert deterministic, "replays must be bit-identical"
    scoring = _scoring(softmax_scale, window_size_left, softcap)
    grads = eager.backward(dout, (q, k, v), out, softmax_lse, call, scoring, causal=causal)
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)
    CALLS.append({"pass": "backward", "causal": causal, "window": scoring.window, "softcap": scoring.softcap})
    return softmax_lse


def _call(cu_q: torch.Tensor, cu_k: torch.Tensor, max_q: int, max_k: int) -> CallPlan:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    call = CallPlan(tuple(cu_q.tolist()), tuple(cu_k.tolist()), cu_q, cu_k)
    assert (call.max_q, call.max_k) == (max_q, max_k)
    return call


def _check(dropout_p: float, causal: bool, left: int, right: int) -> None:
    assert dropout_p == 0 and right in ((-1, 0) if causal else (-1,)) and (causal or left == -1)


def _scoring(scale: float, left: int, softcap: float) -> AttentionParams:
    return AttentionParams(scale, window=None if left < 0 else left + 1, softcap=softcap or None)
