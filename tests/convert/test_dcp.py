"""Conversions: plain torch reads what is written, what it wrote comes back in every bit, and the rest is refused."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from slimefsdp.convert.convert import (
    checkpoint_to_hugging_face,
    dcp_to_hugging_face,
    hugging_face_to_dcp,
)
from slimefsdp.convert.dcp import read_dcp_folder
from slimefsdp.errors import CheckpointError, ModelError
from slimefsdp.models.hf_folder import SINGLE_FILE, read_model_folder
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import save_tiny_model
from tests.support.trainers import CPU, fresh_batch, settings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def nothing(line: str) -> None:
    """Takes notes that no test reads."""


def state_dict_of(path: Path) -> dict[str, torch.Tensor]:
    """As transformers has it: a tied head under both names."""
    model = AutoModelForCausalLM.from_pretrained(path)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_tensors(ours: Path, theirs: Path) -> bool:
    one, other = load_file(ours / SINGLE_FILE), load_file(theirs / SINGLE_FILE)
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


# ---------------------------------------------------------------------- out


def loaded_on_rank(rank: int, path: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state that torch's own load gives, into shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(0)]) for name, tensor in state.items()}
    torch_dcp.load(sharded, checkpoint_id=path)
    return {name: tensor.full_tensor() for name, tensor in sharded.items()}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"dtype": torch.bfloat16}),
        ("mixtral", {"dtype": torch.bfloat16}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("gpt_oss", {}),
    ],
)
def test_plain_torch_loads_what_is_written_and_it_converts_back(
    tmp_path: Path, ranks: RankPool, kind: str, changes: dict[str, Any]
) -> None:
    path = save_tiny_model(tmp_path / "model", kind, **changes)
    hugging_face_to_dcp(read_model_folder(path), tmp_path / "dcp", nothing)
    expected = state_dict_of(path)
    for found in ranks.run(2, loaded_on_rank, tmp_path / "dcp", expected):
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert read_dcp_folder(tmp_path / "dcp").tensors.keys() == expected.keys()
    dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "back", read_model_folder(path), dtype=None, note=nothing)
    assert same_tensors(tmp_path / "back", path)


def test_a_second_head_that_is_not_the_embedding_is_refused_both_ways(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    tensors = load_file(path / SINGLE_FILE)
    state = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(state, path / SINGLE_FILE, metadata={"format": "pt"})
    hugging_face_to_dcp(read_model_folder(path), tmp_path / "good", nothing)
    state["lm_head.weight"][-1, -1] += 1
    save_file(state, path / SINGLE_FILE, metadata={"format": "pt"})
    torch_dcp.save(state, checkpoint_id=tmp_path / "differs", no_dist=True)
    with refused(CheckpointError, "path", "'lm_head.weight'", path):
        hugging_face_to_dcp(read_model_folder(path), tmp_path / "bad", nothing)
    with refused(CheckpointError, "path", "'lm_head.weight'", tmp_path / "differs"):
        dcp_to_hugging_face(tmp_path / "differs", tmp_path / "bad", read_model_folder(path), dtype=None, note=nothing)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["differs", "good", "model"]


# ---------------------------------------------------------------------- in


def save_on_rank(rank: int, path: Path, state: dict[str, torch.Tensor], prefix: str, dim: int) -> None:
    """What a trainer keeps: sharded weights, optimiser moments, counters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded: dict[str, Any] = {}
    for name, tensor in state.items():
        weight = distribute_tensor(tensor, mesh, [Shard(min(dim, tensor.dim() - 1))])
        assert isinstance(weight, DTensor)
        sharded[prefix + name] = weight
        sharded[f"optimizer.state.{name}.exp_avg"] = weight * 2
        sharded[f"state.{name}.step"] = torch.tensor(3.0)
    sharded["lr_scheduler"] = {"last_epoch": 3, "rates": [0.1]}
    torch_dcp.save(sharded, checkpoint_id=path)


@pytest.mark.parametrize(("world_size", "prefix"), [(1, "model."), (2, "app.model."), (4, "")])
def test_what_plain_torch_saved_on_any_ranks_comes_back_in_every_bit(
    tmp_path: Path, ranks: RankPool, world_size: int, prefix: str
) -> None:
    path = save_tiny_model(tmp_path / "model", vocab_size=97, intermediate_size=55, tie_word_embeddings=prefix == "")
    ranks.run(world_size, save_on_rank, tmp_path / "dcp", state_dict_of(path), prefix, world_size % 4 // 2)
    assert max(len(tensor.chunks) for tensor in read_dcp_folder(tmp_path / "dcp").tensors.values()) == world_size
    notes: list[str] = []
    like = read_model_folder(path, with_weights=False)
    dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "back", like, dtype=None, note=notes.append)
    assert same_tensors(tmp_path / "back", path)
    assert [line for line in notes if "passed over" in line and "no weights" in line]
    dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "small", like, dtype="bfloat16", note=nothing)
    small, source = load_file(tmp_path / "small" / SINGLE_FILE), load_file(path / SINGLE_FILE)
    assert all(torch.equal(small[name], source[name].bfloat16()) for name in source)


