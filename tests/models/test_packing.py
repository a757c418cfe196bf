"""Packed log-probs and gradients equal those of plain Hugging Face on every sample alone, for every supported model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import choose_strategy
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.mesh import Mesh, build_mesh
from slimefsdp.errors import ConfigError
from slimefsdp.models.build import build_policy, load_policy
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.training.packs import RankPacks, evaluate, micro_batches
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import ARCHITECTURES, SIZES, TinyFolder, plain_model

CPU = torch.device("cpu")
# (tokens, response tokens): the shortest there is, around the window of 8, and longer than a band of 64
SHAPES = ((30, 10), (2, 1), (9, 3), (150, 140), (8, 7), (7, 1))
TIES = pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
WITH_WINDOWS = ("qwen2", "mistral", "gemma3_text", "gemma2", "phi3", "gpt_oss")
KINDS = pytest.mark.parametrize("kind", ARCHITECTURES)


def some_batch(shapes: Sequence[tuple[int, int]] = SHAPES) -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(0, SIZES["vocab_size"], length).tolist(), "response_length": response}
        for length, response in shapes
    ]
    samples[0]["tokens"][-1] = 0  # a response that ends in the padding id
    return RolloutBatch.from_samples(samples)


def load(
    path: Path, mesh: Mesh, dtype: torch.dtype, *, checkpointing: bool = False, strategy: Any = "auto"
) -> PolicyModel:
    how = Parallelism(compute_dtype=dtype, master_dtype=dtype, recompute="full" if checkpointing else "none")
    return load_policy(
        read_model_folder(path),
        mesh,
        how,
        attention_for=lambda shape: Attention(choose_strategy(strategy, shape, mesh.cp), mesh.cp_group),
    )


def packed_log_probs(
    policy: PolicyModel, batch: RolloutBatch, order: list[int], mesh: Mesh, temperature: float = 1.0
) -> torch.Tensor:
    """[R] in the batch's order, all samples in one pack, by the way that training goes."""
    (micro_batch,) = micro_batches(RankPacks(batch, [np.array(order)]), policy.attention, mesh, trained_only=False)
    log_probs, _ = evaluate(policy, micro_batch, mesh, temperature=temperature)
    at = micro_batch.packed.response_index
    return log_probs.new_zeros(batch.num_response_tokens).index_put((at,), log_probs)


def separate_log_probs(hf: Any, batch: RolloutBatch, temperature: float = 1.0) -> torch.Tensor:
    """[R], one plain forward a sample."""
    parts = []
    for sample in batch.to_samples():
        tokens = torch.as_tensor(np.array(sample["tokens"]))
        log_probs = (hf(tokens[None]).logits[0] / temperature).log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        parts.append(log_probs[-sample["response_length"] :])
    return torch.cat(parts)


def differences_of_rank(
    rank: int,
    path: Path,
    dtype: torch.dtype,
    checkpointing: bool,
    temperature: float,
    cp: int = 1,
    strategy: str = "auto",
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> dict[str, float]:
    """On rank 0: largest differences of log-probs, of gradients relative to their own scale, and of buffers."""
    batch, mesh = some_batch(shapes), build_mesh(1, cp, CPU)
    order = [3, 1, 0, 5, 4, 2] if shapes is SHAPES else list(range(len(shapes)))
    weights = torch.randn(batch.num_response_tokens, dtype=dtype, generator=torch.Generator().manual_seed(1))
    runs: list[str] = []
    with KeepFloat64() if dtype == torch.float64 else nullcontext():
        policy = load(path, mesh, dtype, checkpointing=checkpointing, strategy=strategy)
        layer = policy.decoder_layers()[0]
        next(part for name, part in layer.named_children() if "attn" in name).register_forward_hook(
            lambda *_: runs.append("layer")
        )
        ours = packed_log_probs(policy, batch, order, mesh, temperature)
        (ours * weights).sum().backward()
    assert len(runs) == 1 + checkpointing  # a recomputed layer runs again in backward
    gradients: dict[str, torch.Tensor] = {}
    for name, parameter in policy.named_weights():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad.full_tensor()
    if rank != 0:
        return {}
    with KeepFloat64() if dtype == torch.float64 else nullcontext():
        hf = plain_model(path, dtype)
        theirs = separate_log_probs(hf, batch, temperature)
        (theirs * weights).sum().backward()
    assert ours.dtype == theirs.dtype == dtype and policy.training
    # an expert that no token of a sample visits has no gradient in plain Hugging Face, or one of zeros
    expected = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in hf.named_parameters()
    }
    assert gradients.keys() == expected.keys()
    # a key's bias has no gradient under softmax: what is left is rounding, small against every other one's scale
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    their_buffers = dict(hf.named_buffers(remove_duplicate=False))
    our_buffers = dict(policy.hf.named_buffers(remove_duplicate=False))
    assert our_buffers.keys() == their_buffers.keys()
    return {
        "log_probs": float((ours - theirs).detach().abs().max()),
        "gradients": max(
            float((gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=floor))
            for name, gradient in expected.items()
        ),
        "buffers": float(sum(not torch.equal(our_buffers[name], their_buffers[name]) for name in our_buffers)),
    }


