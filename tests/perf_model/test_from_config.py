"""Estimates are made of the settings as they are, and ranks that read other rates refuse to start."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimefsdp.attention.select import AttentionShape, Choice, choose_strategy
from slimefsdp.batching.cost import CostModel
from slimefsdp.batching.cp_sharding import hybrid_layout, tokens_of
from slimefsdp.batching.hardware import Rates, write_calibration
from slimefsdp.batching.packing import pack
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import BatchError, ConfigError, ModelError, SlimeError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.perf_model.from_config import (
    byte_sizes_of,
    colocated_models_of,
    computing_of,
    simulate_settings,
    with_chosen_sharding,
    workload_of,
)
from slimefsdp.perf_model.memory import ByteSizes, Computing
from slimefsdp.perf_model.simulate import MeshShape, attention_comm_bytes
from slimefsdp.perf_model.step_time import HEADROOM, ColocatedModels
from slimefsdp.trainer import Trainer
from slimefsdp.training import build
from slimefsdp.training.build import cost_for
from slimefsdp.training.metrics import Throughput
from slimefsdp.training.plan import plan_training
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder, save_tiny_model

MODEL = ModelSpec(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=100)

ALONE = ColocatedModels()


def settings(**sections: Any) -> RunConfig:
    tree: dict[str, Any] = {"model": {"path": "unread"}, "optim": {"total_updates": 10}}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return config_from_dict(tree)


def test_bytes_and_ways_to_compute_are_those_of_the_settings() -> None:
    assert byte_sizes_of(settings(precision={"compute_dtype": "bfloat16"})) == ByteSizes(2, 4, 4, 2)
    wide = settings(precision={"compute_dtype": "float64"}, optim={"name": "sgd", "implementation": "foreach"})
    assert byte_sizes_of(wide) == ByteSizes(8, 8, 8, 1)
    muon = settings(optim={"name": "muon", "ns_steps": 3})
    assert byte_sizes_of(muon) == ByteSizes(2, 4, 4, 2, matrix_states=1)
    small = settings(optim={"state_dtype": "bfloat16"})
    assert byte_sizes_of(small) == ByteSizes(2, 4, 4, 2, state=2) and byte_sizes_of(small).state_bytes(10, 5) == 60
    assert byte_sizes_of(settings(optim={"state_dtype": "8bit"})).state_bytes(0, 256) == 2 * (256 + 4)
    assert computing_of(muon, MODEL, on_cpu=True).newton_schulz_steps == 3
    assert byte_sizes_of(settings(precision={"reduce_dtype": "bfloat16"})).reduce == 2
    config = settings(
        model={
            "activation_checkpointing": "full",
            "checkpoint_every_n_layers": 2,
            "offload_activations": True,
            "frozen": ["*.mlp.*"],
        },
        optim={"implementation": "fused"},
        fsdp={"cpu_offload": True},
        loss={"entropy_coefficient": 0.1},
    )
    share = 1 - 4 * 3 * 64 * 128 / MODEL.parameters
    expected = Computing(
        "full", 2, True, True, pytest.approx(share),  # type: ignore[arg-type]
        entropy_grad=True, on_cpu=True, offload_activations=True,
    )  # fmt: skip
    assert computing_of(config, MODEL, on_cpu=True) == expected


def test_only_models_in_the_policys_processes_are_beside_it() -> None:
    assert colocated_models_of(settings(), MODEL, MODEL).reference is None, "nothing reads it"
    read = {"loss": {"kl_coefficient": 0.1}}
    assert colocated_models_of(settings(**read), MODEL, None).reference == MODEL
    assert colocated_models_of(settings(**read), MODEL, None).reference_rests_on_host
    assert not colocated_models_of(settings(**read, reference={"offload": "none"}), MODEL, None).reference_rests_on_host
    assert colocated_models_of(settings(**read, reference={"placement": "group"}), MODEL, None).reference is None
    critic = colocated_models_of(settings(algorithm="ppo", critic={"offload": "none"}), None, MODEL)
    assert critic.critic == MODEL and not critic.critic_rests_on_host
    assert colocated_models_of(settings(algorithm="ppo", critic={"placement": "group"}), None, MODEL).critic is None


def test_a_rank_has_its_share_of_an_update() -> None:
    config = settings(mesh={"dp": 2, "cp": 2}, batch={"max_tokens_per_rank": 256, "samples_per_update": 8})
    computing = Computing("full", 1)
    choice = Choice("ring", "as set")
    found = simulate_settings(config, MODEL, choice, np.full(16, 400), computing=computing, counted_share=0.5)
    work = workload_of(MODEL, found, ByteSizes(), colocated_models_of(config, None, None), 1.0)
    assert work.shard_ranks == 4 and work.tokens == 8 * 400 / 4 and work.longest == 400
    assert work.needed.total * 4 == pytest.approx(found.needed_flops.total)
    assert work.batch.tokens <= 256 and work.batch.rows == round(work.batch.tokens * 0.5)
    assert work.repeats == 1
    comm = found.comm["ring"]
    assert comm is not None  # forward twice, since every layer is recomputed
    assert work.attention_bytes + work.attention_bytes_again == pytest.approx(comm.total * MODEL.layers / 4, abs=2)


def batch_of_groups(num_groups: int, prompt: int, responses: int) -> RolloutBatch:
    """Groups with a prompt in common; the first group's rewards are equal."""
    rng = np.random.default_rng(5)
    prompts = rng.integers(3, 100, (num_groups, prompt)).tolist()
    return RolloutBatch.from_samples(
        {
            "tokens": [*prompts[group], *rng.integers(3, 100, length).tolist()],
            "response_length": length,
            "reward": float(group > 0 and rng.random()),
            "group_id": group,
            "loss_mask": [token % 5 > 0 for token in range(length)],
        }
        for group in range(num_groups)
        for length in rng.integers(20, 200, responses).tolist()
    )


