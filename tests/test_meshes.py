"""The promise on whole meshes: any mesh, strategy, packing and batch gives the gradients of one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from slimefsdp.algorithms.objective import MetricSums, TokenInputs
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.errors import SlimeError
from slimefsdp.models.build import build_policy, materialise
from slimefsdp.trainer import Trainer
from slimefsdp.training import build
from slimefsdp.training import plan as plan_module
from slimefsdp.training.advantages import response_advantages
from slimefsdp.training.packs import PassOptions, RankPacks, accumulate_gradients, micro_batches, objective_for
from tests.support import tiers
from tests.support.all_pairs import all_pairs
from tests.support.comparisons import (
    error_norm,
    largest_difference,
    plain_gradients,
    trainer_gradients,
)
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import TEMPERATURE, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, plain_model

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case
STRATEGIES = ("ring", "ulysses", "all_gather")


def mesh(dp_replicate: int, dp: int, cp: int, strategy: str = "auto") -> dict[str, Any]:
    return {
        "mesh": {"dp_replicate": dp_replicate, "dp": dp, "cp": cp},
        "attention": {"strategy": strategy},
    }


@pytest.mark.parametrize(
    ("axes", "strategy", "max_tokens"),
    all_pairs(((1, 1, 2), (1, 2, 2), (1, 1, 4)), STRATEGIES, (20, 512)),
)
def test_gradients_with_context_parallelism_equal_a_plain_step_in_float64(
    folder: Path, ranks: RankPool, strategy: str, axes: tuple[int, int, int], max_tokens: int
) -> None:
    config = settings(folder, **mesh(*axes, strategy), batch={"max_tokens_per_rank": max(max_tokens, 40 // axes[2])})
    batch = make_batch(folder)
    plain = plain_gradients(folder, config, batch, torch.float64)
    assert max(g.abs().max().item() for g in plain.values()) > 0.05
    for ours in ranks.run(config.ranks, trainer_gradients, config, batch):
        assert largest_difference(ours, plain) <= 1e-12


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    """Samples of 2 tokens and more, any response, any mask with something in it, groups with and without variance."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    samples = []
    for index in range(2 * draw(st.integers(1, 4))):  # groups of two
        length = draw(st.integers(2, 12) | st.integers(2, 60))
        response = draw(st.integers(1, length - 1))
        mask = rng.random(response) < draw(st.sampled_from([0.2, 0.8, 1.0]))
        if index == 0:
            mask[-1] = True
        samples.append(
            {
                "tokens": rng.integers(0, 97, length).tolist(),
                "response_length": response,
                "reward": float(rng.integers(0, 3)),
                "group_id": index // 2,
                "loss_mask": mask.tolist(),
                "old_log_probs": -rng.random(response) * 6,
                "ref_log_probs": -rng.random(response) * 6,
            }
        )
    return RolloutBatch.from_samples(samples)


