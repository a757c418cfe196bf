"""Reads a model's sizes from config.json, without weights or torch. The sizes determine the cost of a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from slimefsdp.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from slimefsdp.config import TrainerConfig

NEWTON_SCHULZ_STEPS = 5  # iterations of Muon on a matrix; Jordan et al. find no gain in more
# architectures whose embedding is the head if config.json does not say whether it is
_TIED_BY_DEFAULT = ("gpt2", "gemma2", "gemma3_text")
# architecture -> (window if config.json has none, whether layer_types says which layers are windowed)
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
# architectures with four norms per layer instead of two, and with norms of queries and keys; norms only cost memory
_FOUR_NORMS = ("gemma2", "gemma3_text", "glm4")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
_FULL_ATTENTION_PERIOD = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}  # every n-th layer has no window


# projection -> name of the matrix that contains it in architectures with fused projections
_FUSED_NAMES = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.qkv_proj"),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "mlp.gate_up_proj"),
}
_PARTS_OF_LAYERS = {"attention": "self_attn.", "mlp": "mlp.", "experts": "mlp.experts."}  # keywords of lora.targets


# architectures whose blocks, embedding and head slimefsdp.distributed.tensor_parallel can cut
TENSOR_PARALLEL = ("gemma2", "gemma3_text", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Adapters:
    """Holds the sizes of LoRA adapters of a decoder's matrices, summed over all layers."""

    parameters: int  # number of elements of A and B
    inputs: int  # features per token that are saved for A alone; attention's output is saved anyway
    inner: int  # features per token between A and B
    outputs: int  # features per token of B's output
    summed: int = 0  # elements saved for adapters of experts, for any number of tokens: W + scale B A, and scale B
    largest_sum: int = 0  # elements of the largest W + scale B A of an adapter of experts


