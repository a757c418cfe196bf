"""The KL to the reference as a part of training: in the loss or in the reward, estimated or exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import TEMPERATURE, make_batch
from tests.support.plain_step import settings as float64_settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import plain_model, save_pair
from tests.support.trainers import CPU, MESHES, fresh_batch, ranks_of, settings, step_and_updates

every_mesh = pytest.mark.parametrize("mesh", MESHES)
SPREADS: dict[str, dict[str, Any]] = {
    "copies of context shards": {"mesh": {"dp_replicate": 2, "cp": 2}},
    "kept from forward to backward": {"mesh": {"dp": 2}, "fsdp": {"sharding": "keep_parameters"}},
    "whole on every rank": {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}},
    "both on the host": {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}, "reference": {"offload": "fsdp"}},
    "reference never asleep, layers recomputed": {
        "mesh": {"dp": 2},
        "reference": {"offload": "none"},
        "model": {"activation_checkpointing": "full"},
    },
}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("models"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("untied"))


# ---------------------------------------------------------------------- gradients against a plain step


def estimate(kind: str, table: torch.Tensor, ref_table: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The KL of each token from the log-probs of the whole vocabulary, [tokens, vocab] of policy and reference."""
    if kind == "full":
        return (table.exp() * (table - ref_table)).sum(-1)
    log_probs, ref_log_probs = (which.gather(-1, picked)[:, 0] for which in (table, ref_table))
    ratio = (ref_log_probs - log_probs).exp()
    return {"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log(), "abs": ratio.log().abs()}[
        kind
    ]


def plain_gradients(config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], float]:
    """Gradients of one update, and the mean KL of its trained tokens: separate forwards of both models."""
    assert config.model.path is not None and config.reference.path is not None
    loss, samples = config.loss, batch.to_samples()
    with KeepFloat64():
        model, reference = (plain_model(path, torch.float64) for path in (config.model.path, config.reference.path))
        tables = []
        for sample in samples:
            tokens, response = torch.as_tensor(np.array(sample["tokens"])), sample["response_length"]
            table, ref_table = (
                (which(input_ids=tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)[-response:]
                for which in (model, reference)
            )
            tables.append((table, ref_table.detach(), tokens[-response:, None]))
        masks = [torch.as_tensor(np.array(sample["loss_mask"])) for sample in samples]
        olds = [torch.as_tensor(np.array(sample["old_log_probs"])).double() for sample in samples]
        kls = [estimate(config.kl_estimator, *each) for each in tables]
        advantages = plain_advantages(config, batch, tables, olds, masks)
        total = torch.zeros((), dtype=torch.float64)
        for index, ((table, _, picked), old, mask, advantage) in enumerate(
            zip(tables, olds, masks, advantages, strict=True)
        ):
            ratio = (table.gather(-1, picked)[:, 0] - old).exp()
            clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            per_token = -torch.minimum(ratio * advantage, clipped * advantage)
            per_token = per_token + loss.entropy_coefficient * (table.exp() * table).sum(-1)
            kls[index] = ratio * kls[index] if config.is_kl_unbiased else kls[index]
            if loss.kl_in == "loss":
                per_token = per_token + loss.kl_coefficient * kls[index]
            total = total + per_token[mask].sum()
        (total / sum(int(mask.sum()) for mask in masks)).backward()
    trained = torch.cat([kl[mask] for kl, mask in zip(kls, masks, strict=True)]).mean().item()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, trained


def plain_advantages(config: RunConfig, batch: RolloutBatch, tables: Any, olds: Any, masks: Any) -> list[torch.Tensor]:
    """Of each response token, from rewards less the KL of the old policy where it is in the reward."""
    samples = batch.to_samples()
    rewards = []  # of each token, the sample's own at the last trained one
    for sample, (_, ref_table, picked), old, mask in zip(samples, tables, olds, masks, strict=True):
        of_tokens = torch.zeros_like(old)
        of_tokens[mask.nonzero()[-1]] = float(sample["reward"])
        if config.loss.kl_in == "reward":
            fake = old[:, None].expand_as(ref_table)  # only the picked column is read
            of_tokens -= config.loss.kl_coefficient * estimate(config.loss.kl_estimator, fake, ref_table, picked) * mask
        rewards.append(of_tokens)
    if config.estimator == "reinforce_pp":
        return [of_tokens.flip(0).cumsum(0).flip(0) for of_tokens in rewards]
    scores = torch.stack([of_tokens.sum() for of_tokens in rewards])
    found = []
    for sample, old in zip(samples, olds, strict=True):
        group = torch.tensor([other["group_id"] == sample["group_id"] for other in samples])
        score = scores[len(found)]
        found.append(((score - scores[group].mean()) / (scores[group].std() + 1e-6)).expand_as(old))
    return found


def gradients_and_kl(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], float]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        kl = trainer.forward_backward(batch)["kl_ref"]
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}, kl


