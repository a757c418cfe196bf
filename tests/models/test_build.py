"""Loading: what is refused and by which words, and that shards are the file's own values on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.errors import ModelError
from slimefsdp.models.build import build_policy, load_policy
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import SINGLE_FILE, ModelFolder, read_model_folder
from slimefsdp.models.load_weights import check_tensor_names
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal
from tests.support.tiny_models import ARCHITECTURES, TinyFolder, save_tiny_model

CPU = torch.device("cpu")


def load(folder: ModelFolder, *, checkpointing: bool = False) -> PolicyModel:
    """The whole way, on the ranks of the process group."""
    mesh = build_mesh(dist.get_world_size(), 1, CPU)
    return load_policy(
        folder,
        mesh,
        Parallelism(torch.float32, torch.float32, recompute="full" if checkpointing else "none"),
    )


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(path / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    return path


def edit_config(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


# ---------------------------------------------------------------- refused before anything is read


def refusal(path: Path) -> ModelError:
    folder = read_model_folder(path)
    with pytest.raises(ModelError) as caught:
        check_tensor_names(build_policy(folder, torch.float32), folder)
    assert caught.value.field == "model.path" and caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    ("edit", "values"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_norm.weight"), ("layers.1.self_attn.k_norm.weight",)),
        (lambda t: t.pop("lm_head.weight"), ("lm_head.weight",)),
        (lambda t: t.update(extra=torch.zeros(2), more=torch.zeros(1)), ("'extra'", "model.safetensors", 1)),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            ("model.norm.weight", [31], "config.json", [32]),
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            ("model.norm.weight", "I8", SINGLE_FILE),
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}),
            ("model.norm.weight", "F8_E4M3"),
        ),
    ],
    ids=["missing", "missing head", "surplus", "shape", "int8", "float8"],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], Any], values: tuple[Any, ...]
) -> None:
    assert_refusal(refusal(edit_weights(save_tiny_model(tmp_path), edit)), ModelError, "model.path", *values)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("qwen3", {"model_type": "no-such-model"}, "no-such-model"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type='dynamic'",
        ),
        (
            "qwen3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 256,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                }
            },
            "rope_type='longrope'",
        ),
        # the way older releases wrote it
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        (
            "gemma3_text",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "rope_type='dynamic'",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention=True"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "'fp8'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4'"),
    ],
)
def test_what_cannot_be_computed_exactly_on_packs_is_refused_by_its_setting(
    tmp_path: Path, kind: str, changes: dict[str, Any], named: str
) -> None:
    assert named in str(refusal(edit_config(save_tiny_model(tmp_path, kind), **changes)))


@pytest.mark.parametrize("changes", [{"num_attention_heads": "four"}, {"vocab_size": -1}, {"hidden_act": "none"}])
def test_a_config_that_makes_no_model_is_a_model_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = edit_config(save_tiny_model(tmp_path), **changes)
    with pytest.raises(ModelError) as caught:  # when the folder is read, or when transformers makes the model
        build_policy(read_model_folder(path), torch.float32)
    assert str(path / "config.json") in str(caught.value)


def test_parameters_take_no_memory_before_they_are_sharded_while_buffers_are_real(tiny_folder: TinyFolder) -> None:
    policy = build_policy(read_model_folder(tiny_folder("gemma3_text")), torch.float32)
    assert {parameter.device.type for parameter in policy.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in policy.buffers()} == {"cpu"} and len(list(policy.buffers())) >= 3
    torch.nn.Linear(2, 2).weight.sum().item()  # and outside, new parameters have memory as ever


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_is_built_from_what_was_read_and_not_from_the_folder(tmp_path: Path, kind: str) -> None:
    folder = read_model_folder(save_tiny_model(tmp_path, kind))
    ours = build_policy(replace(folder, path=Path("/nowhere")), torch.float32).hf.config.to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    # dropout is switched off in what is built
    changed = {name for name in theirs if ours[name] != theirs[name]}
    assert all("drop" in name or "_pdrop" in name for name in changed - {"_name_or_path"}), changed
    assert ours.keys() == theirs.keys() and ours["model_type"] == kind


# ---------------------------------------------------------------- refused while reading, by all ranks alike


def message_of_rank(rank: int, path: Path, missing_on: int | None = None) -> str:
    folder = read_model_folder(path)
    if rank == missing_on:
        entries = folder.tensors
        entries = {n: replace(e, file=e.file.with_name("gone") / e.file.name) for n, e in entries.items()}
        folder = replace(folder, tensors=entries)
    try:
        load(folder)
    except ModelError as error:
        return str(error).replace("/gone", "")
    return "loaded"


def poison(name: str, row: int, value: float) -> Callable[[dict[str, torch.Tensor]], Any]:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][row] = value

    return edit


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        # the first row is on rank 0 alone, the last on rank 1 alone
        ("model.embed_tokens.weight", 0, float("nan")),
        ("model.layers.1.mlp.down_proj.weight", -1, float("inf")),
        ("lm_head.weight", -1, float("-inf")),
    ],
)
def test_a_non_finite_weight_in_one_ranks_rows_is_the_same_error_on_every_rank(
    tmp_path: Path, ranks: RankPool, name: str, row: int, value: float
) -> None:
    path = edit_weights(save_tiny_model(tmp_path), poison(name, row, value))
    messages = ranks.run(2, message_of_rank, path)
    assert messages[0] == messages[1] and f"tensor '{name}' holds NaN or infinity" in messages[0]


@pytest.mark.parametrize("missing_on", [None, 0, 1])
def test_a_tied_head_that_differs_in_one_ranks_rows_is_the_same_error_on_every_rank(
    tmp_path: Path, ranks: RankPool, missing_on: int | None
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += 1e-3

    path = edit_weights(save_tiny_model(tmp_path, tie_word_embeddings=True), edit)
    messages = ranks.run(2, message_of_rank, path, missing_on)
    assert messages[0] == messages[1]
    expected = "'lm_head.weight' differs from the embedding" if missing_on is None else "cannot be read"
    assert expected in messages[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_model_may_hold_its_embedding_twice(tmp_path: Path, ranks: RankPool, dtype: torch.dtype) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"].to(torch.bfloat16)
        tensors["model.embed_tokens.weight"] = embedding.to(dtype)
        tensors["lm_head.weight"] = embedding.float()  # equal as numbers, whatever the dtypes

    path = edit_weights(save_tiny_model(tmp_path, tie_word_embeddings=True), edit)
    assert ranks.run(2, message_of_rank, path) == ["loaded", "loaded"]


# ---------------------------------------------------------------- what was loaded


def shards_of_rank(rank: int, path: Path) -> dict[str, np.ndarray]:
    policy = load(read_model_folder(path))
    shards = {}
    for name, parameter in policy.named_weights():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float32
        shards[name] = parameter.to_local().detach().numpy().copy()
    return shards


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
def test_shards_end_to_end_are_the_files_tensors(
    tiny_folder: TinyFolder, ranks: RankPool, world_size: int, tie: bool
) -> None:
    # 97, 9 and 13 rows over 4 ranks: uneven shards, and an empty one (9 = 3 + 3 + 3 + 0)
    path = tiny_folder(tie_word_embeddings=tie, vocab_size=97, hidden_size=9, intermediate_size=13)
    stored = load_file(path / SINGLE_FILE)
    shards = ranks.run(world_size, shards_of_rank, path)
    assert shards[0].keys() == stored.keys()
    if world_size == 4:
        assert shards[3]["model.norm.weight"].size == 0
    for name, tensor in stored.items():
        assert np.array_equal(np.concatenate([shard[name] for shard in shards]), tensor.numpy()), name


def test_a_bfloat16_checkpoint_gives_float32_masters_of_the_same_values(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    path = tiny_folder(dtype=torch.bfloat16)
    stored = load_file(path / SINGLE_FILE)
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    shards = ranks.run(2, shards_of_rank, path)
    for name, tensor in stored.items():
        assert np.array_equal(np.concatenate([shard[name] for shard in shards]), tensor.float().numpy()), name


def buffers_and_units_of_rank(rank: int, path: Path) -> tuple[dict[str, np.ndarray], int, int]:
    policy = load(read_model_folder(path), checkpointing=True)
    buffers = {name: buffer.numpy().copy() for name, buffer in policy.hf.named_buffers(remove_duplicate=False)}
    units = sum(isinstance(module, FSDPModule) for module in policy.modules())
    return buffers, units, len(policy.decoder_layers())


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_buffers_are_hugging_faces_own_and_units_are_layers_embedding_and_root(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, tie: bool
) -> None:
    path = tiny_folder(kind, tie_word_embeddings=tie, num_hidden_layers=3, layer_types=None)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = dict(hf.named_buffers(remove_duplicate=False))
    for buffers, units, layers in ranks.run(2, buffers_and_units_of_rank, path):
        assert layers == 3 and units == layers + (0 if tie else 1) + 1
        assert buffers.keys() == expected.keys() and (buffers or kind == "gpt2")  # which has none
        for name, buffer in expected.items():
            assert np.array_equal(buffers[name], buffer.numpy()), name
