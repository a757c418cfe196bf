"""Counted operations are those that torch counts while a model runs, and pairs those of a written-out mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from slimefsdp.batching.packing import LocalShare
from slimefsdp.distributed.fsdp import recompute_layers
from slimefsdp.estimate.flops import executed_flops, forward_flops, training_flops
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.decoder import PolicyModel, register_attention
from slimefsdp.models.fused_log_probs import HeadInputs, token_log_probs
from slimefsdp.models.lora import Lora, add_adapters
from tests.support.tiny_models import ARCHITECTURES, tiny_model

TOKENS = 10
IN_PLACE = {torch.ops.aten.addmm_: lambda _, left, right, **__: 2 * left[0] * left[1] * right[1]}


def counted(flops: FlopCounterMode) -> dict[str, int]:
    return {str(operation): count for operation, count in flops.get_flop_counts()["Global"].items()}


def dense_pairs(lengths: list[int], window: int) -> int:
    """Ones in the masks of samples, each token seeing itself and at most window - 1 before it; 0: all."""
    masks = [torch.ones(n, n).tril() - (torch.ones(n, n).tril(-window) if window else 0) for n in lengths]
    return int(sum(mask.sum() for mask in masks))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_matrix_products_of_training_are_those_that_torch_counts(kind):
    model = tiny_model(kind)
    model.set_attn_implementation("eager")
    model.config._experts_implementation = "eager"  # the products of experts one by one, which torch can count
    with FlopCounterMode(display=False) as flops:
        model(torch.arange(1, TOKENS + 1)[None], use_cache=False).logits.sum().backward()
    found = counted(flops)
    model_spec = ModelSpec.from_config(model.config.to_dict())
    expected = training_flops(model_spec, np.array([TOKENS]), counted_rows=TOKENS)
    attention = found.pop("aten.bmm")
    assert expected.layers + expected.head == sum(found.values())
    # eager attention computes what the mask then hides
    whole = training_flops(model_spec, np.array([TOKENS]), counted_rows=0).attention
    layers = [model_spec.window] * model_spec.windowed_layers + [0] * (model_spec.layers - model_spec.windowed_layers)
    pairs = sum(dense_pairs([TOKENS], window) for window in layers)
    assert whole == pytest.approx(attention * pairs / (TOKENS**2 * model_spec.layers), rel=1e-12)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_executed_operations_are_those_of_our_own_forward_and_backward(recompute, rank):
    hf = tiny_model("qwen3")
    model_spec = ModelSpec.from_config(hf.config.to_dict())
    hf.set_attn_implementation(register_attention())
    policy = PolicyModel(hf)
    if rank is not None:
        add_adapters(policy, Lora(rank, 8.0, ["attention", "mlp"], seed=0), base_dtype=torch.float32)
        hf.get_input_embeddings().weight.requires_grad_(True)  # what is frozen below all adapters has no backward
    if recompute:
        recompute_layers(policy.decoder_layers(), "full")
    tokens, rows = torch.arange(1, 14), torch.tensor([3, 4, 5, 6, 10, 11])
    positions = torch.cat([torch.arange(9), torch.arange(4)])
    share = LocalShare(tokens, positions, rows, tokens[rows + 1], torch.arange(6))
    layout = policy.attention.layout([0, 9, 13])
    # torch would leave out a layer's last product, which no gradient of the layer reads
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as flops, set_checkpoint_early_stop(False):
        policy(share, policy.attention.for_pack(layout, torch.device("cpu")), temperature=1.0)[0].sum().backward()
    found = counted(flops)
    products = sum(count for operation, count in found.items() if operation.startswith(("aten.mm", "aten.addmm")))
    adapters = 0 if rank is None else model_spec.adapters(rank, ["attention", "mlp"]).parameters
    expected = executed_flops(
        training_flops(
            model_spec,
            np.array([9, 4]),
            counted_rows=6,
            trained_share=1.0 if rank is None else 0.0,
            adapter_parameters=adapters,
        ),
        forward_flops(model_spec, np.array([9, 4]), counted_rows=6, adapter_parameters=adapters),
        recomputed_layers=1.0 if recompute else 0.0,
    )
    assert expected.layers + expected.head == products


@pytest.mark.parametrize(("rows_per_chunk", "again"), [(12, 0.0), (6, 1 / 2), (3, 3 / 4)])
def test_a_head_computes_the_logits_of_all_its_chunks_but_the_last_again(rows_per_chunk, again):
    model_spec = ModelSpec(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, intermediate=8, vocab=50)
    hidden, weight = torch.ones(12, 8, requires_grad=True), torch.ones(50, 8, requires_grad=True)
    targets = torch.zeros(12, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as flops:
        log_probs, _ = token_log_probs(
            HeadInputs(hidden, weight), targets, with_entropy=True, chunk_bytes=rows_per_chunk * 50 * 4 * 2
        )
        log_probs.sum().backward()
    needed, forward = (of(model_spec, np.array([12]), counted_rows=12) for of in (training_flops, forward_flops))
    expected = executed_flops(needed, forward, recomputed_head=again)
    assert expected.head == sum(counted(flops).values())


@pytest.mark.parametrize("window", [0, 1, 3, 100])
def test_what_samples_share_is_counted_once_and_attended_to_by_all(window):
    kind = ("mistral", {"sliding_window": window}) if window else ("llama", {})
    model_spec = ModelSpec.from_config(tiny_model(kind[0], **kind[1]).config.to_dict())
    prompt, responses = 7, [4, 1, 6]
    whole = forward_flops(model_spec, np.array([prompt + n for n in responses]), counted_rows=11)
    once = forward_flops(model_spec, np.array([prompt]), counted_rows=0)
    shared = forward_flops(
        model_spec, np.array([prompt, *responses]), counted_rows=11, depths=np.array([0, prompt, prompt, prompt])
    )
    assert shared.attention == whole.attention - 2 * once.attention
    assert shared.layers == whole.layers - 2 * once.layers
    assert shared.head == whole.head


def test_a_frozen_weight_saves_its_gradient_and_a_critic_has_no_head():
    model_spec = ModelSpec.from_config(tiny_model().config.to_dict())
    lengths = np.array([5, 8])
    forward = forward_flops(model_spec, lengths, counted_rows=3)
    frozen = training_flops(model_spec, lengths, counted_rows=3, trained_share=0.0)
    assert (frozen.layers, frozen.head) == (2 * forward.layers, 2 * forward.head)
    assert frozen.attention == training_flops(model_spec, lengths, counted_rows=3).attention
    assert forward_flops(model_spec, lengths, counted_rows=0).head == 0
    assert forward_flops(model_spec, np.zeros(0, dtype=np.int64), counted_rows=0).total == 0
