"""Expert parallelism: mixtures of experts on any mesh with ep ranks end with the weights of one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import check_parallel
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.trainer import Trainer
from tests.support import plain_lora
from tests.support.comparisons import largest_difference
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.shared_layers import (
    COMPOSED,
    difference_from_plain,
    difference_of_checkpoints,
    digest_of_weights,
    on_mesh,
)
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
DEFAULT_CASES = 1
EIGHT = {"qwen3_moe": {"num_experts": 8}, "gpt_oss": {"num_local_experts": 8}, "mixtral": {"num_local_experts": 8}}


def with_ep(ep: int, *axes: int) -> dict[str, Any]:
    mesh = on_mesh(*axes)
    return {"mesh": mesh["mesh"] | {"ep": ep}}


MESHES = [
    with_ep(2, 1, 2, 1, 1),
    with_ep(2, 1, 1, 1, 2),  # the ranks of ep are those of tp
    with_ep(4, 1, 4, 1, 1),  # ranks and experts almost without tokens
    with_ep(2, 1, 2, 2, 1),
    with_ep(4, 1, 2, 1, 2),  # the ranks of ep are those of two tp groups
    with_ep(2, 2, 2, 1, 1),
]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", EIGHT)
def test_weights_after_three_updates_equal_a_plain_process(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, mesh: dict[str, Any]
) -> None:
    if kind == "gpt_oss" and mesh["mesh"]["cp"] > 1:
        mesh = mesh | {"attention": {"strategy": "all_gather"}}  # the ring cannot express its windows
    assert difference_from_plain(ranks, tiny_folder(kind, **EIGHT[kind]), **mesh) <= 1e-12


@pytest.mark.parametrize("sections", [*COMPOSED, {"model": {"compile": True}}], ids=str)
def test_it_composes_with_recomputation_and_sharding_levels(
    tiny_folder: TinyFolder, ranks: RankPool, sections: dict[str, Any]
) -> None:
    path = tiny_folder("gpt_oss", **EIGHT["gpt_oss"])
    assert difference_from_plain(ranks, path, **with_ep(2, 1, 2, 1, 1), **sections) <= 1e-12


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[4]])
def test_adapters_of_experts_are_those_of_peft(tiny_folder: TinyFolder, ranks: RankPool, mesh: dict[str, Any]) -> None:
    path = tiny_folder("mixtral", **EIGHT["mixtral"])
    lora = {"rank": 3, "alpha": 7.0, "targets": ["experts"]}
    config = settings(path, lora=lora, optim={"name": "sgd", "lr": 0.05}, **mesh)
    batch = make_batch(path)
    found = ranks.run(config.ranks, plain_lora.lora_training, config, batch)
    start = found[0]["start"]
    plain = plain_lora.plain_training(path, config, batch, start, plain_lora.EXPERTS).weights()
    assert largest_difference(plain, start) > 1e-2
    for ours in found:
        assert largest_difference(ours["start"], start) == 0
        assert largest_difference(ours["end"], plain) <= 1e-12
        assert ours["base moved"] == [] and ours["in sync"]


@pytest.mark.parametrize(
    ("first", "second"),
    [(MESHES[0], on_mesh(1, 1, 1, 1)), (on_mesh(1, 3, 1, 1), MESHES[4]), (MESHES[5], MESHES[1])],
)
def test_a_checkpoint_of_any_mesh_loads_on_any_other(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    path = tiny_folder("qwen3_moe", **EIGHT["qwen3_moe"])
    assert difference_of_checkpoints(ranks, path, tmp_path, first, second) == []


def test_weights_read_or_drawn_are_those_of_one_rank(tiny_folder: TinyFolder, ranks: RankPool) -> None:
    path = tiny_folder("gpt_oss", **EIGHT["gpt_oss"])
    models = [{"read": "every_rank"}, {"read": "first_rank"}, {"init": "random"}]
    alone = ranks.run(1, digest_of_weights, [settings(path, model=model) for model in models])[0]
    configs = [settings(path, model=model, **with_ep(2, 1, 2, 1, 1)) for model in models]
    for digests in ranks.run(2, digest_of_weights, configs):
        assert digests == alone


def log_probs_of(rank: int, config: RunConfig, batch: RolloutBatch) -> np.ndarray:
    trainer = Trainer(config, device=CPU)
    trainer.sleep()
    trainer.wake_up()
    return trainer.compute_log_probs(batch).log_probs


def test_log_probs_in_float32_with_grouped_products_are_those_of_one_rank(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    path = tiny_folder("qwen3_moe", num_experts=8, moe_intermediate_size=32)
    batch, precision = make_batch(path), {"compute_dtype": "float32"}
    alone = ranks.run(1, log_probs_of, settings(path, precision=precision), batch)[0]
    for found in ranks.run(2, log_probs_of, settings(path, precision=precision, **with_ep(2, 1, 2, 1, 1)), batch):
        np.testing.assert_allclose(found, alone, rtol=0, atol=2e-5)


def test_a_model_or_mesh_that_ep_cannot_divide_is_refused(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    mixture = read_model_folder(tiny_folder("qwen3_moe", num_experts=6)).config
    with pytest.raises(ConfigError, match=r"mesh\.ep=4 does not divide the 6 experts") as caught:
        check_parallel(mixture, 1, 4)
    assert caught.value.hint == "set it to 3"
    with pytest.raises(ConfigError, match="a model of type qwen3 has none"):
        check_parallel(read_model_folder(tiny_folder("qwen3")).config, 1, 2)
    with pytest.raises(ConfigError, match=r"mesh\.ep=2 does not divide the 3 ranks"):
        settings(tmp_path, mesh={"dp": 3, "ep": 2})
    for sections in ({"optim": {"name": "muon", "lr": 0.01}}, {"fsdp": {"sharding": "replicate"}}):
        with pytest.raises(ConfigError, match=r"mesh\.ep=2"):
            settings(tmp_path, mesh={"dp": 2, "ep": 2}, **sections)
