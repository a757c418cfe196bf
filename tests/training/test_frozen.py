"""Frozen parameters: training is that of plain PyTorch without them, and they cost no gradient, state or traffic."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError
from slimefsdp.models import fused_log_probs
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
FROZEN = {
    "the beginning": ("model.embed_tokens.*", "model.layers.0.*"),  # its outputs need no gradient
    "the end": ("model.layers.2.*", "model.norm.*", "lm_head.*"),
    "some of every unit": ("*.mlp.*", "*norm.weight"),
    "what attention reads": ("*.self_attn.[qkv]_proj.*", "lm_head.weight"),
    "all before a head": ("model.*",),
}
MESHES = {
    "one rank": (1, 1, 1),
    "dp 2": (1, 2, 1),
    "dp 4": (1, 4, 1),
    "cp 2": (1, 1, 2),
    "two copies of two shards": (2, 2, 1),
}


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    # 97 rows and 55 columns divide by no world size used here
    return tiny_folder(
        num_hidden_layers=3, vocab_size=97, intermediate_size=55
    )  # fmt: skip


def frozen_settings(
    folder: Path, patterns: tuple[str, ...], mesh: tuple[int, int, int] = (1, 1, 1), **sections: Any
) -> RunConfig:
    model = {"path": str(folder), "frozen": list(patterns), **sections.pop("model", {})}
    axes = dict(zip(("dp_replicate", "dp", "cp"), mesh, strict=True))
    return settings(folder, model=model, mesh=axes, **sections)


def ranks_of(config: RunConfig) -> int:
    return config.ranks


def is_frozen(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in trainer.policy.named_weights()}


def train(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """A step of several updates on one rank, and what is left of it."""
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        before = weights_of(trainer)
        trainer.train_step(batch)
        trainer.forward_backward(batch)
    names = {id(parameter): name for name, parameter in trainer.policy.named_weights()}
    in_sync = trainer.check_sync().is_in_sync  # reads the optimiser's state, and must leave it as it is
    return {
        "before": before,
        "after": weights_of(trainer),
        "with gradient": {name for name, p in trainer.policy.named_weights() if p.grad is not None},
        "with state": {names[id(p)] for p in trainer.updater.optimizer.state},
        "norms": set(trainer.gradient_health().group_norms),
        "description": trainer.describe(),
        "in sync": in_sync,
    }


def plain_training(folder: Path, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    plan = plan_training(config, batch)
    assert len(plan.updates) >= 4
    with KeepFloat64():
        plain = PlainStep(folder, config, torch.float64)
        plain.train(batch, plan)
    return plain.weights()


def compare(folder: Path, ranks: RankPool, config: RunConfig) -> list[dict[str, Any]]:
    """Every rank's step, whose weights are those of plain PyTorch with the same parameters frozen."""
    batch = make_batch(folder)
    plain = plain_training(folder, config, batch)
    patterns = config.model.frozen or ()
    found = ranks.run(ranks_of(config), train, config, batch)
    for ours in found:
        assert ours["after"].keys() == plain.keys() and ours["in sync"]
        moved = 0.0
        for name, weight in ours["after"].items():
            assert (weight - plain[name]).abs().max().item() <= 1e-12, name
            if is_frozen(name, patterns):
                assert torch.equal(weight, ours["before"][name]), name
            else:
                moved = max(moved, (weight - ours["before"][name]).abs().max().item())
        assert moved > 1e-2
        trained = {name for name in plain if not is_frozen(name, patterns)}
        assert ours["with gradient"] == ours["with state"] == trained
        assert {name for unit in ours["description"].units for name in unit.frozen} == plain.keys() - trained
        assert f"{len(plain) - len(trained)} of {len(plain)} tensors frozen" in str(ours["description"])
    return found


EVERYWHERE = ("the beginning", "some of every unit")
PLACES = [(what, where) for what in FROZEN for where in MESHES if what in EVERYWHERE or where == "cp 2"]


@pytest.mark.parametrize("what, where", PLACES, ids=map(", ".join, PLACES))
def test_weights_are_those_of_plain_steps_without_gradients_of_the_frozen(
    folder: Path, ranks: RankPool, what: str, where: str
) -> None:
    compare(folder, ranks, frozen_settings(folder, FROZEN[what], MESHES[where]))