@pytest.mark.parametrize("how", ["auto", "always", "never"])
@pytest.mark.parametrize(
    ("mesh", "strategy", "per_update"),
    [
        ({"dp": 2}, "auto", 20), ({"dp": 2}, "auto", None), ({"dp": 1, "dp_replicate": 2, "cp": 2}, "ring", 20),
        ({"dp": 2, "cp": 2}, "ring_flash_attn", 20),
    ],
)  # fmt: skip
def test_a_batch_is_planned_as_training_plans_it(
    mesh: dict[str, int], strategy: str, per_update: int | None, how: str
) -> None:
    batch = batch_of_groups(6, prompt=400, responses=8)
    config = settings(
        mesh=mesh,
        batch={"max_tokens_per_rank": 2048, "samples_per_update": per_update, "share_prefixes": how},
        attention={"strategy": strategy},
        loss={"epochs": 2},
    )
    cp, choice = config.mesh.cp, choose_strategy(strategy, AttentionShape.of_model_spec(MODEL), config.mesh.cp)
    cost = CostModel.of_model(MODEL, strategy=choice.traffic, bytes_per_element=byte_sizes_of(config).compute)
    plan = plan_training(config, batch, cost)
    found = simulate_settings(config, MODEL, choice, batch, computing=Computing(), plan_batch=plan_training)
    first = plan.updates[: plan.num_first_epoch_updates]
    packs = [
        pack(batch, samples, trained_only=False, shared=plan.shared)
        for update in first for of_rank in update for samples in of_rank if len(samples)
    ]  # fmt: skip
    assert [u.micro_batches for u in found.updates] == [len(update[0]) for update in first]
    assert found.samples == 40 and len(found.updates) == (1 if per_update is None else 3), "the first group is left out"
    assert found.computed_tokens == sum(len(one.tokens) for one in packs) <= found.tokens
    shares = how != "never" and strategy != "ring_flash_attn"
    assert (found.computed_tokens < 0.7 * found.tokens) == shares == (plan.shared is not None)
    layouts = [hybrid_layout(one.cu_seqlens, cp, cost, one.forest) for one in packs]
    assert found.most_tokens_at_once == max(max(tokens_of(layout)) for layout in layouts) <= 2048
    comm, sent = found.comm[choice.traffic], np.zeros(2)
    for layout, one in zip(layouts, packs, strict=True):
        sent += attention_comm_bytes(
            layout, choice.traffic, heads=4, kv_heads=2, head_dim=16, bytes_per_element=2, grad_bytes_per_element=4,
            parents=None if one.forest is None else one.forest.parents,
        )  # fmt: skip
    assert comm is not None and (comm.forward, comm.backward) == tuple(np.rint(sent / len(first)))
    assert comm.total > 0 or cp == 1
    throughput = Throughput(found.mesh.ranks, MODEL, has_vocabulary_head=False)
    tflops = throughput.metrics(plan, batch, 1.0, updates=range(len(first)))["tflops_per_rank"]
    needed = (found.needed_flops.layers + found.needed_flops.attention) * len(first)
    assert needed / found.mesh.ranks / 1e12 == pytest.approx(tflops, rel=1e-12)
    rows = found.forward_flops.head * len(first) / (2 * MODEL.vocab * MODEL.hidden)
    assert rows == pytest.approx(found.tokens * batch.mask.sum() / batch.num_tokens, abs=1)
    work = workload_of(MODEL, found, ByteSizes(), colocated_models_of(config, None, None), 0.0)
    assert work.tokens * work.repeats * found.mesh.ranks * len(first) == pytest.approx(found.tokens)


