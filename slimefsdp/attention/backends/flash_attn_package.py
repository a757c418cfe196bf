"""Computes attention with the flash-attn package (`attention.kernel: flash_attn`).

It calls the package's forward and backward instead of the package's autograd function, because ring attention needs a
backward with a given log-sum-exp. Not yet run on a GPU.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

import torch

from slimefsdp.attention.call_plan import AttentionParams, CallPlan
from slimefsdp.errors import ConfigError


def is_installed() -> bool:
    """Returns whether the package is installed, without importing it."""
    return find_spec("flash_attn") is not None


def require(setting: str, device: torch.device, dtype: torch.dtype) -> None:
    """Checks that the package is installed and supports this device and dtype.

    Args:
        setting: the setting that requests the package, as `section.name=value`.

    Raises:
        ConfigError: the package is not installed, or does not support the device or dtype.
    """
    field = setting.split("=")[0]
    if not is_installed():
        raise ConfigError(
            f"{setting}, but the package flash-attn is not installed",
            field=field,
            hint=f"install the `cuda` extra, or leave {field} at its default, which needs no package",
        )
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{setting} computes bfloat16 and float16 on CUDA, not {dtype} on {device.type}",
            field=field,
            hint=f"leave {field} at its default",
        )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: CallPlan, scoring: AttentionParams, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output [q_tokens, heads, head_dim] and the log-sum-exp, float32 [heads, q_tokens]."""
    out, lse, *_ = _interface()._flash_attn_varlen_forward(
        q, k, v, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k, dropout_p=0.0, causal=causal,
        **_options(scoring, causal),
    )  # fmt: skip
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
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    _interface()._flash_attn_varlen_backward(
        grad_out, q, k, v, out, lse, dq, dk, dv, call.device_cu_q, call.device_cu_k, call.max_q, call.max_k,
        dropout_p=0.0, causal=causal, deterministic=True, **_options(scoring, causal),
    )  # fmt: skip
    return dq, dk, dv


def _options(scoring: AttentionParams, causal: bool) -> dict[str, Any]:
    left = -1 if scoring.window is None else scoring.window - 1
    return {
        "softmax_scale": scoring.scale,
        "window_size_left": left,
        "window_size_right": 0 if causal else -1,
        "softcap": scoring.softcap or 0.0,
        "alibi_slopes": None,
    }


def _interface() -> Any:
    return importlib.import_module("flash_attn.flash_attn_interface")
