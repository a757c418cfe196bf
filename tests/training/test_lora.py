"""Adapters train as those of peft do on one plain process, on any mesh, and leave as a merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.errors import StateError
from tests.support.comparisons import largest_difference
from tests.support.plain_lora import (
    ALL,
    life_of_adapters,
    lora_gradients,
    lora_training,
    plain_gradients,
    plain_training,
)
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import fresh_batch

CPU = torch.device("cpu")


def lora_settings(path: Path, **sections: Any) -> RunConfig:
    lora = {"rank": 3, "alpha": 7.0, **sections.pop("lora", {})}
    return settings(path, lora=lora, **sections)


MODELS = {
    "qwen3": ("qwen3", {}, ALL),
    "tied llama": ("llama", {"tie_word_embeddings": True}, ALL),
    "phi3": ("phi3", {}, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
}


@pytest.mark.parametrize("model", MODELS)
def test_gradients_equal_those_of_peft_in_float64(tiny_folder: TinyFolder, ranks: RankPool, model: str) -> None:
    kind, changes, targets = MODELS[model]
    folder = tiny_folder(kind, vocab_size=97, intermediate_size=55, **changes)
    config, batch = lora_settings(folder), make_batch(folder)
    start, ours, others = ranks.run(1, lora_gradients, config, batch)[0]
    plain = plain_gradients(folder, config, batch, start, targets)
    assert min(g.abs().max().item() for g in plain.values()) > 1e-4
    assert largest_difference(ours, plain) <= 1e-12
    assert others == []


MESHES = {
    "one rank": (1, 1, 1),
    "dp 2": (1, 2, 1),
    "cp 2": (1, 1, 2),
    "dp 2 x cp 2": (1, 2, 2),
    "two copies": (2, 1, 1),
    "two copies of two shards": (2, 2, 1),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"name": "sgd"}, "adamw": {"name": "adamw", "lr": 0.01, "eps": 1e-4}}


def axes(mesh: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("dp_replicate", "dp", "cp"), mesh, strict=True))


def compare_training(ranks: RankPool, folder: Path, config: RunConfig, targets: list[str] = ALL) -> None:
    """Every rank's adapters after a step, which are peft's after the same updates."""
    batch = make_batch(folder)
    found = ranks.run(config.ranks, lora_training, config, batch)
    start = found[0]["start"]
    plain = plain_training(folder, config, batch, start, targets).weights()
    for ours in found:
        assert largest_difference(ours["start"], start) == 0  # drawn alike, however they are sharded
        assert largest_difference(ours["end"], plain) <= 1e-12
        assert ours["base moved"] == [] and ours["in sync"] and ours["metrics"]["updates"] >= 3
        assert set(ours["norms"]) == {"layer_0", "layer_1"}
        assert {name for unit in ours["description"].units for name in unit.parameters} >= plain.keys()
    assert largest_difference(plain, start) > 1e-2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_after_several_updates_are_those_of_peft_on_any_mesh(
    folder: Path, ranks: RankPool, mesh: str, optimizer: str
) -> None:
    compare_training(ranks, folder, lora_settings(folder, mesh=axes(MESHES[mesh]), optim=OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("model", list(MODELS)[1:])
def test_adapters_of_other_architectures_are_those_of_peft(
    tiny_folder: TinyFolder, ranks: RankPool, model: str
) -> None:
    kind, changes, targets = MODELS[model]
    folder = tiny_folder(kind, vocab_size=97, intermediate_size=55, **changes)
    compare_training(ranks, folder, lora_settings(folder, mesh={"dp": 2}, optim=OPTIMIZERS["adamw"]), targets)


SPREAD: dict[str, dict[str, Any]] = {
    "recomputed": {"model": {"activation_checkpointing": "full"}, "mesh": {"dp": 2}},
    "partly recomputed": {"model": {"activation_checkpointing": "selective"}, "mesh": {"cp": 2}},
    "shared prompts": {"batch": {"share_prefixes": "always"}, "mesh": {"dp": 2}},
    "keep_parameters": {"fsdp": {"sharding": "keep_parameters"}, "mesh": {"dp": 2}},
    "optimizer": {"fsdp": {"sharding": "optimizer"}, "mesh": {"dp": 2, "cp": 2}},
    "replicate": {"fsdp": {"sharding": "replicate"}, "mesh": {"dp": 2}},
    "small units": {"fsdp": {"wrap_layers": ["Qwen3MLP", "Linear"]}, "mesh": {"dp": 2}},
    "clipped": {"optim": {"max_grad_norm": 0.01, "lr": 5.0}, "mesh": {"dp": 2}},
}


@pytest.mark.parametrize("spread", SPREAD)
def test_adapters_are_those_of_peft_however_the_model_is_spread_and_stored(
    folder: Path, ranks: RankPool, spread: str
) -> None:
    sections = {name: dict(values) for name, values in SPREAD[spread].items()}
    sections["model"] = {"path": str(folder), **sections.get("model", {})}
    compare_training(ranks, folder, lora_settings(folder, **sections))


@pytest.mark.parametrize(
    ("targets", "theirs"),
    [(["attention"], ALL[:4]), (["mlp"], ALL[4:]), (["*.q_proj", "*.1.*.down_proj"], r".*q_proj|.*\.1\..*down_proj")],
    ids=str,
)
def test_chosen_targets_are_those_of_peft(folder: Path, ranks: RankPool, targets: list[str], theirs: Any) -> None:
    compare_training(ranks, folder, lora_settings(folder, mesh={"dp": 2}, lora={"targets": targets}), theirs)


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize("estimator", ["k3", "full"])
@pytest.mark.parametrize("mesh", ["one rank", "dp 2 x cp 2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_policy_without_adapters_and_no_second_copy(
    folder: Path, ranks: RankPool, mesh: str, dtype: str, estimator: str
) -> None:
    # one update a step: the first is at the weights that old log-probs are recomputed with
    sections: dict[str, Any] = {
        "mesh": axes(MESHES[mesh]),
        "precision": {"compute_dtype": dtype},
        "loss": {"kl_estimator": estimator, "epochs": 1, "old_log_probs": "recompute", "kl_coefficient": 0.1},
        "batch": {"samples_per_update": None},
        "optim": {"name": "adamw", "lr": 0.05},
    }
    batch = fresh_batch()
    config = lora_settings(folder, **sections)
    # a copy of its own has masters in float32, and computes the same of them
    with_copy = lora_settings(folder, **sections, reference={"path": str(folder), "offload": "none"})
    lives = ranks.run(config.ranks, life_of_adapters, config, batch)
    others = ranks.run(config.ranks, life_of_adapters, with_copy, batch)
    for life, other in zip(lives, others, strict=True):
        kl = [values["kl_ref"] for values in life["metrics"]]
        assert kl[0] == 0.0 and min(kl[1:]) > 1e-4
        assert life["metrics"][0]["ratio"] == 1.0 and life["metrics"][0]["ratio_deviation_max"] == 0.0
        for said in life["reference"]:
            assert np.array_equal(said, life["before"])
        assert not np.array_equal(life["after"], life["before"])
        assert life["reference bytes"] == 0 < other["reference bytes"]
        assert kl == [values["kl_ref"] for values in other["metrics"]]
        assert largest_difference(life["adapters"], other["adapters"]) == 0
        assert isinstance(life["update_ref"], StateError) and other["update_ref"] is None
        assert np.array_equal(life["reference at last"], life["before"])
        apart = np.abs(other["reference at last"] - other["after"]).max()  # merged, it rounds elsewhere
        assert apart < (1e-4 if dtype == "float32" else 0.3) and apart < np.abs(life["after"] - life["before"]).max()