@KINDS
@TIES
def test_float64_log_probs_and_gradients_of_a_pack_equal_separate_plain_ones(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, tie: bool
) -> None:
    path = tiny_folder(kind, tie_word_embeddings=tie, dtype=torch.float64)
    # nothing is recomputed: a function mode is off inside the calls it sees, and backward is one
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 0.7)
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12 and found["buffers"] == 0, found


FOUR_RANKS = ("qwen3", "qwen3_moe", "gemma3_text")  # plain, experts, windows; the rest of a model knows no ranks
SHARED_PACKS = [
    *((kind, "all_gather", 2) for kind in ARCHITECTURES),
    *((kind, strategy, 4) for kind in FOUR_RANKS for strategy in ("ring", "ulysses", "all_gather")),
]


@pytest.mark.parametrize("kind, strategy, cp", SHARED_PACKS)
def test_float64_log_probs_and_gradients_of_a_pack_shared_by_cp_ranks_equal_separate_plain_ones(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, strategy: str, cp: int
) -> None:
    path = tiny_folder(kind, dtype=torch.float64)
    run = (cp, differences_of_rank, path, torch.float64, False, 0.7, cp, strategy)
    if strategy == "ring" and kind in WITH_WINDOWS:
        with refused(ConfigError, "attention.strategy", "ring", f"mesh.cp={cp}"):
            ranks.run(*run)
        return
    found = ranks.run(*run)[0]
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12 and found["buffers"] == 0, found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gemma2", {"layer_types": ["full_attention", "full_attention"]}),
        ("gemma3_text", {"layer_types": ["full_attention", "full_attention"]}),
        ("gpt_oss", {"layer_types": ["full_attention", "full_attention"]}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False}),
    ],
)
def test_a_model_without_its_windows_can_use_the_ring(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, changes: dict[str, Any]
) -> None:
    path = tiny_folder(kind, dtype=torch.float64, **changes)
    found = ranks.run(2, differences_of_rank, path, torch.float64, False, 1.0, 2, "ring")[0]
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12 and found["buffers"] == 0, found


@KINDS
def test_float32_log_probs_and_gradients_of_a_recomputed_pack_shared_by_cp_ranks_equal_separate_plain_ones(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str
) -> None:
    path = tiny_folder(kind, tie_word_embeddings=True)
    found = ranks.run(2, differences_of_rank, path, torch.float32, True, 1.0, 2)[0]
    assert found["log_probs"] <= 1e-5 and found["gradients"] <= 1e-4 and found["buffers"] == 0, found


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_scaled_rotary_frequencies_equal_plain_ones(tiny_folder: TinyFolder, ranks: RankPool, rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type != "linear":
        rope["original_max_position_embeddings"] = 32  # shorter than the longest sample
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = tiny_folder("llama", rope_parameters=rope, dtype=torch.float64)
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 1.0)
    assert found["log_probs"] <= 1e-12 and found["buffers"] == 0, found


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_ranks_without_a_token_and_experts_that_none_visits_have_gradients_of_zeros(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str
) -> None:
    # two tokens over four ranks; each layer's two tokens visit at most four of its five experts
    path, shapes = tiny_folder(kind, dtype=torch.float64), ((2, 1),)
    found = ranks.run(4, differences_of_rank, path, torch.float64, True, 1.0, 4, "auto", shapes)[0]
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12, found


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        # noise and extra losses of training: none of them belongs to the policy
        ("qwen3", {"attention_dropout": 0.1}),
        ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
        ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}),
        ("mixtral", {"router_jitter_noise": 0.3, "output_router_logits": True, "router_aux_loss_coef": 10.0}),
        ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 10.0}),
        # other shapes of the same model
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"scale_attn_weights": False, "initializer_range": 0.05}),
        ("glm4", {"attention_bias": False}),
        ("phi3", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ],
)
def test_variants_of_an_architecture_equal_plain_ones(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, changes: dict[str, Any]
) -> None:
    path = tiny_folder(kind, dtype=torch.float64, **changes)
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 1.0)
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12 and found["buffers"] == 0, found


