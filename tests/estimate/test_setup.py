"""Setups are made of the settings as they are, and all ranks choose the same sharding and balance by the same rates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.errors import ConfigError, ModelError, SlimeError
from slimefsdp.estimate.hardware import HEADROOM, Rates, write_calibration
from slimefsdp.estimate.setup import ByteSizes, ColocatedModels, MeshShape, TrainingSetup, setup_of
from slimefsdp.estimate.traffic import choose_sharding, copied_token_bytes, shared_layer_bytes
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.trainer import Trainer
from slimefsdp.training import build
from slimefsdp.training.build import cost_for
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder, save_tiny_model

MODEL = ModelSpec(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)


def settings(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {"model": {"path": "unread"}, "optim": {"total_updates": 10}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return config_from_dict(tree)


def setup(**sections: Any) -> TrainingSetup:
    config = settings(**sections)
    return setup_of(config, MODEL, MeshShape(), on_cpu=True, reference=MODEL, critic=MODEL)


def test_ranks_that_share_layers_hold_and_send_what_was_worked_out_by_hand() -> None:
    full = {"activation_checkpointing": "full"}
    alone, shared = setup(model=full), setup(model=full, mesh={"tp": 4})
    assert shared.model == replace(MODEL, heads=1, kv_heads=1, intermediate=32, vocab=25) and shared.whole == MODEL
    assert shared.shardings == ("full", "keep_parameters", "optimizer") and alone.whole is None
    assert shared_layer_bytes(alone, 1000) == {}
    # four collectives of each layer in forward, backward and recomputation, and four at the ends; 3 of 4 parts travel
    assert shared_layer_bytes(shared, 1000) == {"tensor": (4 * 4 * 3 + 4) * 1000 * 64 * 2 * 3 // 4}
    assert copied_token_bytes(alone, 1000) == 0
    assert copied_token_bytes(shared, 1000) == 2 * (4 * 4 * 3 + 4) * 1000 * 64 * 2
    mixture = replace(MODEL, experts=8, active_experts=2)
    config = settings(mesh={"dp": 4, "ep": 4})
    # the experts of a layer are computed by each rank for its own tokens
    cut = setup_of(settings(mesh={"tp": 4}), mixture, MeshShape(), on_cpu=True)
    assert shared_layer_bytes(cut, 1000) == {"tensor": (2 * 4 * 2 + 4) * 1000 * 64 * 2 * 3 // 4}
    divided = setup_of(config, mixture, MeshShape(dp=4), on_cpu=True)
    whole = setup_of(settings(mesh={"dp": 4}), mixture, MeshShape(dp=4), on_cpu=True)
    experts = 8 * 3 * 64 * 128
    assert whole.layer_parameters - divided.layer_parameters == experts * 3 // 4
    assert whole.parameters - divided.parameters == MODEL.layers * experts * 3 // 4
    # each token goes to two experts and back, in forward and in backward
    assert shared_layer_bytes(divided, 1000) == {"expert": 4 * 2 * 2 * 1000 * 2 * 64 * 2 * 3 // 4}


def test_a_setup_is_that_of_the_settings() -> None:
    assert setup(precision={"compute_dtype": "bfloat16"}).sizes == ByteSizes(2, 4, 4, 2)
    assert setup(precision={"compute_dtype": "float64"}, optim={"name": "sgd"}).sizes == ByteSizes(8, 8, 8, 1)
    muon = setup(optim={"name": "muon"})
    assert muon.sizes == ByteSizes(2, 4, 4, 2, matrix_states=1) and muon.newton_schulz_steps == 5
    assert setup(optim={"state_dtype": "bfloat16"}).sizes.state_bytes(10, 5) == 60
    assert setup(optim={"state_dtype": "8bit"}).sizes.state_bytes(0, 256) == 2 * (256 + 4)
    assert setup(precision={"reduce_dtype": "bfloat16"}).sizes.reduce == 2
    found = setup(
        model={
            "activation_checkpointing": "offload",
            "frozen": ["*.mlp.*"],
        },
        fsdp={"cpu_offload": True},
        loss={"entropy_coefficient": 0.1},
    )
    assert found.trained_share == pytest.approx(1 - 4 * 3 * 64 * 128 / MODEL.parameters)
    expected = TrainingSetup(
        MODEL, recompute="offload", cpu_offload=True,
        trained_share=found.trained_share, is_optimizer_fused=True, entropy_grad=True, on_cpu=True,
        colocated=found.colocated,
    )  # fmt: skip
    assert found == expected
    assert setup(lora={"rank": 8}).trained_share == 0.0


@pytest.mark.parametrize("on_cpu", [True, False])
def test_automatic_sharding_sends_least_and_leaves_room_for_models_that_are_still_to_come(on_cpu: bool) -> None:
    untied = replace(MODEL, vocab=4096)

    def levels(colocated: ColocatedModels, taken: int) -> list[str]:
        setup = TrainingSetup(untied, MeshShape(dp=4), colocated=colocated, on_cpu=on_cpu)
        limits = range(2_000_000, 400_000_000, 1_000_000)
        return [choose_sharding(setup, 1024, limit + taken) for limit in limits]

    alone = levels(ColocatedModels(), 0)
    order = ["full", "keep_parameters", "optimizer"]
    assert alone == sorted(alone, key=order.index) and alone[0] == "full" and alone[-1] == "optimizer"
    assert choose_sharding(TrainingSetup(untied, MeshShape(dp=4)), 1024, None) == "optimizer"
    reference = untied.parameters // 4 * 4
    stay = ColocatedModels(untied, reference_rests_on_host=False)
    assert levels(stay, 0) != alone and levels(stay, math.ceil(reference / HEADROOM)) == alone
    sleeping = ColocatedModels(untied)
    assert levels(sleeping, 0) == (levels(stay, 0) if on_cpu else alone), "only where there is another memory"


def costs_of_ranks(rank: int, folders: list[Path], calibrations: list[str]) -> str | tuple[str, str | None]:
    config = settings(model={"path": str(folders[rank])}, batch={"cost_model": calibrations[rank]})
    model = read_model_folder(folders[rank])
    assert dist.group.WORLD is not None
    try:
        return repr(cost_for(config, model, dist.group.WORLD))
    except SlimeError as error:
        return type(error).__name__, error.field


def test_all_ranks_balance_by_the_same_rates_or_none_starts(ranks: RankPool, tmp_path: Path) -> None:
    folder, wider = [save_tiny_model(tmp_path / "model")] * 2, save_tiny_model(tmp_path / "wider", intermediate_size=96)
    for name, attention in (("a", 1.0), ("b", 0.5)):
        write_calibration(tmp_path / f"{name}.json", Rates(name, 1.0, attention, 1.0, 1.0, 1.0), {})
    files = {name: str(tmp_path / f"{name}.json") for name in ("a", "b", "missing")}
    same = ranks.run(2, costs_of_ranks, folder, [files["a"], files["a"]])
    assert same[0] == same[1] and "CostModel" in same[0]
    other = ranks.run(2, costs_of_ranks, folder, [files["a"], files["b"]])
    assert other == [(ConfigError.__name__, "batch.cost_model")] * 2
    missing = ranks.run(2, costs_of_ranks, folder, [files["a"], files["missing"]])
    assert missing == [(ConfigError.__name__, "batch.cost_model")] * 2, "also the rank that has the file"
    models = ranks.run(2, costs_of_ranks, [folder[0], wider], [files["a"], files["a"]])
    assert models == [(ModelError.__name__, "model.path")] * 2


def sharding_of_rank(rank: int, config: RunConfig, free: list[int], step: int | None = None) -> str:
    """Returns what `auto` becomes with so much memory free on each rank; leaves a checkpoint of a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_bytes", lambda device: free[rank])
        trainer = Trainer(config, device=torch.device("cpu"))
    if step is not None:
        trainer.save(step)
    return trainer.config.fsdp.sharding