BEGINNING, MIXED = FROZEN["the beginning"], FROZEN["some of every unit"]
VARIANTS: dict[str, tuple[tuple[str, ...], tuple[int, int, int], dict[str, Any]]] = {
    "recomputed, cp": (BEGINNING, (1, 1, 2), {"model": {"activation_checkpointing": "full"}}),
    "summed once": (BEGINNING, (1, 2, 1), {"fsdp": {"sharding": "optimizer"}}),
    "parameters kept, mixed": (MIXED, (1, 2, 1), {"fsdp": {"sharding": "keep_parameters"}}),
    "whole on every rank, selectively recomputed": (
        MIXED, (1, 2, 1), {"fsdp": {"sharding": "replicate"}, "model": {"activation_checkpointing": "selective"}}
    ),
    "on the host, AdamW": (
        MIXED, (1, 2, 1), {"fsdp": {"cpu_offload": True}, "optim": {"name": "adamw", "lr": 1e-2, "eps": 1e-3}}
    ),
    "small units": (BEGINNING, (1, 2, 1), {"fsdp": {"wrap": ["Qwen3Attention", "Qwen3MLP"]}}),
    "ulysses": (FROZEN["what attention reads"], (1, 1, 2), {"attention": {"strategy": "ulysses"}}),
    "fused AdamW": (MIXED, (1, 2, 1), {"optim": {"name": "adamw", "lr": 1e-2, "eps": 1e-3}}),
}  # fmt: skip


@pytest.mark.parametrize("patterns, mesh, sections", VARIANTS.values(), ids=VARIANTS)
def test_however_the_model_is_spread_and_stored(
    folder: Path, ranks: RankPool, patterns: tuple[str, ...], mesh: tuple[int, int, int], sections: dict[str, Any]
) -> None:
    compare(folder, ranks, frozen_settings(folder, patterns, mesh, **sections))


ARCHITECTURES = {
    "experts": ("qwen3_moe", ("*.experts.*", "model.embed_tokens.*"), 2),
    "a router": ("mixtral", ("*.gate.weight",), 1),
    "sinks alone in a layer": ("gpt_oss", ("model.layers.*.[im]*", "model.layers.*.p*", "*_proj.*", "model.e*"), 2),
    "keys of sinks": ("gpt_oss", ("*.self_attn.[qkv]_proj.*",), 1),
    "Conv1D": ("gpt2", ("transformer.w?e.*", "*.c_attn.*"), 2),
    "windows": ("gemma2", ("*.self_attn.*",), 2),
}