@dataclass(frozen=True, slots=True)
class _Matrix:
    features_in: int
    features_out: int
    reads: str  # name of the input, which several matrices may share
    count: int = 1  # matrices of this kind in a layer
    active: int = 1  # number of these matrices that a token passes through

    @property
    def parameters(self) -> int:
        return self.count * self.features_in * self.features_out


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Holds the sizes of a decoder. Biases and norms are left out, as they are below 0.1 % of a realistic model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # rows of the MLP, or of one expert
    vocab: int
    mlp_matrices: int = 3  # gate, up, down; 2 without a gate
    experts: int = 1
    active_experts: int = 1  # per token
    window: int = 0  # tokens that a token sees in a windowed layer; 0 means that no layer is windowed
    windowed_layers: int = 0
    positions: int = 0  # rows of a learned position embedding
    is_tied: bool = False  # the head's weight is the embedding
    norms_per_layer: int = 2  # norms of hidden states
    has_head_norms: bool = False  # there are norms of queries and keys
    has_softcap: bool = False  # attention scores are soft-capped
    has_sinks: bool = False  # each head has an attention sink

    def over(self, tp: int) -> ModelSpec:
        """Returns the sizes of the part that one of `tp` tensor-parallel ranks computes.

        Experts are not cut: a rank computes whole experts for 1 / tp of the tokens. This is as much work as 1 / tp of
        every expert for all tokens, and the returned sizes describe the latter.
        """
        if tp == 1:
            return self
        return replace(
            self,
            heads=self.heads // tp,
            kv_heads=max(1, self.kv_heads // tp),
            intermediate=self.intermediate // tp,
            vocab=self.vocab // tp,
        )

    @property
    def routed_experts(self) -> tuple[int, int, int] | None:
        """Returns the numbers of layers, experts, and experts of a token; None without experts."""
        return (self.layers, self.experts, self.active_experts) if self.experts > 1 else None

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
        embeddings = self.embedding_parameters * (1 if self.is_tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + embeddings

    @property
    def share_in_layers(self) -> float:
        return self.layers * self.layer_parameters / self.parameters

    def newton_schulz_flops(self, steps: int) -> float:
        """Returns the FLOPs of Muon's iterations on each layer matrix X: X X^T, its square, and the product with X."""
        flops = 0
        for matrix in self._layer_matrices().values():
            short, long = sorted((matrix.features_in, matrix.features_out))
            flops += matrix.count * (4 * short * short * long + 2 * short**3)
        return float(steps * self.layers * flops)

    @property
    def root_parameters(self) -> int:
        """Returns the number of parameters of the root FSDP unit, which has the head."""
        return self.embedding_parameters + self.positions * self.hidden

    @property
    def embedding_unit_parameters(self) -> int:
        """Returns the number of parameters of the embedding's FSDP unit; 0 for an embedding tied to the head."""
        return 0 if self.is_tied else self.embedding_parameters

    def trained_parameters(self, frozen: Sequence[str] = ()) -> int:
        """Returns the number of parameters that `model.frozen` leaves trained, assuming the usual names of matrices.

        Args:
            frozen: shell-style patterns; a pattern that matches none of the usual names has no effect here.
        """

        def is_frozen(*names: str) -> bool:
            full_names = [f"{name}{end}" for name in names for end in (".weight", "")]
            return any(fnmatchcase(name, pattern) for name in full_names for pattern in frozen)

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
        """Returns the largest rank that adapters of all matrices of the layers may have."""
        return min(min(matrix.features_in, matrix.features_out) for matrix in self._layer_matrices().values())

    def adapters(self, rank: int, targets: Sequence[str]) -> Adapters:
        """Returns the sizes of the adapters of `lora.targets`, assuming the usual names of matrices.

        Fused projections count as if they were separate. Adapters of experts save nothing per token, because they are
        added to the weights. Adapters of the head save nothing either, because the head is computed in chunks.

        Args:
            targets: `attention`, `mlp`, `all-linear`, `experts`, `head`, or shell-style patterns of names; a pattern
                that matches none of the usual names is not counted.
        """
        parameters = inputs = inner = outputs = summed = largest_sum = 0
        for chosen in self._targets_by_layer(targets):
            parameters += sum(
                rank * matrix.count * (matrix.features_in + matrix.features_out) for matrix in chosen.values()
            )
            dense = [matrix for matrix in chosen.values() if matrix.count == 1]
            stacks = [matrix for matrix in chosen.values() if matrix.count > 1]
            summed += sum(matrix.parameters + rank * matrix.count * matrix.features_out for matrix in stacks)
            largest_sum = max([largest_sum, *(matrix.parameters for matrix in stacks)])
            inner += rank * len(dense)
            outputs += sum(matrix.features_out for matrix in dense)
            inputs += sum(
                {matrix.reads: matrix.features_in for matrix in dense if matrix.reads != "attention"}.values()
            )
        if not self.is_tied and _has_head(targets):
            parameters += rank * (self.hidden + self.vocab)
        return Adapters(parameters, inputs, inner, outputs, summed, largest_sum)

    def adapted_parts(self, targets: Sequence[str]) -> frozenset[str]:
        """Returns which of `attention`, `mlp` and `head` have at least one matrix with an adapter of `lora.targets`.

        Experts are a part of the MLP. Patterns are matched as in `adapters`.
        """
        parts = {"attention", "mlp"}.intersection(targets)
        for chosen in self._targets_by_layer(targets):
            parts |= {"attention" if name.startswith(_PARTS_OF_LAYERS["attention"]) else "mlp" for name in chosen}
        return frozenset(parts | {"head"} if _has_head(targets) else parts)

    def _targets_by_layer(self, targets: Sequence[str]) -> Iterator[dict[str, _Matrix]]:
        """Yields the matrices with an adapter, layer by layer."""
        matrices = self._layer_matrices()
        matrices.pop("mlp.gate", None)  # routers have no adapters
        for layer in range(self.layers):
            yield {name: matrix for name, matrix in matrices.items() if _is_target(layer, name, matrix, targets)}

    def _layer_matrices(self) -> dict[str, _Matrix]:
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
        """Returns the model sizes read from a config.json whose keys are those of transformers' decoder models.

        Raises:
            ModelError: a size is missing or not a positive integer.
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
    names = [f"model.layers.{layer}.{own_name}" for own_name in (name, _FUSED_NAMES.get(name, name))]
    part = "mlp.experts." if name.startswith("mlp.experts.") else name.partition(".")[0] + "."
    return any(
        part == _PARTS_OF_LAYERS[target]
        if target in _PARTS_OF_LAYERS
        else matrix.count == 1
        if target == "all-linear"
        else any(fnmatchcase(full_name, target) for full_name in names)
        for target in targets
    )


def _has_head(targets: Sequence[str]) -> bool:
    return any(target == "head" or fnmatchcase("lm_head", target) for target in targets)


def has_attention_softcap(config: Mapping[str, Any]) -> bool:
    """Returns whether attention scores are soft-capped; missing entries of `config` have transformers' defaults."""
    # other architectures ignore this setting
    return config.get("model_type") == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None


def windowed_layers(config: Mapping[str, Any], layers: int) -> int:
    """Returns how many layers have a sliding window; missing entries of `config` have transformers' defaults."""
    model_type = str(config.get("model_type"))
    if model_type not in _WINDOWS:  # other architectures ignore these settings
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
    if "max_window_layers" in config:  # Qwen: index of the first windowed layer
        first = config["max_window_layers"]
        return max(0, layers - first) if type(first) is int else layers
    pattern = config.get("sliding_window_pattern")
    is_count = type(pattern) is int and pattern > 0
    period = pattern if is_count else _FULL_ATTENTION_PERIOD.get(model_type)
    return layers - layers // period if period else layers


def check_settings(model: Mapping[str, Any], config: TrainerConfig, field: str) -> None:
    """Checks that the model with this config.json can be divided over tp and ep ranks, and has what settings need.

    Args:
        model: the content of config.json.
        field: the setting that names the model; model.path is the policy's.

    Raises:
        ConfigError: see `check_parallel`, `check_float8` and `check_routing_replay`.
    """
    check_parallel(model, config.mesh.tp, config.mesh.ep)
    check_float8(model, config.precision.float8, config.mesh.tp)
    if field == "model.path":
        check_routing_replay(model, config.loss.routing_replay)


def check_parallel(config: Mapping[str, Any], tp: int, ep: int) -> None:
    """Checks that tp and ep ranks can share a model with this config.json.

    Raises:
        ConfigError: the architecture, or its heads, rows, vocabulary or experts, cannot be divided.
    """
    if tp > 1:
        _check_tensor_parallel(config, tp)
    if ep == 1:
        return
    if (experts := ModelSpec.from_config(config).experts) == 1:
        problem = f"mesh.ep={ep} divides experts, and a model of type {config.get('model_type')} has none"
        raise ConfigError(problem, field="mesh.ep", hint="set it to 1")
    if experts % ep:
        problem = f"mesh.ep={ep} does not divide the {experts} experts of this model"
        raise ConfigError(problem, field="mesh.ep", hint=f"set it to {_largest_divisor([experts], ep)}")


def check_routing_replay(config: Mapping[str, Any], replay: str) -> None:
    """Raises a ConfigError if loss.routing_replay=`replay` is set for a model without experts."""
    if replay != "none" and ModelSpec.from_config(config).routed_experts is None:
        problem = f"loss.routing_replay={replay} repeats choices of experts, and a model of type "
        problem += f"{config.get('model_type')} has none"
        raise ConfigError(problem, field="loss.routing_replay", hint="set it to none")


def _check_tensor_parallel(config: Mapping[str, Any], tp: int) -> None:
    kind = config.get("model_type")
    if kind not in TENSOR_PARALLEL:
        problem, hint = f"a model of type {kind}", f"set it to 1, or train one of {', '.join(TENSOR_PARALLEL)}"
        raise ConfigError(f"mesh.tp={tp} cannot divide {problem}", field="mesh.tp", hint=hint)
    spec = ModelSpec.from_config(config)
    counts = {"attention heads": spec.heads, "words of the vocabulary": spec.vocab}
    if spec.experts == 1:  # experts are not cut
        counts["rows of the MLP"] = spec.intermediate
    undivided = [f"{count} {what}" for what, count in counts.items() if count % tp]
    if spec.kv_heads % tp and tp % spec.kv_heads:
        undivided.append(f"{spec.kv_heads} key-value heads")
    if undivided:
        raise ConfigError(
            f"mesh.tp={tp} cannot divide the {undivided[0]} of this model",
            field="mesh.tp",
            hint=f"set it to {_largest_divisor([*counts.values(), spec.kv_heads], tp)}",
        )


def check_float8(config: Mapping[str, Any], recipe: str, tp: int) -> None:
    """Checks that the linear modules of a model with this config.json can compute in float8 on `tp` ranks.

    Args:
        recipe: `precision.float8`; with none nothing is checked.

    Raises:
        ConfigError: the layers have no linear modules, or a size of one is not divisible by 16.
    """
    if recipe == "none":
        return
    what, field = f"precision.float8={recipe}", "precision.float8"
    if config.get("model_type") == "gpt2":
        raise ConfigError(f"{what} replaces linear modules, and gpt2 has none", field=field, hint="set it to none")
    spec = ModelSpec.from_config(config)
    part = spec.over(tp)
    sizes = {
        "hidden states": spec.hidden,
        "queries": part.heads * part.head_dim,
        "keys": part.kv_heads * part.head_dim,
    }
    if spec.experts == 1:
        sizes["the MLP"] = part.intermediate
    elif "moe_intermediate_size" in config:  # of layers without experts, which these architectures may have
        sizes["the MLP"] = config.get("intermediate_size", 0) // tp
    for name, size in sizes.items():
        if size % 16:
            raise ConfigError(
                f"{what} needs sizes that 16 divides, and {name} of this model have {size} features"
                + (f" on each of mesh.tp={tp} ranks" if tp > 1 else ""),
                field=field,
                hint="set it to none" + (", or lower mesh.tp" if tp > 1 else ""),
            )


def _largest_divisor(counts: Sequence[int], below: int) -> int:
    return next(size for size in range(below - 1, 0, -1) if not any(count % size for count in counts))
