"""Folders and memory hold the same weights under their own names, whichever of the layouts a folder has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from slimefsdp.checkpoint.export import write_model_folder
from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.io.safetensors_file import TensorSpec
from slimefsdp.models import load_weights
from slimefsdp.models.build import build_for_sampling, load_policy
from slimefsdp.models.hf_folder import SINGLE_FILE, hub_parts, read_model_folder
from slimefsdp.weight_sync.receive import WeightReceiver
from slimefsdp.weight_sync.send import full_weights
from tests.support.all_pairs import all_pairs
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import ARCHITECTURES, save_tiny_model, tiny_model

CPU = torch.device("cpu")
MIXTURES = ("mixtral", "qwen3_moe")  # whose experts have tensors of their own in folders


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_the_names_are_those_that_transformers_writes(tmp_path: Path, kind: str, tie: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / SINGLE_FILE).items()}
    parts = [part for name, parameter in model.named_parameters() for part in hub_parts(kind, name, parameter.shape)]
    assert {part.name: part.shape for part in parts} == written and len(parts) == len(written)
    assert (kind in MIXTURES) == any(part.expert is not None for part in parts)


def loaded(path: Path) -> Any:
    mesh = build_mesh(dist.get_world_size(), 1, CPU)
    return load_policy(
        read_model_folder(path),
        mesh,
        Parallelism(torch.float32, torch.float32),
    )


def shards_of_rank(rank: int, path: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """This rank's shards by name, and the tensors that were read for them."""
    opened: list[str] = []
    read_numbers = load_weights.OpenTensors.read

    def noted(files: load_weights.OpenTensors, name: str, start: int, target: torch.Tensor) -> None:
        opened.append(name)
        read_numbers(files, name, start, target)

    with patch.object(load_weights.OpenTensors, "read", noted):
        policy = loaded(path)
    shards = {}
    for name, parameter in policy.named_weights():
        assert isinstance(parameter, DTensor)
        shards[name] = parameter.to_local().detach().numpy().copy()
    return shards, opened


def fuse(path: Path, model: Any) -> None:
    """Stores the parameters under the names they have in memory."""
    tensors = {name: parameter.detach().contiguous() for name, parameter in model.named_parameters()}
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("world_size", "layout", "kind"), all_pairs((1, 2, 4), ("apart", "fused"), (*MIXTURES, "gpt_oss"))
)
def test_each_rank_reads_its_experts_alone_from_either_layout(
    tmp_path: Path, ranks: RankPool, kind: str, layout: str, world_size: int
) -> None:
    model = tiny_model(kind)
    model.save_pretrained(tmp_path)
    if layout == "fused":
        fuse(tmp_path, model)
    found = ranks.run(world_size, shards_of_rank, tmp_path)
    for name, parameter in model.named_parameters():
        whole = np.concatenate([shards[name] for shards, _ in found])
        assert np.array_equal(whole, parameter.detach().numpy()), name
    if kind in MIXTURES and layout == "apart":
        experts_read = [
            {int(n) for name in opened for n in re.findall(r"experts\.(\d+)\.", name)} for _, opened in found
        ]
        assert sorted(expert for experts in experts_read for expert in experts) == list(range(5))


def message_of_rank(rank: int, path: Path) -> str:
    try:
        loaded(path)
    except load_weights.ModelError as error:
        return str(error)
    return "loaded"


def test_an_expert_with_nan_is_named_on_the_ranks_that_do_not_read_it_too(tmp_path: Path, ranks: RankPool) -> None:
    save_tiny_model(tmp_path, "mixtral")
    tensors = load_file(tmp_path / SINGLE_FILE)
    bad = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
    tensors[bad][3, 3] = float("nan")
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    messages = ranks.run(2, message_of_rank, tmp_path)
    assert messages[0] == messages[1] and repr(bad) in messages[0] and "NaN" in messages[0]


def test_a_gpt2_folder_of_the_first_years_loads_without_prefix_and_without_its_masks(
    tmp_path: Path, ranks: RankPool
) -> None:
    model = tiny_model("gpt2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    old = {
        name.removeprefix("transformer."): parameter.detach().contiguous()
        for name, parameter in model.named_parameters()
    }
    assert "wte.weight" in old and "h.1.attn.c_attn.bias" in old
    for layer in range(2):
        old[f"h.{layer}.attn.bias"] = torch.ones(512, 512).tril().view(1, 1, 512, 512)
    save_file(old, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    found = ranks.run(2, shards_of_rank, tmp_path)
    for name, parameter in model.named_parameters():
        whole = np.concatenate([shards[name] for shards, _ in found])
        assert np.array_equal(whole, parameter.detach().numpy()), name


def export_of_rank(rank: int, path: Path, out: Path) -> None:
    policy = loaded(path)
    source = read_model_folder(path)
    buckets = list(full_weights(policy.named_weights(), dist.group.WORLD, dtype=torch.float32, bucket_bytes=4096))
    if rank == 0:
        tensors = [pair for bucket in buckets for pair in bucket]
        specs = [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors]
        write_model_folder(out, specs, tensors, source, max_shard_bytes=20_000)
        engine = build_for_sampling(path, torch.float32, CPU)
        receiver = WeightReceiver(engine.named_weights())
        receiver.begin(1, {name: tuple(tensor.shape) for bucket in buckets for name, tensor in bucket})
        for bucket in buckets:
            receiver.receive(bucket)
        receiver.commit(1)
        expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for (name, ours), (_, theirs) in zip(engine.named_weights(), expected.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_was_read_is_exported_and_streamed_bit_for_bit(
    tmp_path: Path, ranks: RankPool, kind: str, tie: bool
) -> None:
    path, out = save_tiny_model(tmp_path / "in", kind, tie_word_embeddings=tie), tmp_path / "out"
    ranks.run(2, export_of_rank, path, out)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert set(read_model_folder(out).tensors) == set(read_model_folder(path).tensors)
    assert json.loads((out / "config.json").read_text()) == json.loads((path / "config.json").read_text())
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours, report = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    for (name, one), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(one, other), name
