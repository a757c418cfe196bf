"""Registers our attention with transformers.

Every attention layer calls the registered function with its query, key and value, and with the keywords that the model
was called with. One of these keywords, `pack_attention`, is ours. The name is not registered as a mask function, so the
model builds no mask.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from slimefsdp.attention.call_plan import AttentionParams, PackAttention
from slimefsdp.errors import ModelError

ATTENTION_NAME = "slimefsdp"
_EXPECTED = ("module", "query", "key", "value", "attention_mask")
_UNSUPPORTED = {"position_bias": "a position bias", "cache_position_bias": "a position bias"}


def register_attention() -> str:
    """Registers our attention with transformers; returns the name to load a model with.

    Raises:
        ModelError: this release of transformers calls attention functions in a way that ours does not support.
    """
    check_attention_interface(sdpa_attention_forward)
    AttentionInterface.register(ATTENTION_NAME, _attention)
    return ATTENTION_NAME


def check_attention_interface(builtin: Any) -> None:
    """Checks that transformers' own attention function has the calling convention that ours relies on.

    Raises:
        ModelError: the leading parameters differ, or `scaling`, `dropout` or further keywords are not accepted.
    """
    parameters = inspect.signature(builtin).parameters
    leading = tuple(parameters)[: len(_EXPECTED)]
    takes_keywords = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if leading != _EXPECTED or not {"scaling", "dropout"} <= set(parameters) or not takes_keywords:
        raise ModelError(
            f"transformers {transformers.__version__} calls attention with {tuple(parameters)}, "
            f"expected {(*_EXPECTED, 'dropout', 'scaling', '**kwargs')}",
            field="transformers",
            hint="install a transformers release this version was tested with (see constraints.txt)",
        )


# communication and custom kernels cannot be compiled, so a compiled layer has a graph break here
@torch.compiler.disable
def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    pack_attention: PackAttention | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Returns the attention of a layer, [1, tokens, heads, head_dim].

    Args:
        query: [1, heads, tokens, head_dim].
        key, value: [1, kv_heads, tokens, head_dim].
    """
    if pack_attention is None or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} was called without a pack's attention, or with a mask of its own",
            field="model.path",
            hint="this architecture does not pass keywords on to its attention; use a supported one",
        )
    for name, feature in _UNSUPPORTED.items():
        if others.get(name) is not None:
            raise ModelError(f"{type(module).__name__} uses {feature}, which the kernels lack", field="model.path")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal  # as transformers' own functions do
    if dropout != 0.0 or not causal:
        raise ModelError(
            f"{type(module).__name__} asks for dropout={dropout}, causal={causal}",
            field="model.path",
            hint="only causal attention without dropout can be packed exactly",
        )
    assert query.shape[0] == 1, "a pack is one row"
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))  # [tokens, heads, head_dim]
    scoring = AttentionParams(
        scale=_scale_of(module, q.shape[-1]) if scaling is None else scaling, window=sliding_window, softcap=softcap
    )
    return pack_attention(q, k, v, scoring, s_aux).unsqueeze(0), None


def _scale_of(module: torch.nn.Module, head_dim: int) -> float:
    """Returns the default scale of a layer; GPT-2 of transformers 5.0 leaves it to the attention function."""
    scale = head_dim**-0.5 if getattr(module, "scale_attn_weights", True) else 1.0
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        scale /= int(getattr(module, "layer_idx", 0)) + 1
    return scale
