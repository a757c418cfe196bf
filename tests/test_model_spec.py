"""The sizes read from config.json are those of the models that transformers builds from it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import transformers

from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.lora import Lora, adapted_matrices, add_adapters
from tests.support.tiny_models import ARCHITECTURES, tiny_model

LAYERS = 7  # no multiple of any pattern of windows
LAYER_OF = {"gpt2": "h.0"}


def full_size(kind: str, **changes: Any) -> Any:
    """The architecture's configuration at its default, realistic width."""
    config_class = ARCHITECTURES[kind][1]
    return config_class(**{"n_layer" if kind == "gpt2" else "num_hidden_layers": LAYERS, **changes})


def windowed_layers(config: Any) -> int:
    """As transformers decides it, layer by layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return kinds.count("sliding_attention")
    return LAYERS if getattr(config, "sliding_window", None) else 0


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_parameters_are_those_of_the_model_within_a_thousandth(kind: str) -> None:
    config = full_size(kind)
    with torch.device("meta"):
        model = ARCHITECTURES[kind][0](config)
    model_spec = ModelSpec.from_config(json.loads(config.to_json_string(use_diff=False)))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert model_spec.parameters == pytest.approx(counted, rel=1e-3)
    assert counted >= model_spec.parameters, "what is left out can only be missing"
    layer = sum(
        parameter.numel() for parameter in model.base_model.get_submodule(LAYER_OF.get(kind, "layers.0")).parameters()
    )
    assert model_spec.layer_parameters == pytest.approx(layer, rel=3e-3)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model_spec.is_tied == tied and model_spec.embedding_unit_parameters == (
        0 if tied else config.vocab_size * model_spec.hidden
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 5}])
def test_windowed_layers_are_counted_as_transformers_places_them(kind: str, changes: dict[str, Any]) -> None:
    config = full_size(kind, **{name: value for name, value in changes.items() if hasattr(full_size(kind), name)})
    written = json.loads(config.to_json_string(use_diff=False))
    expected = windowed_layers(config)
    for names in ((), ("layer_types",)):  # files of older versions do not list the layers
        model_spec = ModelSpec.from_config({name: value for name, value in written.items() if name not in names})
        assert model_spec.windowed_layers == expected
        assert model_spec.window == (config.sliding_window if expected else 0)
    assert kind in ("gpt2", "llama", "olmo2", "glm4") or not changes or expected > 0


def test_a_mixture_counts_all_experts_and_runs_a_token_through_few() -> None:
    model_spec = ModelSpec.from_config(json.loads(transformers.MixtralConfig().to_json_string(use_diff=False)))
    assert model_spec.parameters == pytest.approx(46.7e9, rel=1e-3)  # as published
    assert (model_spec.experts, model_spec.active_experts) == (8, 2)


SMALL = ModelSpec(hidden=8, layers=3, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=50)


@pytest.mark.parametrize(
    ("frozen", "left_out"),
    [
        ([], 0),
        (["nothing.like.it"], 0),
        (["*.mlp.*"], 3 * 3 * 8 * 16),
        (["model.layers.1.*"], SMALL.layer_parameters),
        (["*.k_proj.weight", "*.v_proj.weight"], 3 * 2 * 8 * 2 * 4),
        (["model.embed_tokens.*"], 50 * 8),
        (["lm_head.weight", "model.embed_tokens.weight"], 2 * 50 * 8),
        (["*"], SMALL.parameters),
    ],
)
def test_frozen_matrices_are_not_trained(frozen: list[str], left_out: int) -> None:
    assert SMALL.trained_parameters(frozen) == SMALL.parameters - left_out
    mixture = dataclasses.replace(SMALL, experts=4, active_experts=2)
    assert mixture.trained_parameters() == mixture.parameters
    assert mixture.trained_parameters(["*.experts.*"]) == mixture.parameters - 3 * 4 * mixture.expert_parameters
    tied = dataclasses.replace(SMALL, is_tied=True)
    assert tied.trained_parameters(["lm_head.weight"]) == tied.parameters - 50 * 8, "under either of its names"


OF_DENSE = [["attention", "mlp"], ["mlp"], ["*.q_proj", "*.1.mlp.*"], ["*.1.*.o_proj", "*.down_proj"]]
OF_OTHERS = [("qwen3", ["mlp", "head"]), ("qwen3_moe", ["experts", "lm_head"]), ("qwen3_moe", ["*.1.*.down_proj"])]


@pytest.mark.parametrize(
    ("kind", "targets"), [*((kind, one) for kind in ("qwen3", "gemma2") for one in OF_DENSE), *OF_OTHERS], ids=str
)
def test_adapters_are_those_of_the_model_that_has_them(kind: str, targets: list[str]) -> None:
    policy = PolicyModel(tiny_model(kind))
    model_spec = ModelSpec.from_config(policy.hf.config.to_dict())
    add_adapters(policy, Lora(3, 8.0, targets, seed=0), base_dtype=torch.float32)
    matrices = [matrix for matrix in adapted_matrices(policy) if not matrix.is_stack and matrix.name != "lm_head"]
    found = model_spec.adapters(3, targets)
    assert found.parameters == sum(parameter.numel() for _, parameter in policy.trained_weights())
    stacks = [(policy.hf.get_parameter(one.weight), one.b) for one in adapted_matrices(policy) if one.is_stack]
    assert found.summed == sum(weight.numel() + b.numel() for weight, b in stacks)
    assert found.largest_sum == max((weight.numel() for weight, _ in stacks), default=0)
    assert found.inner == 3 * len(matrices) and found.outputs == sum(len(matrix.b) for matrix in matrices)


def test_fused_projections_are_counted_as_if_they_were_apart_under_either_name() -> None:
    apart, fused = (SMALL.adapters(2, targets) for targets in (["*.[qkv]_proj"], ["*.qkv_proj"]))
    assert apart == fused == SMALL.adapters(2, ["*.self_attn.[!o]*"])
    # queries, keys and values read one hidden state, which is kept for all three
    assert (apart.inputs, apart.inner) == (3 * 8, 3 * 3 * 2)
    mixture = dataclasses.replace(SMALL, experts=4, active_experts=2)
    assert mixture.adapters(2, ["experts"]).parameters == 3 * 4 * 2 * (8 + 32 + 16 + 8)
    assert mixture.adapters(2, ["mlp"]).parameters == 0
    assert SMALL.adapters(2, ["*.q_projj"]).parameters == 0
    assert SMALL.adapters(2, ["all-linear"]) == SMALL.adapters(2, ["attention", "mlp"])
    assert mixture.adapters(2, ["all-linear"]) == mixture.adapters(2, ["attention"])


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        (["all-linear"], {"attention", "mlp"}),
        (["*.q_proj"], {"attention"}),
        (["*.layers.1.mlp.*", "lm_head"], {"mlp", "head"}),
        (["attention", "head"], {"attention", "head"}),
        (["*.layers.99.*"], set()),
    ],
)
def test_parts_are_adapted_whichever_word_or_pattern_chooses_them(targets: list[str], parts: set[str]) -> None:
    assert SMALL.adapted_parts(targets) == parts
