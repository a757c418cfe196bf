"""Random weights are the same on every mesh, and follow transformers' own rules."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slimefsdp.config import config_from_dict
from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.errors import ModelError
from slimefsdp.models.build import build_policy, load_policy, materialise
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.models.load_weights import draw_weights
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import ARCHITECTURES, save_tiny_model

CPU = torch.device("cpu")
SEED = 11


def config_alone(path: Path, kind: str, **changes: Any) -> Path:
    """A folder with config.json and nothing else."""
    save_tiny_model(path / "whole", kind, **changes)
    (path / "alone").mkdir()
    shutil.copy(path / "whole" / "config.json", path / "alone")
    return path / "alone"


def drawn(path: Path, seed: int = SEED, dtype: torch.dtype = torch.float32) -> Any:
    folder, mesh = read_model_folder(path, with_weights=False), build_mesh(dist.get_world_size(), 1, CPU)
    return load_policy(folder, mesh, Parallelism(dtype, dtype), random_seed=seed)


def full_weights_of_rank(rank: int, path: Path, seed: int, dtype: torch.dtype) -> dict[str, np.ndarray]:
    return {
        name: parameter.full_tensor().detach().numpy() for name, parameter in drawn(path, seed, dtype).named_weights()
    }


def full_weights_of_rank_on_two_axes(rank: int, path: Path) -> dict[str, np.ndarray]:
    """Sharded over two ranks, replicated over two."""
    folder = read_model_folder(path, with_weights=False)
    policy = build_policy(folder, torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in policy.decoder_layers():
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    materialise(policy, CPU)
    draw_weights(policy, build_policy(folder, torch.float32), SEED)
    weights = {}
    for name, parameter in policy.named_weights():
        assert isinstance(parameter, DTensor) and len(parameter.placements) == 2
        weights[name] = parameter.full_tensor().detach().numpy()
    return weights


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert np.array_equal(tensor, other[name]), name


@pytest.mark.parametrize(
    "kind, tie",
    [("qwen3", False), ("qwen3", True), ("gpt2", True), ("mixtral", False), ("gpt_oss", False), ("gemma2", True)],
)
def test_the_weights_are_the_same_bits_on_every_mesh(tmp_path: Path, ranks: RankPool, kind: str, tie: bool) -> None:
    path = config_alone(tmp_path, kind, vocab_size=97, tie_word_embeddings=tie)  # 97 rows divide by no mesh
    (alone,) = ranks.run(1, full_weights_of_rank, path, SEED, torch.float32)
    assert ("lm_head.weight" in alone) != tie
    for world_size in (2, 4):
        for weights in ranks.run(world_size, full_weights_of_rank, path, SEED, torch.float32):
            assert_same(weights, alone)
    for weights in ranks.run(4, full_weights_of_rank_on_two_axes, path):
        assert_same(weights, alone)


def test_another_seed_draws_other_weights_and_wider_masters_hold_the_same_ones(tmp_path: Path, ranks: RankPool) -> None:
    path = config_alone(tmp_path, "qwen3")
    (narrow,) = ranks.run(1, full_weights_of_rank, path, SEED, torch.float32)
    (wide,) = ranks.run(1, full_weights_of_rank, path, SEED, torch.float64)
    (other,) = ranks.run(1, full_weights_of_rank, path, SEED + 1, torch.float32)
    assert {tensor.dtype for tensor in wide.values()} == {np.dtype(np.float64)}
    assert_same(wide, {name: tensor.astype(np.float64) for name, tensor in narrow.items()})
    for name, tensor in narrow.items():
        assert np.array_equal(tensor, other[name]) == ("norm" in name), name  # norms start at ones


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_draw_follows_transformers_own_rules(tmp_path: Path, ranks: RankPool, kind: str) -> None:
    path = config_alone(tmp_path, kind, tie_word_embeddings=False)
    (ours,) = ranks.run(1, full_weights_of_rank, path, SEED, torch.float32)
    torch.manual_seed(3)
    with torch.device(CPU):
        config = AutoModelForCausalLM.from_pretrained(path.parent / "whole").config
        theirs = AutoModelForCausalLM.from_config(config)
    compared = 0
    for name, parameter in theirs.named_parameters():
        assert ours[name].shape == parameter.shape, name
        expected, found = parameter.std().item(), ours[name].std()
        if expected == 0:  # ones of a norm, zeros of a bias
            assert np.array_equal(ours[name], parameter.detach().numpy()), name
        elif parameter.numel() >= 1000:  # standard error of a standard deviation: below 2.3 %
            assert abs(found / expected - 1) < 0.12, (name, found, expected)
            compared += 1
        padded = name in ("model.embed_tokens.weight", "transformer.wte.weight")
        if padded:  # row 0 is the padding token's
            assert (ours[name][0] == 0).all() == (parameter[0] == 0).all().item()
    assert compared >= 6
    drawn_twice = {tensor.tobytes() for tensor in ours.values() if tensor.std() > 0}
    assert len(drawn_twice) == sum(tensor.std() > 0 for tensor in ours.values())  # no two parameters share a stream


def trainer_of_rank(rank: int, path: Path, out: Path, init: str) -> None:
    config = {
        "run": {"seed": SEED},
        "model": {"path": str(path), "init": init},
        "mesh": {"dp": dist.get_world_size(), "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "optim": {"total_updates": 1},
    }
    Trainer(config_from_dict(config), device=CPU).export_hf(out)


def test_a_run_can_start_from_a_configuration_alone_and_its_export_holds_the_drawn_weights(
    tmp_path: Path, ranks: RankPool
) -> None:
    path = config_alone(tmp_path, "qwen3_moe")
    ranks.run(2, trainer_of_rank, path, tmp_path / "out", "random")
    (expected,) = ranks.run(1, full_weights_of_rank, path, SEED, torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert_same({name: parameter.detach().numpy() for name, parameter in exported.named_parameters()}, expected)
    source = json.loads((path / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source
    with refused(ModelError, "model.path", path, ".safetensors"):
        ranks.run(1, trainer_of_rank, path, tmp_path / "again", "folder")
