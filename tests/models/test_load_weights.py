"""Rank 0 reads for all: the same bits as when each rank reads, on every mesh; and what either way takes in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from benchmarks.load_memory import measure, save_model
from slimefsdp.config import RunConfig
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import SlimeError
from slimefsdp.models import load_weights
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.hf_folder import SINGLE_FILE
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, save_tiny_model
from tests.support.trainers import CPU, fresh_batch, settings


def shards(policy: PolicyModel) -> dict[str, bytes]:
    return {name: local_shard(parameter).detach().numpy().tobytes() for name, parameter in policy.named_weights()}


def with_reader(config: RunConfig, rank: int) -> RunConfig:
    """Rank 0 reads, and no other rank has the folders."""
    gone = {} if rank == 0 else {"path": Path("/nowhere")}
    reference = config.reference.model_copy(update=gone if config.reference.path else {})
    model = config.model.model_copy(update={"read": "first_rank", **gone})
    return config.model_copy(update={"model": model, "reference": reference})


def weights_of_rank(rank: int, config: RunConfig, reader: bool, export: Path | None = None) -> Any:
    """This rank's shards of policy and reference, and the sizes in which the weights came."""
    sent: list[int] = []
    broadcast = dist.broadcast

    def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return broadcast(tensor, *args, **kwargs)

    # smaller than a row of the embedding, so that pieces end anywhere
    with patch.object(load_weights, "BUCKET_BYTES", 104), patch.object(dist, "broadcast", noted):
        trainer = Trainer(with_reader(config, rank) if reader else config, device=CPU)
        found = {"policy": shards(trainer.policy)}
        if config.reference.path is not None:
            trainer.compute_log_probs(fresh_batch(), "ref")
            assert trainer._state.reference.model is not None
            trainer._state.reference._memory_manager.wake_up(("reference",))
            found["reference"] = shards(trainer._state.reference.model)
    if export is not None:
        trainer.export_hf(export)
    return found, [size for size in sent if size <= 104 and size % 8 == 0]


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks": (2, {"mesh": {"dp": 2}}),
    "four ranks": (4, {"mesh": {"dp": 4}}),
    "copies and cp": (4, {"mesh": {"dp_replicate": 2, "cp": 2}}),
    "whole on every rank": (2, {"mesh": {"dp": 2}, "fsdp": {"sharding": "replicate"}}),
    "on the host": (2, {"mesh": {"dp": 2}, "fsdp": {"cpu_offload": True}}),
}


@pytest.mark.parametrize("name", MESHES)
def test_weights_from_rank_0_are_those_of_the_folder_and_the_others_need_no_copy(
    tmp_path: Path, ranks: RankPool, name: str
) -> None:
    world_size, sections = MESHES[name]
    path = save_tiny_model(tmp_path / "model", vocab_size=97, intermediate_size=55)
    (path / "tokenizer.json").write_text("{}")
    other = save_tiny_model(tmp_path / "other", seed=1, vocab_size=97, intermediate_size=55, dtype=torch.bfloat16)
    config = settings(path, **sections, reference={"path": str(other)})
    expected = ranks.run(world_size, weights_of_rank, config, False)
    found = ranks.run(world_size, weights_of_rank, config, True, tmp_path / "out")
    assert [weights for weights, _ in found] == [weights for weights, _ in expected]
    assert found[0][0]["policy"] != found[0][0]["reference"] and expected[0][1] == []
    assert len(found[0][1]) > 1000 and {sizes == found[0][1] for _, sizes in found} == {True}
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"tokenizer.json", "config.json"}
    exported, stored = load_file(tmp_path / "out" / SINGLE_FILE), load_file(path / SINGLE_FILE)
    assert exported.keys() == stored.keys() and all(torch.equal(exported[name], stored[name]) for name in stored)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"dtype": torch.bfloat16}),
        ("gpt2", {"tie_word_embeddings": True}),
        ("gpt_oss", {}),
    ],
)
def test_experts_and_ties_come_from_rank_0_too(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, changes: dict[str, Any]
) -> None:
    config = settings(tiny_folder(kind, **changes), mesh={"dp": 2})
    expected = ranks.run(2, weights_of_rank, config, False)
    assert [w for w, _ in ranks.run(2, weights_of_rank, config, True)] == [w for w, _ in expected]


def message_of_rank(rank: int, config: RunConfig, reader: bool, torn: bool = False) -> str:
    read_rows = load_weights.read_rows

    def ends_early(*args: Any, **kwargs: Any) -> None:
        if args[2] > 0:
            raise OSError(5, "Input/output error")
        read_rows(*args, **kwargs)

    try:
        with (
            patch.object(load_weights, "BUCKET_BYTES", 104),
            patch.object(load_weights, "read_rows", ends_early if torn else read_rows),
        ):
            Trainer(with_reader(config, rank) if reader else config, device=CPU)
    except SlimeError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def change(path: Path, name: str, row: int, value: float) -> None:
    tensors = load_file(path / SINGLE_FILE)
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    tensors[name][row] = value
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("reader", "name", "row", "value", "words"),
    [
        (False, "model.embed_tokens.weight", -1, float("nan"), "'model.embed_tokens.weight' holds NaN"),
        (True, "model.layers.0.mlp.up_proj.weight", 0, float("-inf"), "up_proj.weight' holds NaN or infinity"),
        (True, "lm_head.weight", -1, 0.5, "'lm_head.weight' differs from the embedding"),
    ],
)
def test_what_is_wrong_in_one_ranks_rows_is_the_same_error_on_all(
    tmp_path: Path, ranks: RankPool, name: str, row: int, value: float, words: str, reader: bool
) -> None:
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    config = settings(path, mesh={"dp": 2})
    change(path, "model.norm.weight", 0, 1.0)
    assert ranks.run(2, message_of_rank, config, reader) == ["loaded"] * 2
    change(path, name, row, value)
    messages = ranks.run(2, message_of_rank, config, reader)
    assert messages[0] == messages[1] and words in messages[0], messages


def test_what_rank_0_cannot_read_is_the_same_error_on_all(tmp_path: Path, ranks: RankPool) -> None:
    path = save_tiny_model(tmp_path)
    config = settings(path, mesh={"dp": 2})
    torn = ranks.run(2, message_of_rank, config, True, True)
    assert torn[0] == torn[1] and "'model.embed_tokens.weight' cannot be read" in torn[0]
    (path / "config.json").unlink()
    messages = ranks.run(2, message_of_rank, config, True)
    assert messages[0] == messages[1] and "ModelError" in messages[0] and "config.json" in messages[0]


@pytest.mark.slow
@pytest.mark.parametrize("read_by", ["every_rank", "first_rank"])
def test_loading_takes_a_shard_a_tenth_of_the_model_and_a_bucket(tmp_path: Path, read_by: str) -> None:
    save_model(tmp_path, "bfloat16", num_hidden_layers=2)
    for rank in measure(tmp_path, 2, read_by):
        assert rank["shard_mib"] >= 0.45 * rank["model_mib"] >= 80  # a second copy of the shard would exceed the bound
        bucket = 64 if read_by == "first_rank" else 16
        assert rank["peak_mib"] <= rank["shard_mib"] + 0.1 * rank["model_mib"] + bucket
