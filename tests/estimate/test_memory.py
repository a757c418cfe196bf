"""Bytes of a rank: activations against what autograd saves, states and messages against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import Choice
from slimefsdp.distributed.fsdp import recompute_layers
from slimefsdp.estimate.memory import (
    Memory,
    MicroBatches,
    head_activations,
    kept_activations,
    memory_at_rest,
    most_gathered,
    peak_memory,
    recomputed_head_share,
    step_memory,
    training_memory,
)
from slimefsdp.estimate.setup import SHARDINGS, ByteSizes, ColocatedModels, MeshShape, Sharding, TrainingSetup
from slimefsdp.estimate.traffic import sharding_traffic
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.decoder import PolicyModel, register_attention
from slimefsdp.models.lora import Lora, add_adapters
from tests.support.tiny_models import tiny_model

GB = 10**9
TOKENS = 96
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "head_dim": 32, "vocab_size": 97}
# 7 billion parameters in 35 equal layers
SEVEN = ModelSpec(hidden=1000, layers=35, heads=1, kv_heads=1, head_dim=1000, intermediate=65_333, vocab=1)
EIGHT_RANKS = TrainingSetup(SEVEN, MeshShape(dp=8))
STEP = MicroBatches(tokens=8192, rows=4096, count=4)
ADAPTERS = {"trained_share": 0.0, "lora_rank": 32}


def saved_bytes(kind: str, dtype: torch.dtype, recompute: Any = "none", lora: Lora | None = None) -> int:
    """Returns the bytes of distinct storages that a decoder's forward saves for backward, without its weights."""
    policy = PolicyModel(tiny_model(kind, dtype=dtype, **SIZES))
    policy.hf.set_attn_implementation(register_attention())
    if lora is not None:
        add_adapters(policy, lora, base_dtype=dtype)
        policy.hf.get_input_embeddings().weight.requires_grad_(True)  # what precedes all adapters would keep nothing
    recompute_layers(policy.decoder_layers(), recompute)
    attention = Attention(Choice("local", "one rank"))
    attend = attention.for_pack(attention.layout([0, TOKENS]), torch.device("cpu"))
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*policy.parameters(), *policy.buffers())}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = policy.hidden_states(torch.arange(TOKENS) % 90, torch.arange(TOKENS), attend)
    assert kept.requires_grad  # the graph, and what it saved, is still there
    return sum(storages.values())


@pytest.mark.parametrize(
    ("kind", "dtype", "targets"),
    [
        *((kind, dtype, None) for kind in ("qwen3", "llama") for dtype in (torch.float32, torch.bfloat16)),
        ("olmo2", torch.float32, None),  # in half precision its norms widen their weight, too
        ("phi3", torch.float32, None),
        ("qwen3", torch.float32, ("attention", "mlp")),
        ("llama", torch.bfloat16, ("attention", "mlp")),
        ("llama", torch.bfloat16, ("*.1.*.down_proj",)),
        ("qwen3_moe", torch.float32, ("experts",)),
        ("qwen3_moe", torch.bfloat16, ("attention", "*.gate_up_proj")),
    ],
    ids=str,
)
def test_layers_keep_what_autograd_saves_of_them(
    kind: str, dtype: torch.dtype, targets: tuple[str, ...] | None
) -> None:
    model = ModelSpec.from_config(tiny_model(kind, **SIZES).config.to_dict())
    setup = TrainingSetup(model, sizes=ByteSizes(compute=dtype.itemsize))
    lora = None
    if targets is not None:
        setup, lora = replace(setup, lora_rank=8, lora_targets=targets), Lora(8, 8.0, targets, seed=0)
    expected = kept_activations(setup, model.layers, TOKENS)
    assert saved_bytes(kind, dtype, lora=lora) == pytest.approx(expected, rel=0.06)


