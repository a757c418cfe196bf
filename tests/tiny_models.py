"""Random models of a few thousand parameters, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

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
}


def tiny_model(kind: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose norms and biases are random too (at their usual ones and zeros, errors would hide)."""
    model_class, config_class, special = ARCHITECTURES[kind]
    config = config_class(**{**SIZES, "tie_word_embeddings": False, **special, **changes})
    torch.manual_seed(seed)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype).eval()


def save_tiny_model(path: Path, kind: str = "qwen3", **changes: Any) -> Path:
    """The same model as a folder."""
    tiny_model(kind, **changes).save_pretrained(path)
    return path