def test_the_rank_with_least_memory_decides_and_an_actor_leaves_room_for_its_reference(
    ranks: RankPool, tiny_folder: TinyFolder
) -> None:
    sections = {"model": {"path": str(tiny_folder())}, "mesh": {"dp": 2, "device": "cpu"}, "fsdp": {"sharding": "auto"}}
    config = settings(**sections)
    assert ranks.run(2, sharding_of_rank, config, [10**12, 10**12]) == ["optimizer", "optimizer"]
    assert ranks.run(2, sharding_of_rank, config, [10**12, 10**3]) == ["full", "full"]
    model = ModelSpec.from_config(read_model_folder(config.model.path).config)
    alone = setup_of(config, model, MeshShape(dp=2), on_cpu=True)
    most = config.batch.max_tokens_per_rank
    enough = [next(n for n in range(0, 10**9, 20_000) if choose_sharding(alone, most, n) == "optimizer")] * 2
    assert ranks.run(2, sharding_of_rank, config, enough) == ["optimizer"] * 2
    with_reference = settings(**sections, loss={"kl_coefficient": 0.1})
    assert "optimizer" not in ranks.run(2, sharding_of_rank, with_reference, enough)


def test_a_resumed_run_keeps_its_level_while_its_mesh_is_the_same(
    ranks: RankPool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    much, little = [10**12] * 2, [10**3] * 2

    def resumed(resume: bool = True, dp: int = 2, **fsdp: Any) -> RunConfig:
        return settings(
            model={"path": str(tiny_folder())},
            mesh={"dp": dp, "device": "cpu"},
            fsdp={"sharding": "auto", **fsdp},
            run={"dir": str(tmp_path)},
            checkpoint={"resume": resume},
        )

    assert ranks.run(2, sharding_of_rank, resumed(resume=False), much, 1) == ["optimizer"] * 2
    assert ranks.run(2, sharding_of_rank, resumed(), little, 2) == ["optimizer"] * 2
    assert ranks.run(2, sharding_of_rank, resumed(resume=False), little) == ["full"] * 2, "another run"
    assert ranks.run(1, sharding_of_rank, resumed(dp=1), little) == ["full"], "another mesh"
    assert ranks.run(2, sharding_of_rank, resumed(sharding="replicate"), little) == ["replicate"] * 2
    newest = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
    newest.write_text(newest.read_text().replace("optimizer", "optimiser", 1))
    assert ranks.run(2, sharding_of_rank, resumed(), little) == ["optimizer"] * 2, "the one before is whole"
    ranks.run(2, sharding_of_rank, resumed(sharding="replicate"), little, 3)
    assert ranks.run(2, sharding_of_rank, resumed(), little) == ["full"] * 2, "auto never takes what that one names"