def compare_with_plain(ranks: RankPool, config: RunConfig, samples: slice = slice(None)) -> None:
    batch = make_batch(Path()).replace(ref_log_probs=None)
    batch = batch.select(np.arange(batch.num_samples)[samples])
    expected, expected_kl = plain_gradients(config, batch)
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 0.05
    world = config.mesh.dp_replicate * (config.mesh.dp or 1) * config.mesh.cp
    for found, kl in ranks.run(world, gradients_and_kl, config, batch):
        assert largest_difference(found, expected) <= 1e-12
        assert abs(kl - expected_kl) <= 1e-12


@pytest.mark.parametrize(
    "mesh, entropy_coefficient", [("one rank", 0.0), ("two data ranks", 0.05), ("two context ranks", 0.05)]
)
def test_gradients_with_the_exact_kl_equal_a_plain_step_in_float64(
    folders: tuple[Path, Path], ranks: RankPool, mesh: str, entropy_coefficient: float
) -> None:
    loss = {"kl_estimator": "full", "entropy_coefficient": entropy_coefficient}
    config = float64_settings(folders[0], mesh=MESHES[mesh], loss=loss, reference={"path": str(folders[1])})
    compare_with_plain(ranks, config)


@pytest.mark.parametrize("spread", SPREADS)
def test_gradients_with_the_exact_kl_equal_a_plain_step_however_both_models_are_spread(
    pair: tuple[Path, Path], ranks: RankPool, spread: str
) -> None:
    sections = {"reference": {}, **SPREADS[spread]}
    sections["reference"] = {"path": str(pair[1]), **sections["reference"]}
    config = float64_settings(pair[0], **sections, loss={"kl_estimator": "full"})
    compare_with_plain(ranks, config)


@every_mesh
def test_gradients_with_the_exact_kl_equal_a_plain_step_under_soft_caps_and_windows(
    tmp_path: Path, ranks: RankPool, mesh: str
) -> None:
    policy, reference = save_pair(tmp_path, kind="gemma2")
    config = float64_settings(
        policy, mesh=MESHES[mesh], loss={"kl_estimator": "full"}, reference={"path": str(reference)}
    )
    compare_with_plain(ranks, config)


@pytest.mark.parametrize(
    "estimator, unbiased, mesh",
    [
        ("k1", False, "one rank"),
        ("k2", False, "two data ranks"),
        ("abs", False, "two context ranks"),
        ("k1", True, "two context ranks"),
        *(("k3", True, mesh) for mesh in MESHES),
    ],
)
def test_gradients_with_every_estimator_equal_a_plain_step_in_float64(
    pair: tuple[Path, Path], ranks: RankPool, mesh: str, estimator: str, unbiased: bool
) -> None:
    loss = {"kl_estimator": f"{estimator}_unbiased" if unbiased else estimator}
    config = float64_settings(pair[0], mesh=MESHES[mesh], loss=loss, reference={"path": str(pair[1])})
    compare_with_plain(ranks, config)