def test_a_batch_in_which_nothing_trains_or_does_not_fit_is_refused() -> None:
    batch, choice = batch_of_groups(1, prompt=40, responses=4), Choice("ring", "as set")
    with refused(BatchError, "rewards"):
        simulate_settings(
            settings(mesh={"dp": 1}), MODEL, choice, batch, computing=Computing(), plan_batch=plan_training
        )
    small = settings(mesh={"dp": 1}, batch={"max_tokens_per_rank": 50})
    with refused(BatchError, "batch.max_tokens_per_rank", 50):
        batch = batch_of_groups(2, 40, 4)
        simulate_settings(small, MODEL, choice, batch, computing=Computing(), plan_batch=plan_training)


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


def test_automatic_sharding_takes_what_sends_least_and_fits(tiny_folder: TinyFolder) -> None:
    model_spec = ModelSpec.from_config(read_model_folder(tiny_folder()).config)
    config = settings(fsdp={"sharding": "auto"})
    mesh = MeshShape(dp=4)

    def level(memory_bytes: int | None) -> str:
        chosen = with_chosen_sharding(
            config, model_spec, mesh, beside=ColocatedModels(), memory_bytes=memory_bytes, on_cpu=True
        )
        return chosen.fsdp.sharding

    levels = [level(memory) for memory in (None, *range(100_000_000, 0, -500_000))]
    assert levels[0] == levels[1] == "optimizer" and levels[-1] == "full"
    assert levels == sorted(levels, key=["optimizer", "keep_parameters", "full"].index), "less memory, more sharding"
    unknown = with_chosen_sharding(config, None, mesh, beside=ColocatedModels(), memory_bytes=None, on_cpu=True)
    assert unknown.fsdp.sharding == "full"
    named = settings(fsdp={"sharding": "replicate"})
    assert with_chosen_sharding(named, model_spec, mesh, beside=ColocatedModels(), memory_bytes=1, on_cpu=True) is named


@pytest.mark.parametrize("on_cpu", [True, False])
def test_automatic_sharding_leaves_room_for_models_that_are_still_to_come(on_cpu: bool) -> None:
    config = settings(fsdp={"sharding": "auto"})
    untied = replace(MODEL, vocab=4096)

    def levels(beside: ColocatedModels, taken: int) -> list[str]:
        return [
            with_chosen_sharding(
                config, untied, MeshShape(dp=4), beside=beside, memory_bytes=memory + taken, on_cpu=on_cpu
            ).fsdp.sharding
            for memory in range(2_000_000, 400_000_000, 1_000_000)
        ]

    reference = untied.parameters // 4 * 4
    critic = 3 * (untied.parameters - untied.embedding_parameters) // 4 * 4
    stay = ColocatedModels(untied, reference_rests_on_host=False, critic=untied, critic_rests_on_host=False)
    alone = levels(ColocatedModels(), 0)
    assert len(set(alone)) > 1 and levels(stay, 0) != alone
    assert levels(stay, math.ceil((reference + critic) / HEADROOM)) == alone
    sleeping = ColocatedModels(untied, critic=untied)
    assert levels(sleeping, 0) == (levels(stay, 0) if on_cpu else alone), "only where there is another memory"


