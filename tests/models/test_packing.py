"""Packed log-probs and gradients equal those of plain Hugging Face on every sample alone, for every supported model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slimefsdp.attention.plan import attention_plan
from slimefsdp.data.layout import zigzag_layout
from slimefsdp.data.pack import local_share, pack
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.models.folder import SUPPORTED_MODELS, read_model_folder
from slimefsdp.models.load import load_policy
from slimefsdp.models.policy import PolicyModel
from slimefsdp.parallel.mesh import build_mesh
from tests.float64 import KeepFloat64
from tests.rank_pool import RankPool
from tests.tiny_models import ARCHITECTURES, SIZES, save_tiny_model

CPU = torch.device("cpu")
# (tokens, response tokens): the shortest there is, around the window of 8, and longer than a band of 64
SHAPES = ((30, 10), (2, 1), (9, 3), (150, 140), (8, 7), (7, 1))
TIES = pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
KINDS = pytest.mark.parametrize("kind", ARCHITECTURES)


def some_batch(seed: int = 0) -> RolloutBatch:
    rng = np.random.default_rng(seed)
    samples = [
        {"tokens": rng.integers(0, SIZES["vocab_size"], length).tolist(), "response_length": response}
        for length, response in SHAPES
    ]
    samples[0]["tokens"][-1] = 0  # a response that ends in the padding id
    return RolloutBatch.from_samples(samples)


def load(path: Path, dtype: torch.dtype, *, checkpointing: bool = False) -> PolicyModel:
    folder = read_model_folder(path)
    mesh = build_mesh(1, 1, CPU).flat
    return load_policy(
        folder, mesh, compute_dtype=dtype, master_dtype=dtype, device=CPU, activation_checkpointing=checkpointing
    )


def packed_log_probs(
    policy: PolicyModel, batch: RolloutBatch, order: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[R] in the batch's order, all samples in one pack."""
    packed = pack(batch, np.array(order), trained_only=False)
    share = local_share(packed, zigzag_layout(packed.cu_seqlens, 1), 0)
    plan = attention_plan(share.pieces, CPU)
    log_probs, _ = policy(share.tokens, share.positions, plan, share.rows, share.targets, temperature=temperature)
    return log_probs.new_zeros(batch.num_response_tokens).index_put((packed.response_index,), log_probs)


def separate_log_probs(hf: Any, batch: RolloutBatch, temperature: float = 1.0) -> torch.Tensor:
    """[R], one plain forward a sample."""
    parts = []
    for sample in batch.to_samples():
        tokens = torch.as_tensor(np.array(sample["tokens"]))
        log_probs = (hf(tokens[None]).logits[0] / temperature).log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        parts.append(log_probs[-sample["response_length"] :])
    return torch.cat(parts)


def differences_of_rank(
    rank: int, path: Path, dtype: torch.dtype, checkpointing: bool, temperature: float
) -> dict[str, float]:
    """Largest differences of log-probs, of gradients relative to their own scale, and of buffers."""
    batch, order = some_batch(), [3, 1, 0, 5, 4, 2]
    weights = torch.randn(batch.num_response_tokens, dtype=dtype, generator=torch.Generator().manual_seed(1))
    with KeepFloat64() if dtype == torch.float64 else nullcontext():
        policy = load(path, dtype, checkpointing=checkpointing)
        runs: list[str] = []
        policy.decoder_layers()[0].input_layernorm.register_forward_hook(lambda *_: runs.append("layer"))
        hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        ours = packed_log_probs(policy, batch, order, temperature)
        theirs = separate_log_probs(hf, batch, temperature)
        (ours * weights).sum().backward()
        (theirs * weights).sum().backward()
    assert ours.dtype == theirs.dtype == dtype and policy.training
    assert len(runs) == 1 + checkpointing  # a recomputed layer runs again in backward
    theirs_by_name = dict(hf.named_parameters())
    ours_by_name = dict(policy.named_weights())
    assert ours_by_name.keys() == theirs_by_name.keys()
    # a key's bias has no gradient under softmax: what is left is rounding, small against every other one's scale
    floor = 1e-3 * max(float(parameter.grad.abs().max()) for parameter in theirs_by_name.values())
    gradient = 0.0
    for name, parameter in ours_by_name.items():
        assert isinstance(parameter.grad, DTensor), name
        expected = theirs_by_name[name].grad
        error = (parameter.grad.full_tensor() - expected).abs().max()
        gradient = max(gradient, float(error / expected.abs().max().clamp(min=floor)))
    their_buffers = dict(hf.named_buffers(remove_duplicate=False))
    our_buffers = dict(policy.hf.named_buffers(remove_duplicate=False))
    assert our_buffers.keys() == their_buffers.keys()
    return {
        "log_probs": float((ours - theirs).detach().abs().max()),
        "gradients": gradient,
        "buffers": float(sum(not torch.equal(our_buffers[name], their_buffers[name]) for name in our_buffers)),
    }