def bfloat16_errors_of_rank(rank: int, path: Path) -> tuple[float, float]:
    """RMS error of log-probs in bfloat16, ours and plain Hugging Face's, against float32; gradients must be float32."""
    mesh, batch, order = build_mesh(1, 1, CPU), some_batch(), [3, 1, 0, 5, 4, 2]
    policy = load_policy(read_model_folder(path), mesh, Parallelism(torch.bfloat16, torch.float32))
    ours = packed_log_probs(policy, batch, order, mesh)
    ours.sum().backward()
    for name, parameter in policy.named_weights():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert isinstance(parameter.grad, DTensor) and torch.isfinite(parameter.grad.to_local()).all(), name
    with torch.no_grad():
        exact, plain = (
            separate_log_probs(plain_model(path, dtype), batch).float() for dtype in (torch.float32, torch.bfloat16)
        )
    return tuple(float((log_probs - exact).square().mean().sqrt()) for log_probs in (ours.detach(), plain))  # type: ignore[return-value]


@KINDS
def test_bfloat16_errs_no_more_than_plain_bfloat16(tiny_folder: TinyFolder, ranks: RankPool, kind: str) -> None:
    ((ours, plain),) = ranks.run(1, bfloat16_errors_of_rank, tiny_folder(kind))
    assert 0 < ours <= 1.25 * plain, (ours, plain)


def isolation_of_rank(rank: int, path: Path) -> list[tuple[bool, bool]]:
    """For each sample: whether changing its tokens changed its own log-probs, and whether it changed any other's."""
    mesh, batch = build_mesh(1, 1, CPU), some_batch()
    policy = load(path, mesh, torch.float32)
    everyone = list(range(len(SHAPES)))
    found = []
    with torch.no_grad():
        before = packed_log_probs(policy, batch, everyone, mesh)
        for changed in everyone:
            samples = batch.to_samples()
            tokens = (np.array(samples[changed]["tokens"]) + 1) % SIZES["vocab_size"]
            samples[changed]["tokens"] = tokens.tolist()
            after = packed_log_probs(policy, RolloutBatch.from_samples(samples), everyone, mesh)
            own = torch.zeros(len(before), dtype=torch.bool)
            start = sum(response for _, response in SHAPES[:changed])
            own[start : start + SHAPES[changed][1]] = True
            differs = before != after
            found.append((bool(differs[own].all()), bool(differs[~own].any())))
    return found


@KINDS
def test_changing_one_sample_of_a_pack_changes_no_bit_of_the_others(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str
) -> None:
    (found,) = ranks.run(1, isolation_of_rank, tiny_folder(kind))
    assert found == [(True, False)] * len(SHAPES)


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, "grouped_mm"), (torch.float64, "eager")])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_one_grouped_product_where_torch_has_one(
    tiny_folder: TinyFolder, kind: str, dtype: torch.dtype, expected: str
) -> None:
    policy = build_policy(read_model_folder(tiny_folder(kind)), dtype)
    assert policy.hf.config._experts_implementation == expected


@pytest.mark.parametrize("sizes", [{"moe_intermediate_size": 20}, {"hidden_size": 36}])
def test_experts_whose_rows_a_grouped_product_cannot_read_train_in_bfloat16(
    tiny_folder: TinyFolder, sizes: dict[str, int]
) -> None:
    policy = build_policy(read_model_folder(tiny_folder("qwen3_moe", **sizes)), torch.float32)
    experts = policy.decoder_layers()[0].mlp.experts.to_empty(device="cpu").to(torch.bfloat16)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    hidden = torch.randn(6, policy.hf.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.tensor([[0, 1]] * 6)
    experts(hidden, chosen, torch.ones(6, 2, dtype=torch.bfloat16)).sum().backward()
    assert all(parameter.grad is not None and parameter.grad[:2].any() for parameter in experts.parameters())