def test_recomputed_layers_keep_their_input_alone() -> None:
    setup = TrainingSetup(ModelSpec(64, 4, 4, 2, 32, 160, 97), sizes=ByteSizes(compute=4))

    def kept(recompute: Any, **changes: Any) -> int:
        return kept_activations(replace(setup, recompute=recompute, **changes), 4, TOKENS)

    assert kept("full") == 4 * TOKENS * 64 * 4
    assert kept("full") < kept("selective") < kept("none")
    assert kept("offload") == 0 < kept("offload", on_cpu=True)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_the_head_holds_its_bytes_of_logits_and_a_gradient_of_its_weight(on_cpu: bool) -> None:
    rows = 8000 if on_cpu else 64_000
    batch, weight = MicroBatches(rows + 192, rows), 32_768 * 64
    setup = TrainingSetup(ModelSpec(64, 4, 4, 2, 32, 160, vocab=32_768), sizes=ByteSizes(compute=4), on_cpu=on_cpu)
    wide = head_activations(setup, batch)
    most, tile = (2**29, 2 * 2**20) if on_cpu else (2**30, 2**29)
    assert 0.9 * most <= wide.forward <= most
    exps = wide.forward + rows * 64 * 4 + weight * 4 - wide.backward  # backward has the logits, not the exponentials
    assert 0.9 * tile <= exps <= tile
    half_setup = replace(setup, sizes=ByteSizes(compute=2))
    half = head_activations(half_setup, batch)
    # on a CPU, the words of a tile are widened and gradients of rows are summed in float32; on CUDA, tiles are rounded
    widened = 1024 * 64 * 4 if on_cpu else 0
    of_rows = rows * 64 * (4 + 2 if on_cpu else 2)
    rounded_tile = 0 if on_cpu else exps // 2
    assert half.forward == wide.forward + widened
    of_weight = weight * 4 + max(rounded_tile, weight * 2)
    assert half.backward == wide.forward - exps + widened + of_rows + of_weight
    frozen = head_activations(replace(half_setup, **ADAPTERS), batch)
    assert frozen.backward == half.backward - of_weight + rounded_tile
    critic = head_activations(setup, replace(batch, rows=0))
    assert critic.forward == critic.backward == 0 < critic.kept
    assert recomputed_head_share(setup, 512) == 0
    assert not on_cpu or recomputed_head_share(setup, 8000) == pytest.approx(1 - 261 / 512, abs=0.01)


def test_seven_billion_parameters_on_four_ranks_take_what_was_worked_out_by_hand() -> None:
    setup = TrainingSetup(SEVEN, MeshShape(dp=4))
    assert SEVEN.parameters == pytest.approx(7e9, rel=1e-4)
    held = {level: memory_at_rest(replace(setup, sharding=level)).total for level in SHARDINGS}
    assert held["full"] == held["keep_parameters"] == held["optimizer"] == pytest.approx(28 * GB, rel=1e-3)
    assert held["replicate"] == pytest.approx(112 * GB, rel=1e-3)
    gathered = {level: most_gathered(replace(setup, sharding=level)) for level in SHARDINGS}
    assert gathered["full"] == gathered["replicate"] == pytest.approx(0.4 * GB, rel=1e-2), "one layer in bfloat16"
    assert gathered["keep_parameters"] == pytest.approx(14 * GB, rel=1e-3), "all layers in bfloat16"
    assert gathered["optimizer"] == pytest.approx(42 * GB, rel=1e-3), "and their gradients in float32"
    adapters = replace(setup, **ADAPTERS)
    of_adapters = adapters.adapter_parameters * 4 / 4
    assert 0.02 < adapters.adapter_parameters / SEVEN.parameters < 0.04
    beside = memory_at_rest(adapters)
    assert beside.parameters == pytest.approx(14 * GB / 4 + of_adapters, rel=1e-3), "frozen weights in bfloat16"
    assert beside.gradients == pytest.approx(of_adapters) and beside.optimizer == pytest.approx(2 * of_adapters)
    muon = memory_at_rest(TrainingSetup(SEVEN, sizes=ByteSizes(matrix_states=1))).optimizer
    assert muon == 4 * (SEVEN.layers * SEVEN.layer_parameters + 2 * 2 * SEVEN.embedding_parameters)