def sharding_of_rank(rank: int, config: RunConfig, free: list[int]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_bytes", lambda device: free[rank])
        return Trainer(config, device=torch.device("cpu")).config.fsdp.sharding


def test_the_rank_with_least_memory_decides_for_all(ranks: RankPool, tiny_folder: TinyFolder) -> None:
    path = str(tiny_folder())
    config = settings(model={"path": path}, mesh={"dp": 2, "device": "cpu"}, fsdp={"sharding": "auto"})
    assert ranks.run(2, sharding_of_rank, config, [10**12, 10**12]) == ["optimizer", "optimizer"]
    assert ranks.run(2, sharding_of_rank, config, [10**12, 10**3]) == ["full", "full"]


def level_and_save(rank: int, config: RunConfig, free: int, step: int | None = None) -> str:
    """What `auto` becomes with so much memory free, on every rank; it leaves a checkpoint of a step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "free_bytes", lambda device: free)
        trainer = Trainer(config, device=torch.device("cpu"))
    if step is not None:
        trainer.save(step)
    return trainer.config.fsdp.sharding


def test_a_resumed_run_keeps_its_level_while_its_mesh_is_the_same(
    ranks: RankPool, tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    much, little = 10**12, 10**3

    def resumed(resume: bool = True, dp: int = 2, **fsdp: Any) -> RunConfig:
        return settings(
            model={"path": str(tiny_folder())},
            mesh={"dp": dp, "device": "cpu"},
            fsdp={"sharding": "auto", **fsdp},
            run={"dir": str(tmp_path)},
            checkpoint={"resume": resume},
        )

    assert ranks.run(2, level_and_save, resumed(resume=False), much, 1) == ["optimizer"] * 2
    assert ranks.run(2, level_and_save, resumed(), little, 2) == ["optimizer"] * 2
    assert ranks.run(2, level_and_save, resumed(resume=False), little) == ["full"] * 2, "another run"
    assert ranks.run(1, level_and_save, resumed(dp=1), little) == ["full"], "another mesh"
    assert ranks.run(2, level_and_save, resumed(sharding="replicate"), little) == ["replicate"] * 2, "another setting"
    newest = tmp_path / "checkpoints" / "step_00000002" / "manifest.json"
    newest.write_text(newest.read_text().replace("optimizer", "optimiser", 1))
    assert ranks.run(2, level_and_save, resumed(), little) == ["optimizer"] * 2, "the one before is whole"
    ranks.run(2, level_and_save, resumed(sharding="replicate"), little, 3)
    assert ranks.run(2, level_and_save, resumed(), little) == ["full"] * 2, "auto never takes what that one names"


def test_an_actor_leaves_room_for_the_reference_that_it_loads_next(ranks: RankPool, tiny_folder: TinyFolder) -> None:
    folder = tiny_folder()
    model_spec = ModelSpec.from_config(read_model_folder(folder).config)
    sections = {"model": {"path": str(folder)}, "mesh": {"dp": 2, "device": "cpu"}, "fsdp": {"sharding": "auto"}}
    config = settings(**sections)

    def level(memory_bytes: int) -> str:
        beside, mesh = ColocatedModels(), MeshShape(dp=2)
        chosen = with_chosen_sharding(config, model_spec, mesh, beside=beside, memory_bytes=memory_bytes, on_cpu=True)
        return chosen.fsdp.sharding

    just_enough = next(memory for memory in range(0, 10**9, 20_000) if level(memory) == "optimizer")
    with_reference = settings(**sections, loss={"kl_coefficient": 0.1})
    free = [just_enough] * 2
    assert ranks.run(2, sharding_of_rank, config, free) == ["optimizer"] * 2
    assert "optimizer" not in ranks.run(2, sharding_of_rank, with_reference, free)