def test_every_supported_architecture_is_tested_here() -> None:
    assert set(ARCHITECTURES) == set(SUPPORTED_MODELS)


@KINDS
@TIES
@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "recomputed"])
def test_float32_log_probs_and_gradients_of_a_pack_equal_separate_plain_ones(
    tmp_path: Path, ranks: RankPool, kind: str, tie: bool, checkpointing: bool
) -> None:
    path = save_tiny_model(tmp_path, kind, tie_word_embeddings=tie)
    (found,) = ranks.run(1, differences_of_rank, path, torch.float32, checkpointing, 1.0)
    assert found["log_probs"] <= 1e-5 and found["gradients"] <= 1e-4 and found["buffers"] == 0, found


@KINDS
@TIES
def test_float64_log_probs_and_gradients_of_a_pack_equal_separate_plain_ones(
    tmp_path: Path, ranks: RankPool, kind: str, tie: bool
) -> None:
    path = save_tiny_model(tmp_path, kind, tie_word_embeddings=tie, dtype=torch.float64)
    # nothing is recomputed: a function mode is off inside the calls it sees, and backward is one
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 0.7)
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12 and found["buffers"] == 0, found


def test_the_final_soft_cap_of_gemma_is_applied(tmp_path: Path, ranks: RankPool) -> None:
    path = save_tiny_model(tmp_path, "gemma3_text", final_logit_softcapping=2.0, dtype=torch.float64)
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 0.7)
    assert found["log_probs"] <= 1e-12 and found["gradients"] <= 1e-12, found


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_scaled_rotary_frequencies_equal_plain_ones(tmp_path: Path, ranks: RankPool, rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    if rope_type != "linear":
        rope["original_max_position_embeddings"] = 32  # shorter than the longest sample
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    path = save_tiny_model(tmp_path, "llama", rope_parameters=rope, dtype=torch.float64)
    (found,) = ranks.run(1, differences_of_rank, path, torch.float64, False, 1.0)
    assert found["log_probs"] <= 1e-12 and found["buffers"] == 0, found


def isolation_of_rank(rank: int, path: Path) -> list[tuple[bool, bool]]:
    """For each sample: whether changing its tokens changed its own log-probs, and whether it changed any other's."""
    policy, batch = load(path, torch.float32), some_batch()
    everyone = list(range(len(SHAPES)))
    found = []
    with torch.no_grad():
        before = packed_log_probs(policy, batch, everyone)
        for changed in everyone:
            samples = batch.to_samples()
            tokens = (np.array(samples[changed]["tokens"]) + 1) % SIZES["vocab_size"]
            samples[changed]["tokens"] = tokens.tolist()
            after = packed_log_probs(policy, RolloutBatch.from_samples(samples), everyone)
            own = torch.zeros(len(before), dtype=torch.bool)
            start = sum(response for _, response in SHAPES[:changed])
            own[start : start + SHAPES[changed][1]] = True
            differs = before != after
            found.append((bool(differs[own].all()), bool(differs[~own].any())))
    return found


@KINDS
def test_changing_one_sample_of_a_pack_changes_no_bit_of_the_others(tmp_path: Path, ranks: RankPool, kind: str) -> None:
    (found,) = ranks.run(1, isolation_of_rank, save_tiny_model(tmp_path, kind))
    assert found == [(True, False)] * len(SHAPES)