@pytest.mark.parametrize("kind, patterns, cp", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_in_other_architectures(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, patterns: tuple[str, ...], cp: int
) -> None:
    folder = tiny_folder(kind)
    compare(folder, ranks, frozen_settings(folder, patterns, (1, 3 - cp, cp)))


@pytest.mark.parametrize("pattern", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_embedding_is_frozen_under_either_name(tiny_folder: TinyFolder, ranks: RankPool, pattern: str) -> None:
    folder = tiny_folder(tie_word_embeddings=True)
    batch = make_batch(folder)
    # plain PyTorch knows the tied tensor by one name
    plain = plain_training(folder, frozen_settings(folder, ("model.embed_tokens.weight",)), batch)
    (ours,) = ranks.run(1, train, frozen_settings(folder, (pattern,)), batch)
    assert "model.embed_tokens.weight" not in ours["with state"] and "lm_head.weight" not in ours["after"]
    assert all((ours["after"][name] - plain[name]).abs().max() <= 1e-12 for name in plain)
    assert torch.equal(ours["before"]["model.embed_tokens.weight"], ours["after"]["model.embed_tokens.weight"])


# ---------------------------------------------------------------------- what they cost


class Counting:
    """Stands for `torch.distributed` in FSDP's collectives, and counts the bytes that go into reductions."""

    def __init__(self) -> None:
        self.scattered = self.summed = 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(torch.distributed, name)
        if name.startswith("reduce_scatter"):

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.scattered += kwargs["input"].nbytes
                return real(*args, **kwargs)

            return counted
        if name == "all_reduce":

            def summed(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self.summed += tensor.nbytes
                return real(tensor, *args, **kwargs)

            return summed
        return real  # fmt: skip


def bytes_of_one_backward(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, int]:
    trainer = Trainer(config, device=CPU)
    added: list[bool] = []
    counting, add_product = Counting(), fused_log_probs._add_product
    head_shape = dict(trainer.policy.named_weights())["lm_head.weight"].shape
    real = _fsdp_collectives.dist

    def noticed(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
        if total.shape == head_shape:
            added.append(True)
        add_product(left, right, total)

    try:
        _fsdp_collectives.dist, fused_log_probs._add_product = counting, noticed
        trainer.forward_backward(batch)
    finally:
        _fsdp_collectives.dist, fused_log_probs._add_product = real, add_product
    shards = trainer.mesh.shard_group.size()
    padded = sum(
        -(-p.shape[0] // shards) * shards * p[0].numel() * p.itemsize for _, p in trainer.policy.trained_weights()
    )
    whole = sum(
        -(-p.shape[0] // shards) * shards * p[0].numel() * p.itemsize for _, p in trainer.policy.named_weights()
    )
    return {
        "trained": padded,
        "whole": whole,
        "shards": shards,
        "reduce_scatter": counting.scattered,
        "all_reduce": counting.summed,
        "gradients": sum(p.grad.to_local().nbytes for p in trainer.policy.parameters() if p.grad is not None),
        "trained shards": sum(p.to_local().nbytes for _, p in trainer.policy.trained_weights()),
        "head gradients": len(added),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("patterns", "mesh"), [*((patterns, (1, 2, 1)) for patterns in FROZEN.values()), (FROZEN["the end"], (2, 2, 1))]
)
def test_only_trained_parameters_travel_and_have_gradients(
    folder: Path, ranks: RankPool, patterns: tuple[str, ...], mesh: tuple[int, int, int]
) -> None:
    config = frozen_settings(folder, patterns, mesh, batch={"max_tokens_per_rank": 512})  # one micro-batch a rank
    for found in ranks.run(ranks_of(config), bytes_of_one_backward, config, make_batch(folder)):
        assert found["reduce_scatter"] == found["trained"] < found["whole"]
        assert found["all_reduce"] == (found["trained"] // found["shards"] if mesh[0] > 1 else 0)
        assert found["gradients"] == found["trained shards"]
        assert (found["head gradients"] == 0) == is_frozen("lm_head.weight", patterns)


# ---------------------------------------------------------------------- float16


# ---------------------------------------------------------------------- all weights, frozen ones too


def kept_and_sent(rank: int, config: RunConfig, batch: RolloutBatch, export: Path) -> dict[str, bool]:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(batch)
    trainer.save(1)
    expected = weights_of(trainer)
    trainer.export_hf(export)
    trainer.update_ref()
    trainer.wake_up()
    assert trainer.reference is not None
    reference = {name: p.full_tensor() for name, p in trainer.reference.named_weights()}
    again = Trainer(config, device=CPU)
    for parameter in again.policy.parameters():
        parameter.data.zero_()
    again.load(1)
    again.train_step(batch)
    trainer.train_step(batch)
    resumed, straight = weights_of(again), weights_of(trainer)
    return {
        "reference": all(torch.equal(reference[name], weight) for name, weight in expected.items()),
        "reference trains": any(p.requires_grad for p in trainer.reference.parameters()),
        "resumed": all(torch.equal(resumed[name], weight) for name, weight in straight.items()),
        "exported": all(torch.equal(load_file(export / "model.safetensors")[n], w) for n, w in expected.items()),
    }


def test_checkpoints_exports_and_the_reference_hold_the_frozen_too(
    folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    precision = {"compute_dtype": "float32"}
    config = frozen_settings(folder, BEGINNING, (1, 2, 1), precision=precision, run={"dir": str(tmp_path / "run")})
    for found in ranks.run(2, kept_and_sent, config, make_batch(folder), tmp_path / "export"):
        assert found == {"reference": True, "reference trains": False, "resumed": True, "exported": True}


def changed(rank: int, config: RunConfig, other: RunConfig, batch: RolloutBatch) -> str:
    Trainer(config, device=CPU).save(1)
    trainer = Trainer(other, device=CPU)
    try:
        trainer.load(1)
    except CheckpointError as error:
        return error.message
    raise AssertionError("not refused")


@pytest.mark.parametrize("order", [1, -1], ids=["fewer frozen", "more frozen"])
def test_a_checkpoint_of_another_frozen_set_is_refused_by_all(
    folder: Path, ranks: RankPool, tmp_path: Path, order: int
) -> None:
    sections = {"run": {"dir": str(tmp_path)}, "optim": {"name": "adamw"}}
    configs = [frozen_settings(folder, patterns, (1, 2, 1), **sections) for patterns in (MIXED, MIXED[:1])][::order]
    for message in ranks.run(2, changed, *configs, make_batch(folder)):
        assert message.startswith("model.frozen is ['*.mlp.*'")


# ---------------------------------------------------------------------- refusals