@pytest.mark.parametrize("names", ["apart", "fused"])
def test_experts_may_be_one_tensor_or_apart(tmp_path: Path, names: str) -> None:
    path = save_tiny_model(tmp_path / "model", "mixtral")
    state = state_dict_of(path) if names == "fused" else load_file(path / SINGLE_FILE)
    assert any("experts.gate_up_proj" in name for name in state) is (names == "fused")
    torch_dcp.save({f"model.{name}": tensor for name, tensor in state.items()}, checkpoint_id=tmp_path / "dcp")
    dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "back", read_model_folder(path), dtype=None, note=nothing)
    assert same_tensors(tmp_path / "back", path)


@pytest.mark.parametrize(
    ("edit", "values"),
    [
        (lambda s: s.pop("model.norm.weight"), ["'model.norm.weight'"]),
        (lambda s: s.update(extra=torch.ones(2), more=torch.ones(2)), ["'extra'", 1]),
        (lambda s: s.update({"model.norm.weight": torch.ones(31)}), ["'model.norm.weight'", [31], [32]]),
        (lambda s: s.update({"model.norm.weight": torch.ones(32).int()}), ["'model.norm.weight'", torch.int32]),
        (
            lambda s: s.update({f"{p}.{n}": s.pop(n) if p == "b" else s[n] for p in ("a", "b") for n in list(s)}),
            ["'a.'", "'b.'"],
        ),
    ],
    ids=["missing", "surplus", "shape", "dtype", "two models"],
)
def test_tensors_that_are_not_the_models_are_named(
    tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], Any], values: list[Any]
) -> None:
    path = save_tiny_model(tmp_path / "model")
    state = state_dict_of(path)
    edit(state)
    torch_dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with refused(CheckpointError, "path", tmp_path / "dcp", *values):
        dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "back", read_model_folder(path), dtype=None, note=nothing)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dcp", "model"]


# ---------------------------------------------------------------------- hostile and torn folders