@pytest.mark.slow  # every mesh of four ranks
@hypothesis_settings(max_examples=16, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    batch=batches(),
    axes=st.sampled_from([(1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2), (1, 1, 4)]),
    strategy=st.sampled_from(STRATEGIES),
    spare_tokens=st.integers(0, 100),
    sharding=st.sampled_from(["full", "keep_parameters", "optimizer", "replicate"]),
)
def test_any_batch_on_any_mesh_gives_the_gradients_of_one_plain_process(
    folder: Path,
    ranks: RankPool,
    batch: RolloutBatch,
    axes: tuple[int, int, int],
    strategy: str,
    spare_tokens: int,
    sharding: str,
) -> None:
    if strategy == "ulysses" and axes[2] == 3:
        strategy = "ring"  # 4 heads
    budget = -(-(int(batch.lengths.max()) + spare_tokens) // axes[2])
    sections = mesh(*axes, strategy) | {"fsdp": {"sharding": sharding}}
    config = settings(folder, **sections, batch={"max_tokens_per_rank": max(2, budget)})
    truth = plain_gradients(folder, config, batch, torch.float64)
    scale = max(1.0, max(g.abs().max().item() for g in truth.values()))
    for ours in ranks.run(config.ranks, trainer_gradients, config, batch):
        assert largest_difference(ours, truth) <= 1e-12 * scale


@pytest.mark.parametrize("axes", [(1, 1, 2), (2, 1, 2), (1, 1, 4)], ids=str)
def test_float32_with_context_parallelism_is_as_exact_as_a_plain_float32_step(
    folder: Path, ranks: RankPool, axes: tuple[int, int, int]
) -> None:
    config = settings(folder, **mesh(*axes), precision={"compute_dtype": "float32"})
    batch = make_batch(folder)
    truth = plain_gradients(folder, config, batch, torch.float64)
    plain = plain_gradients(folder, config, batch, torch.float32)
    ours = ranks.run(config.ranks, trainer_gradients, config, batch)[0]
    assert error_norm(ours, truth) <= 1.5 * error_norm(plain, truth)


def difference_from_unsharded(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[float, float]:
    """One FSDP2 rank against the same module without FSDP: the same micro-batches, gradients compared bit for bit."""
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    bare = build_policy(trainer.folder, build.master_dtype(config))
    materialise(bare, CPU)
    with torch.no_grad():
        for (_, target), (_, source) in zip(bare.named_weights(), trainer.policy.named_weights(), strict=True):
            target.copy_(source.full_tensor())
    plan = plan_module.plan_everything(config, batch, trainer.policy.attention.cost, data_ranks=1)
    weights = plan_module.loss_weights(config, batch, np.arange(batch.num_samples))
    inputs = TokenInputs(
        weights=torch.from_numpy(weights),
        sample_ids=torch.from_numpy(batch.sample_ids),
        num_samples=batch.num_samples,
        advantages=torch.from_numpy(response_advantages(config, batch)),
        old_log_probs=torch.tensor(batch.old_log_probs),
        ref_log_probs=torch.tensor(batch.ref_log_probs),
    )
    accumulate_gradients(
        bare,
        RankPacks(batch, plan.updates[0][0]),
        inputs,
        objective_for(config, "policy", config.loss.kl_coefficient),
        build_mesh(1, 1, CPU),
        PassOptions(temperature=config.rollout.temperature, entropy_grad=True),
    )
    gradients = {name: parameter.grad.full_tensor() for name, parameter in trainer.policy.named_weights()}
    assert len(plan.updates[0][0]) > 1
    return largest_difference({name: p.grad for name, p in bare.named_weights()}, gradients), max(
        g.abs().max().item() for g in gradients.values()
    )


@pytest.mark.parametrize(("kind", "tie", "dtype"), all_pairs(("qwen3", "llama"), (False, True), ("float32", "float64")))
def test_one_fsdp_rank_differs_from_the_bare_module_in_no_bit(
    tiny_folder: TinyFolder, ranks: RankPool, dtype: str, kind: str, tie: bool
) -> None:
    path = tiny_folder(kind, vocab_size=97, intermediate_size=55, tie_word_embeddings=tie)
    config = settings(path, precision={"compute_dtype": dtype}, batch={"max_tokens_per_rank": 64})
    ((difference, largest),) = ranks.run(1, difference_from_unsharded, config, make_batch(path))
    assert difference == 0.0 and largest > 0.05


class SequenceRatios:
    """A loss of whole sequences, as GSPO's: each sample's geometric mean of ratios, times its number from 1."""

    def __call__(self, outputs: torch.Tensor, inputs: TokenInputs, sums: MetricSums) -> torch.Tensor:
        assert inputs.old_log_probs is not None
        log_ratios = outputs[0] - inputs.old_log_probs
        losses = [
            (sample + 1) * log_ratios[inputs.sample_ids == sample].mean().exp() for sample in inputs.sample_ids.unique()
        ]
        return torch.stack(losses).sum() if losses else log_ratios.sum() * 0


def gradients_of_sequence_ratios(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        plan = plan_module.plan_everything(config, batch, data_ranks=trainer.mesh.data_ranks)
        inputs = TokenInputs(
            weights=torch.ones(batch.num_response_tokens),  # this loss weighs by itself
            sample_ids=torch.from_numpy(batch.sample_ids),
            num_samples=batch.num_samples,
            old_log_probs=torch.tensor(batch.old_log_probs),
        )
        accumulate_gradients(
            trainer.policy,
            RankPacks(batch, plan.updates[0][trainer.mesh.data_rank]),
            inputs,
            SequenceRatios(),
            trainer.mesh,
            PassOptions(temperature=config.rollout.temperature),
        )
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}


@pytest.mark.parametrize("axes", [(1, 1, 2), (1, 1, 4), (1, 2, 2)], ids=str)
def test_a_loss_of_whole_sequences_is_the_same_formula_when_ranks_share_packs(
    folder: Path, ranks: RankPool, axes: tuple[int, int, int]
) -> None:
    config, batch = settings(folder, **mesh(*axes, "ring")), make_batch(folder)
    with KeepFloat64():
        model = plain_model(folder, torch.float64)
        for number, sample in enumerate(batch.to_samples(), start=1):
            tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
            table = (model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)[-length:]
            ratios = table.gather(-1, tokens[-length:, None])[:, 0] - torch.tensor(sample["old_log_probs"])
            (number * ratios[torch.tensor(sample["loss_mask"])].mean().exp()).backward()
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    scale = max(g.abs().max().item() for g in truth.values())
    assert scale > 0.05
    for ours in ranks.run(config.ranks, gradients_of_sequence_ratios, config, batch):
        assert largest_difference(ours, truth) <= 1e-12 * max(1.0, scale)


def twenty_updates(rank: int, config: RunConfig, path: Path) -> tuple[str, int, int]:
    trainer = Trainer(config, device=CPU)
    for step in range(20):
        trainer.forward_backward(make_batch(path, seed=step))
        trainer.optimizer_step()
    report = trainer.check_sync()
    held = len(list(trainer.policy.parameters()))
    return "" if report.is_in_sync else str(report), report.checked - 2 * held, trainer.updates_taken


@pytest.mark.parametrize(
    "sections",
    [mesh(2, 1, 2), mesh(1, 1, 4) | {"fsdp": {"sharding": "replicate"}}, mesh(2, 1, 2, "ulysses")],
    ids=["copies of a shard", "whole on every cp rank", "copies, by Ulysses"],
)
def test_ranks_that_share_a_pack_never_drift_over_twenty_updates(
    folder: Path, ranks: RankPool, sections: dict[str, Any]
) -> None:
    config = settings(folder, **sections, precision={"compute_dtype": "bfloat16"})
    for difference, beyond_weights_and_moments, updates in ranks.run(4, twenty_updates, config, folder):
        assert not difference and updates == 20 and beyond_weights_and_moments > 0, difference


def rms_errors(rank: int, config: RunConfig, path: Path, seeds: int) -> list[dict[str, torch.Tensor]]:
    trainer = Trainer(config, device=CPU)
    found = []
    for seed in range(seeds):
        trainer.forward_backward(make_batch(path, seed=seed))
        found.append({name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()})
        trainer.updater.optimizer.zero_grad()
    return found


def test_bfloat16_over_ranks_is_as_close_to_float64_as_on_one_process(folder: Path, ranks: RankPool) -> None:
    seeds = 10 if tiers.is_whole else 4
    truth = [
        plain_gradients(folder, settings(folder), make_batch(folder, seed=seed), torch.float64) for seed in range(seeds)
    ]

    def rms(sections: dict[str, Any]) -> float:
        config = settings(folder, **sections, precision={"compute_dtype": "bfloat16"})
        found = ranks.run(config.ranks, rms_errors, config, folder, seeds)[0]
        squares = [error_norm(ours, exact) ** 2 for ours, exact in zip(found, truth, strict=True)]
        return float(np.mean(squares)) ** 0.5

    alone = rms(mesh(1, 1, 1))
    for strategy in STRATEGIES:
        assert rms(mesh(1, 1, 4, strategy)) <= 1.1 * alone, strategy


def attention_ranks_without_tokens(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[int, bool]:
    """How many local tokens the rank has in the batch's only pack, and whether its gradients are all there."""
    trainer = Trainer(config, device=CPU)
    packs = RankPacks(batch, [np.arange(batch.num_samples)])
    (micro_batch,) = micro_batches(packs, trainer.policy.attention, trainer.mesh, trained_only=True)
    trainer.forward_backward(batch)
    dist.barrier()
    return len(micro_batch.share.tokens), all(p.grad is not None for p in trainer.policy.parameters())


@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe", "gpt_oss"])
def test_a_rank_without_a_single_token_keeps_step(tiny_folder: TinyFolder, ranks: RankPool, kind: str) -> None:
    path = tiny_folder(kind, dtype=torch.float64)
    batch = RolloutBatch.from_samples(
        [{"tokens": [5, 6, 7], "response_length": 2, "advantages": np.ones(2), "old_log_probs": -np.ones(2)}]
    )
    loss = {"kl_coefficient": 0.0}
    config = settings(path, **mesh(1, 1, 4), loss=loss)
    found = ranks.run(4, attention_ranks_without_tokens, config, batch)
    assert sum(tokens for tokens, _ in found) == 3 and any(tokens == 0 for tokens, _ in found)
    assert all(complete for _, complete in found)
    with KeepFloat64():
        truth = plain_gradients_of_logits(path, batch)
    for ours in ranks.run(4, trainer_gradients, config, batch):
        assert largest_difference(ours, truth) <= 1e-12


def plain_gradients_of_logits(path: Path, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    """The policy loss of one sample by plain Hugging Face."""
    model = plain_model(path, torch.float64)
    tokens = torch.tensor(batch.tokens)
    log_probs = (model(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
    table = log_probs[-2:]
    chosen = table.gather(-1, tokens[-2:, None])[:, 0]
    ratio = (chosen - torch.tensor(batch.old_log_probs)).exp()
    surrogate = -torch.minimum(ratio, ratio.clamp(0.9, 1.15))
    entropy = -(table.exp() * table).sum(-1)
    (surrogate - 0.05 * entropy).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def refusal_of_rank(rank: int, config: RunConfig) -> tuple[str, str | None, int]:
    """The error that building a Trainer ends with, and how many weights were read before it."""
    from unittest.mock import patch

    with patch("slimefsdp.models.build.read_weights") as reading:
        try:
            Trainer(config, device=CPU)
        except SlimeError as error:
            return f"{type(error).__name__}: {error}", error.field, reading.call_count
    return "no error", None, reading.call_count


@pytest.mark.parametrize(
    ("kind", "changes", "sections", "field", "message"),
    [
        ("qwen3", {}, mesh(1, 3, 1), "mesh.dp", "mesh.dp=3 x mesh.cp=1 needs 3 ranks, but 4 were started"),
        ("qwen3", {}, mesh(2, 1, 1), "mesh.dp", "mesh.dp_replicate=2 x mesh.dp=1 x mesh.cp=1 needs 2 ranks, but 4"),
        ("qwen3", {"num_attention_heads": 6}, mesh(1, 1, 4, "ulysses"), "attention.strategy", "6 attention heads"),
        ("mistral", {}, mesh(1, 2, 2, "ring"), "attention.strategy", "cannot express sliding windows"),
        ("gpt_oss", {}, mesh(1, 2, 2, "ring_flash_attn"), "attention.strategy", "no attention sinks"),
        ("gemma2", {}, mesh(1, 2, 2, "ring_flash_attn"), "attention.strategy", "no attention soft-cap"),
        ("qwen3", {}, mesh(1, 2, 2, "ring_flash_attn"), "attention.strategy", "flash-attn is not installed"),
    ],
)
def test_a_mesh_that_cannot_serve_is_one_typed_error_on_all_ranks_before_any_weight_is_read(
    tiny_folder: TinyFolder,
    ranks: RankPool,
    kind: str,
    changes: dict[str, Any],
    sections: dict[str, Any],
    field: str,
    message: str,
) -> None:
    path = tiny_folder(kind, **changes)
    for error, named, read in ranks.run(4, refusal_of_rank, settings(path, **sections)):
        assert error.startswith("ConfigError") and message in error and named == field and read == 0, error
