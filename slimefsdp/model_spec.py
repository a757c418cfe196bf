"""The sizes of a model that decide what a token costs, read from config.json alone: no weight, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
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
# norms of a layer beside the two that every decoder has, and those of queries and keys; they only cost memory
_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
_EVERY_SO_MANY_LAYERS_WHOLE = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}  # the layers between see a window


# what architectures with fused projections call the matrix that has these
_FUSED_NAMES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
}
_PARTS_OF_LAYERS = {"attention": "self_attn.", "mlp": "mlp.", "experts": "mlp.experts."}  # words of lora.targets


@dataclass(frozen=True, slots=True)
class Adapters:
    """Sizes of adapters of low rank beside a decoder's matrices, over all layers; all else is frozen."""

    parameters: int  # of A and B
    inputs: int  # features of a token that are kept for A alone; attention's output is kept anyway
    inner: int  # features of a token between A and B
    outputs: int  # features of a token that B adds to
    summed: int = 0  # numbers that stacks of experts keep whatever the tokens: W with B A added, and B with its scale
    largest_sum: int = 0  # weights of the largest of these stacks


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A kind of matrix of a decoder layer: how many there are, and how many of them a token meets."""

    features_in: int
    features_out: int
    reads: str  # what several may read together
    count: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.count * self.features_in * self.features_out


@dataclass(frozen=True, slots=True)
class ModelSpec:
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
    norms_per_layer: int = 2  # of hidden states
    has_head_norms: bool = False  # queries and keys are normed
    has_softcap: bool = False  # attention's scores are soft-capped
    has_sinks: bool = False  # each head has an attention sink

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
        """The number of parameters of the whole model."""
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + embeddings

    @property
    def share_in_layers(self) -> float:
        """The share of the parameters that lies in matrices of the decoder layers."""
        return self.layers * self.layer_parameters / self.parameters

    def newton_schulz_flops(self, steps: int) -> float:
        """Returns the operations of Muon's iterations over the layers: X X^T, its square, and the product with X."""
        flops = 0
        for matrix in self._layer_matrices().values():
            short, long = sorted((matrix.features_in, matrix.features_out))
            flops += matrix.count * (4 * short * short * long + 2 * short**3)
        return float(steps * self.layers * flops)

    @property
    def root_parameters(self) -> int:
        """The parameters of the FSDP unit with the head, which is the embedding where they are tied."""
        return self.embedding_parameters + self.positions * self.hidden

    @property
    def embedding_unit_parameters(self) -> int:
        """The parameters of the embedding's own FSDP unit; 0 where it is tied to the head."""
        return 0 if self.is_tied else self.embedding_parameters

    def trained_parameters(self, frozen: Sequence[str] = ()) -> int:
        """Parameters that `model.frozen` leaves to train, by the names that most decoders give their matrices.

        Args:
            frozen: shell-style patterns; one that matches none of these names freezes nothing here.
        """

        def is_frozen(*names: str) -> bool:
            written = [f"{name}{end}" for name in names for end in (".weight", "")]
            return any(fnmatchcase(name, pattern) for name in written for pattern in frozen)

        trained = sum(
            matrix.parameters
            for layer in range(self.layers)
            for name, matrix in self._layer_matrices().items()
            if not is_frozen(f"model.layers.{layer}.{name}")
        )
        embedding, head = ("model.embed_tokens",), ("lm_head",)
        for names in (embedding + head,) if self.is_tied else (embedding, head):
            trained += 0 if is_frozen(*names) else self.embedding_parameters
        return trained + (0 if is_frozen("transformer.wpe") else self.positions * self.hidden)

    @property
    def highest_rank(self) -> int:
        """Returns what the rank of adapters beside any matrix of the layers may be."""
        return min(min(one.features_in, one.features_out) for one in self._layer_matrices().values())

    def adapters(self, rank: int, targets: Sequence[str]) -> Adapters:
        """Sizes of the adapters of `lora.targets`, by the names that most decoders give their matrices.

        Args:
            targets: `attention`, `mlp`, `all-linear`, `experts`, `head`, or shell-style patterns of names; what they
                match in other architectures alone is not counted. Projections that an architecture fuses are counted as
                if they were apart. Those of experts, which are added to the weights, and of the head, which is computed
                in chunks, keep nothing for a token.
        """
        matrices = self._layer_matrices()
        matrices.pop("mlp.gate", None)  # a router has none
        parameters = inputs = inner = outputs = summed = largest_sum = 0
        for layer in range(self.layers):
            chosen = {name: one for name, one in matrices.items() if _is_target(layer, name, one, targets)}
            parameters += sum(rank * one.count * (one.features_in + one.features_out) for one in chosen.values())
            met = [one for one in chosen.values() if one.count == 1]
            stacks = [one for one in chosen.values() if one.count > 1]
            summed += sum(one.parameters + rank * one.count * one.features_out for one in stacks)
            largest_sum = max([largest_sum, *(one.parameters for one in stacks)])
            inner += rank * len(met)
            outputs += sum(one.features_out for one in met)
            inputs += sum({one.reads: one.features_in for one in met if one.reads != "attention"}.values())
        if not self.is_tied and _has_head(targets):
            parameters += rank * (self.hidden + self.vocab)
        return Adapters(parameters, inputs, inner, outputs, summed, largest_sum)

    def adapted_parts(self, targets: Sequence[str]) -> frozenset[str]:
        """Returns which of `attention`, `mlp` and `head` adapters of `lora.targets` change, if only one matrix of it.

        Experts are a part of the MLP. Patterns are compared with the names that most decoders give their matrices, as
        in `adapters`.
        """
        matrices = self._layer_matrices()
        matrices.pop("mlp.gate", None)  # a router has none
        parts = {"attention", "mlp"}.intersection(targets)
        parts |= {
            "attention" if name.startswith(_PARTS_OF_LAYERS["attention"]) else "mlp"
            for layer in range(self.layers)
            for name, matrix in matrices.items()
            if _is_target(layer, name, matrix, targets)
        }
        return frozenset(parts | {"head"} if _has_head(targets) else parts)

    def _layer_matrices(self) -> dict[str, _Matrix]:
        """Returns the matrices of a layer by their names in it."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": _Matrix(self.hidden, queries, "norm"),
            "self_attn.k_proj": _Matrix(self.hidden, keys, "norm"),
            "self_attn.v_proj": _Matrix(self.hidden, keys, "norm"),
            "self_attn.o_proj": _Matrix(queries, self.hidden, "attention"),
        }
        if self.experts > 1:
            count, active, inner = self.experts, self.active_experts, self.intermediate
            matrices["mlp.gate"] = _Matrix(self.hidden, self.experts, "second norm")
            matrices["mlp.experts.gate_up_proj"] = _Matrix(self.hidden, 2 * inner, "second norm", count, active)
            matrices["mlp.experts.down_proj"] = _Matrix(inner, self.hidden, "product", count, active)
            return matrices
        for name in ("gate_proj", "up_proj")[-self.mlp_matrices + 1 :]:
            matrices[f"mlp.{name}"] = _Matrix(self.hidden, self.intermediate, "second norm")
        matrices["mlp.down_proj"] = _Matrix(self.intermediate, self.hidden, "product")
        return matrices

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, field: str = "model.path") -> ModelSpec:
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
            norms_per_layer=4 if config.get("model_type") in _FOUR_NORMS else 2,
            has_head_norms=config.get("model_type") in _HEAD_NORMS,
            has_softcap=has_attention_softcap(config),
            has_sinks=config.get("model_type") == "gpt_oss",
        )


def _is_target(layer: int, name: str, matrix: _Matrix, targets: Sequence[str]) -> bool:
    names = [f"model.layers.{layer}.{one}" for one in (name, _FUSED_NAMES.get(name, name))]
    part = "mlp.experts." if name.startswith("mlp.experts.") else name.partition(".")[0] + "."
    return any(
        part == _PARTS_OF_LAYERS[target]
        if target in _PARTS_OF_LAYERS
        else matrix.count == 1
        if target == "all-linear"
        else any(fnmatchcase(one, target) for one in names)
        for target in targets
    )


def _has_head(targets: Sequence[str]) -> bool:
    return any(target == "head" or fnmatchcase("lm_head", target) for target in targets)


def has_attention_softcap(config: Mapping[str, Any]) -> bool:
    """Whether attention's scores are soft-capped, by a config.json as written or as transformers completed it."""
    # the others read no soft-cap of scores, whatever their config.json says
    return config.get("model_type") == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None


def windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Returns how many layers see a sliding window, by a config.json as written or as transformers completed it."""
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
    pattern = config.get("sliding_window_pattern")
    is_count = type(pattern) is int and pattern > 0
    whole_every = pattern if is_count else _EVERY_SO_MANY_LAYERS_WHOLE.get(model_type)
    return layers - layers // whole_every if whole_every else layers