class Calls:
    """Pickled, a call of a function when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize("kind", ["function", "eval", "nested", "class of torch", "state on a class", "no pickle"])
def test_a_hostile_metadata_file_runs_nothing_and_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    mark = tmp_path / "mark"
    inner = Metadata({}, storage_data={})
    contents: dict[str, tuple[Any, str]] = {
        "function": (Calls(touch, str(mark)), "touch"),
        "eval": (Calls(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "nested": (replace(inner, planner_data={"a": [Calls(touch, str(mark))]}), "touch"),
        "class of torch": (Calls(torch.load, str(mark)), "torch.serialization.load"),
        "no pickle": (inner, "ValueError"),
    }
    (tmp_path / "dcp").mkdir()
    file = tmp_path / "dcp" / ".metadata"
    if kind == "state on a class":  # sets an attribute on the record's class, where a reader does not take care
        file.write_bytes(
            b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x05\x00\x00\x00stateK\x01s\x86b."
        )
        expected = "TypeError"
    else:
        content, expected = contents[kind]
        raw = pickle.dumps(content)
        file.write_bytes(raw[: len(raw) // 2] if kind == "no pickle" else raw)
    with refused(CheckpointError, "path", file, expected):
        read_dcp_folder(tmp_path / "dcp")
    assert not mark.exists()


NAME = "model.layers.1.mlp.down_proj.weight"


def entry_of(metadata: Metadata) -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[NAME]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def info_of(metadata: Metadata) -> _StorageInfo:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == NAME)


def moved(metadata: Metadata) -> None:
    """One tensor's bytes are another one's of another shape."""
    other = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.norm.weight")
    info_of(metadata).offset, info_of(metadata).length = other.offset, other.length


def doubled(metadata: Metadata) -> None:
    first = entry_of(metadata).chunks[0]
    entry_of(metadata).chunks.append(ChunkStorageMetadata(first.offsets, first.sizes))


@pytest.mark.parametrize(
    ("edit", "field", "values"),
    [
        (lambda m: setattr(info_of(m), "relative_path", "../secret.distcp"), "path", ["'../secret.distcp'"]),
        (lambda m: setattr(info_of(m), "relative_path", "/etc/passwd"), "path", ["'/etc/passwd'"]),
        (
            lambda m: setattr(info_of(m), "relative_path", "__9_0.distcp"),
            "run.dir",
            ["__9_0.distcp", os.strerror(errno.ENOENT)],
        ),
        (lambda m: setattr(info_of(m), "offset", 1 << 40), "path", ["__0_0.distcp", NAME, 1 << 40]),
        (lambda m: setattr(info_of(m), "offset", -1), "path", [-1]),
        (lambda m: setattr(info_of(m), "length", 20), "path", ["__0_0.distcp", NAME]),
        (lambda m: setattr(info_of(m), "transform_descriptors", ["zstd"]), "path", [".metadata", "zstd"]),
        (moved, "path", ["__0_0.distcp", "torch.float32", [32], [32, 56], NAME]),
        (doubled, "path", [".metadata", [32, 56], NAME]),
        (lambda m: entry_of(m).chunks.clear(), "path", [".metadata", [32, 56], NAME]),
        (lambda m: setattr(entry_of(m), "size", torch.Size([1 << 40, 1 << 40])), "path", [".metadata", NAME]),
        (lambda m: setattr(entry_of(m), "size", [1, -2]), "path", [".metadata", [1, -2]]),
        (lambda m: setattr(entry_of(m).properties, "dtype", None), "path", [".metadata", NAME]),
        (lambda m: setattr(entry_of(m).properties, "dtype", torch.float16), "path", ["torch.float16", NAME]),
        (lambda m: m.storage_data.clear(), "path", [".metadata"]),
        (lambda m: setattr(m, "storage_data", None), "path", [".metadata", "storage_data", "None"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else None,
)
def test_what_an_altered_folder_says_is_checked_before_it_is_used(
    tmp_path: Path, edit: Callable[[Metadata], Any], field: str, values: list[Any]
) -> None:
    path = save_tiny_model(tmp_path / "model")
    hugging_face_to_dcp(read_model_folder(path), tmp_path / "dcp", nothing)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    edit(metadata)
    file.write_bytes(pickle.dumps(metadata))
    with refused(CheckpointError, field, *values):
        dcp_to_hugging_face(tmp_path / "dcp", tmp_path / "back", read_model_folder(path), dtype=None, note=nothing)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["dcp", "model"]


# ---------------------------------------------------------------------- checkpoints of a run


def saved_and_exported(rank: int, config: Any, out: Path) -> None:
    trainer = Trainer(config, device=CPU)
    for step in (1, 2):
        trainer.train_step(fresh_batch(seed=step))
        trainer.save(step)
        trainer.export_hf(out / str(step))


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp_replicate": 2}], ids=str)
def test_a_checkpoint_becomes_what_the_run_would_have_exported(
    tmp_path: Path, ranks: RankPool, mesh: dict[str, int]
) -> None:
    path = save_tiny_model(tmp_path / "model", "qwen3_moe", tie_word_embeddings=True)
    run = tmp_path / "run"
    ranks.run(2, saved_and_exported, settings(path, mesh=mesh, run={"dir": str(run)}), tmp_path)
    checkpoint_to_hugging_face(run, tmp_path / "newest", None, dtype=None, note=nothing)
    first = run / "checkpoints" / "step_00000001"
    checkpoint_to_hugging_face(first, tmp_path / "first", path, dtype=None, note=nothing)
    assert same_tensors(tmp_path / "newest", tmp_path / "2") and same_tensors(tmp_path / "first", tmp_path / "1")
    assert not same_tensors(tmp_path / "1", tmp_path / "2")
    # a flipped bit: the newest is passed over aloud, and refused where it is asked for
    torn = run / "checkpoints" / "step_00000002"
    file = torn / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    notes: list[str] = []
    checkpoint_to_hugging_face(run, tmp_path / "earlier", None, dtype="bfloat16", note=notes.append)
    assert any("rank_00000.safetensors" in line for line in notes)
    source, small = load_file(tmp_path / "1" / SINGLE_FILE), load_file(tmp_path / "earlier" / SINGLE_FILE)
    assert all(torch.equal(small[name], source[name].bfloat16()) for name in source)
    other = save_tiny_model(tmp_path / "other")
    elsewhere = save_tiny_model(tmp_path / "elsewhere", "qwen3_moe", tie_word_embeddings=True, rms_norm_eps=1e-3)
    for asked, like, error, field, values in (
        (torn, None, CheckpointError, "rank_00000.safetensors", [file]),
        (first, other, CheckpointError, "model_type", ["qwen3_moe", "qwen3"]),
        (first, elsewhere, CheckpointError, "rms_norm_eps", [1e-6, 0.001]),
        (first, tmp_path, ModelError, "--like", [tmp_path, "config.json"]),
        (tmp_path, None, CheckpointError, "SRC", [tmp_path]),
    ):
        with refused(error, field, *values):
            checkpoint_to_hugging_face(asked, tmp_path / "refused", like, dtype=None, note=nothing)
    assert not (tmp_path / "refused").exists()
