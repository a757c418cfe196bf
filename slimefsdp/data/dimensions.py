"""The sizes of a model that decide what a token costs, read from config.json alone: no weight, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slimefsdp.errors import ModelError

# what transformers assumes where config.json says nothing
_TIED_BY_DEFAULT = ("gpt2", "gemma2", "gemma3_text")
# architectures with windows: transformers' default, and whether it is layer_types that say which layers have one
_WINDOWS: dict[str, tuple[int | None, bool]] = {
    "qwen2": (4096, True),
    "qwen3": (4096, True),
    "qwen3_moe": (4096, False),
    "mistral": (4096, False),
    "mixtral": (None, False),
    "phi3": (None, False),
    "gemma2": (4096, True),
    "gemma3_text": (4096, True),
    "gpt_oss": (128, True),
}
_EVERY_SO_MANY_LAYERS_WHOLE = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}  # the layers between see a window


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a decoder. Biases and norms are left out: below 0.1 % of a model of useful size."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # rows of the MLP; of one expert in a mixture
    vocab: int
    mlp_matrices: int = 3  # gate, up, down; 2 without a gate
    experts: int = 1
    active_experts: int = 1  # per token
    window: int = 0  # tokens that a windowed layer sees; 0: no layer is windowed
    windowed_layers: int = 0
    positions: int = 0  # rows of a learned position embedding
    is_tied: bool = False  # the head is the embedding

    @property
    def attention_parameters(self) -> int:
        return 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim

    @property
    def expert_parameters(self) -> int:
        return self.mlp_matrices * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + self.experts * self.expert_parameters + router

    @property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + embeddings

    @property
    def root_parameters(self) -> int:
        """Of the FSDP unit with the head, which is the embedding where they are tied."""
        return self.embedding_parameters + self.positions * self.hidden

    @property
    def embedding_unit_parameters(self) -> int:
        """Of the embedding's own FSDP unit; 0 where it is tied to the head."""
        return 0 if self.is_tied else self.embedding_parameters

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, field: str = "model.path") -> ModelDimensions:
        """The dimensions that a config.json states, under the names that transformers' decoders use.

        Raises:
            ModelError: a size is missing or no positive integer.
        """

        def size(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if config.get(name) is not None), default)
            if type(value) is not int or value < 1:
                raise ModelError(
                    f"config.json has {names[0]} = {value!r}, where a positive integer is needed",
                    field=field,
                    hint="restore the model's own config.json",
                )
            return value

        hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
        layers = size("num_hidden_layers", "n_layer")
        experts = size("num_local_experts", "num_experts", default=1)
        is_gpt2 = config.get("model_type") == "gpt2"
        inner = ("moe_intermediate_size", "intermediate_size") if experts > 1 else ("intermediate_size", "n_inner")
        windowed = windowed_layers(config, layers)
        tied = config.get("tie_word_embeddings")
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=size("num_key_value_heads", default=heads),
            head_dim=size("head_dim", default=max(1, hidden // heads)),
            intermediate=size(*inner, default=4 * hidden if is_gpt2 else None),
            vocab=size("vocab_size"),
            mlp_matrices=2 if is_gpt2 else 3,
            experts=experts,
            active_experts=size("num_experts_per_tok", default=1) if experts > 1 else 1,
            window=size("sliding_window", default=_WINDOWS[str(config["model_type"])][0]) if windowed else 0,
            windowed_layers=windowed,
            positions=size("n_positions", default=1024) if is_gpt2 else 0,
            is_tied=config.get("model_type") in _TIED_BY_DEFAULT if tied is None else bool(tied),
        )


def windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers see a sliding window, by a config.json as written or as transformers completed it."""
    model_type = str(config.get("model_type"))
    if model_type not in _WINDOWS:  # the others read no window, whatever their config.json says
        return 0
    default, by_layer_types = _WINDOWS[model_type]
    switched_on = config.get("use_sliding_window", False) if model_type.startswith("qwen") else True
    if config.get("sliding_window", default) is None or not switched_on:
        return 0
    if not by_layer_types:
        return layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count("sliding_attention")
    if "max_window_layers" in config:  # Qwen: the layers from here on
        first = config["max_window_layers"]
        return max(0, layers - first) if type(first) is int else layers
    whole_every = config.get("sliding_window_pattern") or _EVERY_SO_MANY_LAYERS_WHOLE.get(model_type)
    return layers - layers // whole_every if whole_every else layers
