"""What layers and the head keep, against the tensors that autograd saves for real ones."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.hf_interface import register_attention
from slimefsdp.attention.select import Choice
from slimefsdp.distributed.activation_checkpointing import recompute_layers
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.lora import Lora, add_adapters
from slimefsdp.perf_model.activations import (
    HeadActivations,
    LayerActivations,
    kept_between,
    recomputed_head_share,
)
from tests.support.tiny_models import TinyFolder, tiny_model

TOKENS = 96
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 32, "vocab_size": 97}


def saved_bytes(kind: str, dtype: torch.dtype, recompute: Any = "none", lora: Lora | None = None) -> int:
    """Bytes of distinct storages that a decoder's forward leaves for its backward, weights and buffers left out."""
    policy = PolicyModel(tiny_model(kind, dtype=dtype, **SIZES))
    policy.hf.set_attn_implementation(register_attention())
    if lora is not None:
        add_adapters(policy, lora, base_dtype=dtype)
        policy.hf.get_input_embeddings().weight.requires_grad_(True)  # what lies below all adapters keeps nothing
    recompute_layers(policy.decoder_layers(), recompute, 1)
    attention = Attention(Choice("local", "one rank"))
    attend = attention.for_pack(attention.layout([0, TOKENS]), torch.device("cpu"))
    mine = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in mine:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = policy.hidden_states(torch.arange(TOKENS) % 90, torch.arange(TOKENS), attend)
    assert kept.requires_grad  # the graph, and what it saved, is still there
    return sum(storages.values())


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, dtype) for kind in ("qwen3", "llama", "mistral") for dtype in (torch.float32, torch.bfloat16)),
        ("olmo2", torch.float32),  # in half precision its norms widen their weight, too
        ("phi3", torch.float32),
    ],
)
def test_a_layer_keeps_what_autograd_saves_of_it(kind: str, dtype: torch.dtype, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder(kind, **SIZES)
    model = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
    layer = LayerActivations.of_model(model, compute=dtype.itemsize, wide=4)
    expected = kept_between(layer, model.layers, TOKENS, "none", 1)
    assert saved_bytes(kind, dtype) == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("targets", [("attention", "mlp"), ("attention",), ("mlp",), ("*.1.*.down_proj",)], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beside_adapters_frozen_norms_and_products_keep_nothing_for_their_weights(
    kind: str, dtype: torch.dtype, targets: tuple[str, ...]
) -> None:
    model = ModelSpec.from_config(tiny_model(kind, **SIZES).config.to_dict())
    layer = LayerActivations.of_model(model, compute=dtype.itemsize, wide=4, adapters=model.adapters(8, targets))
    saved = saved_bytes(kind, dtype, lora=Lora(8, 8.0, targets, seed=0))
    expected = kept_between(layer, model.layers, TOKENS, "none", 1)
    assert saved == pytest.approx(expected, rel=0.06)
    everything = LayerActivations.of_model(model, compute=dtype.itemsize, wide=4)
    assert layer.kept < everything.kept


@pytest.mark.parametrize("targets", [("experts",), ("attention", "*.gate_up_proj")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacks_of_experts_with_their_adapters_are_kept_whatever_the_tokens(
    dtype: torch.dtype, targets: tuple[str, ...]
) -> None:
    model = ModelSpec.from_config(tiny_model("qwen3_moe", **SIZES).config.to_dict())
    adapters = model.adapters(8, targets)
    layer = LayerActivations.of_model(model, compute=dtype.itemsize, wide=4, adapters=adapters)
    saved = saved_bytes("qwen3_moe", dtype, lora=Lora(8, 8.0, targets, seed=0))
    assert saved == pytest.approx(kept_between(layer, 3, TOKENS, "none", 1), rel=0.06)
    assert kept_between(layer, 3, 0, "none", 1) == dtype.itemsize * adapters.summed > 0.05 * saved


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_keep_no_stacks_with_adapters(recompute: Any) -> None:
    several = [["attention", "experts"], ["attention"]]
    with_sums, without = (
        saved_bytes("qwen3_moe", torch.float32, recompute, Lora(8, 8.0, targets, seed=0)) for targets in several
    )
    assert with_sums == pytest.approx(without, abs=100)


def test_recomputed_layers_keep_their_input_alone() -> None:
    layer = LayerActivations.of_model(ModelSpec(64, 4, 4, 2, 32, 160, 97), compute=4, wide=4)
    full = kept_between(layer, 4, TOKENS, "full", 1)
    assert full == 4 * TOKENS * 64 * 4
    every_second = kept_between(layer, 4, TOKENS, "full", 2)
    assert every_second == full // 2 + 2 * TOKENS * layer.kept
    assert full < kept_between(layer, 4, TOKENS, "selective", 1) < kept_between(layer, 4, TOKENS, "none", 1)


@pytest.mark.parametrize(("device", "rows"), [("cpu", 8000), ("cuda", 64_000)])
def test_the_head_of_many_rows_holds_its_bytes_of_logits_and_a_gradient_of_its_weight(device: str, rows: int) -> None:
    model, on_cpu = ModelSpec(64, 4, 4, 2, 32, 160, vocab=32_768), device == "cpu"
    of_model = partial(HeadActivations.of_model, model, wide=4, tokens=rows + 192, on_cpu=on_cpu)
    found = of_model(compute=4, rows=rows)
    most, tile = (2**29, 2 * 2**20) if on_cpu else (2**30, 2**29)
    assert 0.9 * most <= found.forward <= most
    # the gradient is that of the weight in float32, and once more rounded where the weight is
    exps = found.forward + rows * 64 * 4 + 32_768 * 64 * 4 - found.backward
    assert 0.9 * tile <= exps <= tile
    # on a CPU products need the words of a tile of such a weight widened, and the gradient of rows is summed in float32
    half = of_model(compute=2, rows=rows)
    widened = half.forward - found.forward
    assert widened == (1024 * 64 * 4 if on_cpu else 0)
    of_rows = rows * 64 * (4 + 2 if on_cpu else 2)
    # on CUDA they take a tile's gradient rounded, which is gone before the weight's is
    rounded_tile, rounded_weight = (0 if on_cpu else exps // 2), 32_768 * 64 * 2
    of_logits = found.forward - exps
    assert half.backward == of_logits + widened + of_rows + 32_768 * 64 * 4 + max(rounded_tile, rounded_weight)
    frozen = of_model(compute=2, rows=rows, is_frozen=True)
    assert frozen.backward == of_logits + widened + of_rows + rounded_tile
    critic = of_model(compute=4, rows=0)
    assert critic.forward == critic.backward == 0 < critic.kept


@pytest.mark.parametrize(("rows", "share"), [(0, 0), (1, 0), (512, 0), (1000, 0), (8000, 1 - 261 / 512)])
def test_a_head_computes_again_what_its_bytes_do_not_hold(rows: int, share: float) -> None:
    model = ModelSpec(64, 4, 4, 2, 32, 160, vocab=32_768)
    assert recomputed_head_share(model, wide=4, rows=rows, on_cpu=True) == pytest.approx(share, abs=0.01)
    assert (recomputed_head_share(model, wide=4, rows=rows, on_cpu=True) == 0) == (share == 0)
