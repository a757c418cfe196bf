"""Random models of a few thousand parameters, written as Hugging Face folders."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from slimefsdp.models.decoder import PolicyModel, register_attention

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large, so that differences show
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TinyFolder = Callable[..., Path]  # of the fixture `tiny_folder`
ABSENT = object()  # a size that an architecture has no field for
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {}),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen2": (
        transformers.Qwen2ForCausalLM,
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": 8}),
    "gemma3_text": (
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {"sliding_window": 8, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "attn_logit_softcapping": 2.0,  # low, so that the caps bend what they are applied to
            "final_logit_softcapping": 2.0,
        },
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"num_key_value_heads": ABSENT, "head_dim": ABSENT, "intermediate_size": ABSENT, "n_inner": 56},
    ),
    "phi3": (
        transformers.Phi3ForCausalLM,
        transformers.Phi3Config,
        {
            "head_dim": ABSENT,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo2": (transformers.Olmo2ForCausalLM, transformers.Olmo2Config, {}),
    "glm4": (
        transformers.Glm4ForCausalLM,
        transformers.Glm4Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    # five experts: on two or four ranks some hold more than others, on eight some hold none
    "qwen3_moe": (
        transformers.Qwen3MoeForCausalLM,
        transformers.Qwen3MoeConfig,
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "mixtral": (
        transformers.MixtralForCausalLM,
        transformers.MixtralConfig,
        {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24},
    ),
    "gpt_oss": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig,
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
}


def tiny_model(kind: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose norms and biases are random too (at their usual ones and zeros, errors would hide)."""
    model_class, config_class, special = ARCHITECTURES[kind]
    fields = {**SIZES, "tie_word_embeddings": False, **special, **changes}
    config = config_class(**{name: value for name, value in fields.items() if value is not ABSENT})
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def to_sample_from(model: Any) -> PolicyModel:
    """A copy of a plain model as an engine holds it."""
    hf = copy.deepcopy(model)
    hf.set_attn_implementation(register_attention())
    return PolicyModel(hf).train(model.training)


def save_tiny_model(path: Path, kind: str = "qwen3", **changes: Any) -> Path:
    """The same model as a folder."""
    tiny_model(kind, **changes).save_pretrained(path)
    return path


def plain_model(path: Path, dtype: torch.dtype) -> Any:
    """Plain Hugging Face, as the definition of what a folder computes, in every number of `dtype`.

    Attention and experts are transformers' explicit ones: its SDPA leaves soft-caps out in 5.0, and its grouped
    products have no float64. Some releases keep a few parameters in float32 whatever is asked for.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    for parameter in model.parameters():  # buffers stay as they are: rotary frequencies are float32 in any model
        parameter.data = parameter.data.to(dtype)
    return model


def save_pair(path: Path, **changes: Any) -> tuple[Path, Path]:
    """Policy and reference of one architecture."""
    changes = {"vocab_size": 97, "intermediate_size": 55, **changes}
    return save_tiny_model(path / "policy", **changes), save_tiny_model(path / "reference", seed=1, **changes)