def test_sharding_sends_what_was_worked_out_by_hand() -> None:
    def sent(level: Sharding, mesh: MeshShape, micro_batches: int = 1, **changes: Any) -> Any:
        return sharding_traffic(TrainingSetup(SEVEN, mesh, level, **changes), micro_batches)

    four, copies = MeshShape(dp=4), MeshShape(dp_replicate=2, dp=4)
    for mesh, gigabytes in ((four, 42), (MeshShape(dp=8), 49)):
        assert sent("full", mesh).total == pytest.approx(gigabytes * GB, rel=1e-3), "gathered twice, reduced once"
    assert sent("keep_parameters", four).all_gather == pytest.approx(sent("full", four).all_gather / 2, rel=1e-3)
    assert sent("full", copies).all_reduce == pytest.approx(7 * GB, rel=1e-3), "a quarter of 28 GB"
    whole = sent("replicate", copies)
    assert whole.all_gather == whole.reduce_scatter == 0
    assert whole.all_reduce == pytest.approx(2 * 28 * GB * 7 / 8, rel=1e-3)
    assert sent("optimizer", copies, 9).total == sent("optimizer", copies).total
    assert sent("keep_parameters", copies, 9).total == pytest.approx(9 * sent("keep_parameters", copies).total)
    assert sent("full", four, trained_share=0.5).reduce_scatter == pytest.approx(21 * GB / 2, rel=1e-3)
    adapters = TrainingSetup(SEVEN, four, **ADAPTERS).adapter_parameters
    assert sent("full", four, **ADAPTERS).reduce_scatter == pytest.approx(adapters * 4 * 3 / 4, rel=1e-3)
    assert all(sent(level, MeshShape()).total == 0 for level in SHARDINGS)


def test_a_step_holds_more_than_what_is_at_rest_and_less_with_every_setting_that_saves() -> None:
    def peak(batch: MicroBatches = STEP, **changes: Any) -> int:
        return step_memory(replace(EIGHT_RANKS, **changes), batch).total

    levels = [peak(sharding=level) for level in SHARDINGS]
    assert levels == sorted(levels) and levels[0] > 16 * SEVEN.parameters / 8
    assert peak(MicroBatches(16_384, 8192, 4)) > peak()
    assert peak(recompute="full") < peak(recompute="selective") < peak()
    assert peak(trained_share=0.5) < peak() and peak(**ADAPTERS) < peak()
    assert peak(cpu_offload=True) == pytest.approx(peak() - 16 * SEVEN.parameters / 8, rel=0.01)
    assert peak(MicroBatches(8192, 4096, 1), sharding="optimizer") < peak(sharding="optimizer")


def test_colocated_models_take_their_room_where_they_rest() -> None:
    model = ModelSpec(2048, 16, 32, 8, 64, 8192, vocab=128_256)
    setup, shard = TrainingSetup(model, MeshShape(dp=8)), model.parameters // 8 * 4
    headless = (model.parameters - model.embedding_parameters) // 8 * 4  # a critic has no head over the vocabulary

    def peak(colocated: ColocatedModels, **changes: Any) -> Memory:
        return peak_memory(replace(setup, colocated=colocated, **changes), STEP)

    alone = peak_memory(setup, STEP)
    assert alone == training_memory(setup, STEP) == step_memory(setup, STEP)
    stays = ColocatedModels(model, reference_rests_on_host=False)
    assert peak(stays).total == alone.total + shard
    asleep = peak(ColocatedModels(model))
    assert asleep.total == alone.total and asleep.host == shard
    assert peak(ColocatedModels(model), full_kl=True).others == shard, "the loss reads its hidden states"
    assert peak(ColocatedModels(model), on_cpu=True).others == shard, "a CPU has no other memory"
    trains = peak(ColocatedModels(critic=model))
    assert (trains.parameters, trains.others) == (headless, 3 * shard), "the policy's states are there, too"
    # the policy with gradients and moments, the reference, the critic with moments
    offloaded = peak(ColocatedModels(model, critic=model), cpu_offload=True)
    assert (offloaded.parameters, offloaded.host) == (0, (4 + 1) * shard + 3 * headless)