@pytest.mark.parametrize(
    "mesh, estimator, kl_estimator",
    [
        ("one rank", "grpo", "k1"),
        ("two data ranks", "reinforce_pp", "k1"),
        ("two context ranks", "reinforce_pp", "k3"),
    ],
)
def test_gradients_with_the_kl_in_the_reward_equal_a_plain_step_in_float64(
    pair: tuple[Path, Path], ranks: RankPool, mesh: str, estimator: str, kl_estimator: str
) -> None:
    config = float64_settings(
        pair[0],
        mesh=MESHES[mesh],
        advantage={"estimator": estimator, "whiten": False},
        loss={"kl_in": "reward", "kl_estimator": kl_estimator},
        reference={"path": str(pair[1])},
    )
    compare_with_plain(ranks, config)


# ---------------------------------------------------------------------- the exact KL


def full_kl(pair: tuple[Path, Path] | Path, **sections: Any) -> RunConfig:
    sections = {"reference": {}, **sections}
    if isinstance(pair, tuple):
        sections["reference"] = {"path": str(pair[1]), **sections["reference"]}
    policy = pair[0] if isinstance(pair, tuple) else pair
    return settings(policy, **sections, loss={"kl_coefficient": 0.1, "kl_estimator": "full"})


def kl_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> float:
    return Trainer(config, device=CPU).train_step(batch)["kl_ref"]


@pytest.mark.parametrize("spread", SPREADS)
def test_an_equal_reference_has_an_exact_kl_of_zero_until_the_policy_moves(
    pair: tuple[Path, Path], ranks: RankPool, spread: str
) -> None:
    world = ranks_of(SPREADS[spread]["mesh"])
    config = full_kl(pair[0], **SPREADS[spread])
    assert ranks.run(world, kl_of_a_step, config, fresh_batch()) == [0.0] * world
    in_updates = full_kl(pair[0], **SPREADS[spread], batch={"samples_per_update": 4})
    assert ranks.run(world, kl_of_a_step, in_updates, fresh_batch())[0] > 0


def kl_before_and_after_following(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[list[float], int]:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    trainer.zero_grad()
    assert trainer.reference is not None
    assert all(isinstance(parameter, DTensor) for parameter in trainer.reference.parameters())  # none is gathered
    kl = [trainer.train_step(batch)["kl_ref"] for _ in range(2)]
    trainer.update_ref()
    return [*kl, trainer.train_step(batch)["kl_ref"]], trainer.memory().reference


@pytest.mark.parametrize("offload", ["none", "fsdp", "sleep"])
def test_a_reference_that_followed_is_compared_with_its_new_weights_and_rests_between_steps(
    pair: tuple[Path, Path], ranks: RankPool, offload: str
) -> None:
    config = full_kl(pair, mesh={"dp": 2}, reference={"offload": offload})
    for (first, second, after), held in ranks.run(2, kl_before_and_after_following, config, fresh_batch()):
        assert first > 0.1 and second > 0.1 and after == 0.0
        assert (held == 0) == (offload == "sleep")


def updates_of_a_step(rank: int, config: RunConfig, batch: RolloutBatch) -> list[dict[str, float]]:
    trainer = Trainer(config, device=CPU)
    return step_and_updates(trainer, batch)[1]


@every_mesh
def test_the_exact_kl_leaves_the_first_ratio_exactly_one(pair: tuple[Path, Path], ranks: RankPool, mesh: str) -> None:
    config = full_kl(pair, mesh=MESHES[mesh], batch={"samples_per_update": 4})
    first, second = ranks.run(ranks_of(MESHES[mesh]), updates_of_a_step, config, fresh_batch())[0]
    assert first["ratio_deviation_max"] == 0.0 < second["ratio_deviation_max"]
