"""However the model is spread, stored and recomputed, training is the same; and each setting does what it says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.comparisons import error_norm, largest_difference, trainer_weights
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case
BLOCKS = ["Qwen3Attention", "Qwen3MLP"]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def folder(request: pytest.FixtureRequest, tiny_folder: TinyFolder) -> Path:
    return tiny_folder(
        tie_word_embeddings=request.param, vocab_size=97, intermediate_size=55, num_hidden_layers=3,
    )  # fmt: skip


@pytest.fixture(scope="module")
def untied(tiny_folder: TinyFolder) -> Path:
    return tiny_folder(num_hidden_layers=3)


def mesh(dp_replicate: int, dp: int, cp: int, **others: Any) -> dict[str, dict[str, Any]]:
    return {"mesh": {"dp_replicate": dp_replicate, "dp": dp, "cp": cp}, **others}


# ---------------------------------------------------------------------- the same training

SAME = {
    "two copies of two shards": mesh(2, 2, 1),
    "two copies, cp": mesh(2, 1, 2),
    "parameters kept, copies, cp": mesh(2, 1, 2, fsdp={"sharding": "keep_parameters"}),
    "summed once": mesh(1, 2, 1, fsdp={"sharding": "optimizer"}),
    "summed once, copies, cp": mesh(2, 1, 2, fsdp={"sharding": "optimizer"}),
    "summed once, on the host, recomputed": mesh(
        1, 2, 1, fsdp={"sharding": "optimizer", "cpu_offload": True}, model={"activation_checkpointing": "full"}
    ),
    "whole on every rank, cp": mesh(2, 1, 2, fsdp={"sharding": "replicate"}),
    "copies on the host": mesh(2, 1, 2, fsdp={"cpu_offload": True}),
    "small units, recomputed": mesh(1, 2, 1, fsdp={"wrap": BLOCKS}, model={"activation_checkpointing": "full"}),
    "units in units": mesh(1, 2, 1, fsdp={"wrap": ["Qwen3DecoderLayer", "Qwen3MLP"]}),
    "units by size": mesh(1, 2, 1, fsdp={"wrap": 3000, "sharding": "keep_parameters"}),
    "root alone": mesh(1, 2, 1, fsdp={"wrap": 10**9}),
    "recomputed": mesh(1, 1, 1, model={"activation_checkpointing": "full"}),
    "selectively recomputed, cp": mesh(1, 1, 2, model={"activation_checkpointing": "selective"}),
    "everything": mesh(
        2, 1, 2,
        fsdp={"wrap": BLOCKS, "cpu_offload": True, "sharding": "keep_parameters"},
        model={"activation_checkpointing": "selective"},
    ),
}  # fmt: skip
# where a tensor that two modules hold is sharded, summed, kept, offloaded or recomputed by another path
TIED = ("parameters kept, copies, cp", "copies on the host", "units in units", "everything")


@cache
def plain_weights(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after the plan's updates in one plain process, and how far they moved; no mesh cuts updates."""
    config, batch = settings(folder), make_batch(folder)
    plan = plan_training(config, batch)
    with KeepFloat64():
        plain = PlainStep(folder, config, torch.float64)
        start = plain.weights()
        plain.train(batch, plan)
    return plain.weights(), largest_difference(plain.weights(), start)


@pytest.mark.parametrize(
    "folder, case",
    [(False, case) for case in SAME] + [(True, case) for case in TIED],
    indirect=["folder"],
    ids=[*SAME, *(f"tied, {case}" for case in TIED)],
)
def test_weights_after_several_updates_equal_plain_steps_in_float64(folder: Path, ranks: RankPool, case: str) -> None:
    config = settings(folder, **SAME[case])
    plain, moved = plain_weights(folder)
    assert moved > 1e-2
    for _, ours in ranks.run(config.ranks, trainer_weights, config, make_batch(folder)):
        assert largest_difference(ours, plain) <= 1e-12


def log_probs_of(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[bytes, torch.Tensor]:
    found = Trainer(config, device=CPU).compute_log_probs(batch)
    return found.log_probs.tobytes(), torch.stack([torch.tensor(found.log_probs), torch.tensor(found.entropy)])


@pytest.mark.parametrize("case", ["two copies of two shards", "two copies, cp", "whole on every rank, cp"])
def test_log_probs_are_complete_and_the_same_on_every_rank(untied: Path, ranks: RankPool, case: str) -> None:
    batch = make_batch(untied)
    ((_, alone),) = ranks.run(1, log_probs_of, settings(untied), batch)
    assert (alone != 0).all()
    config = settings(untied, **SAME[case])
    results = ranks.run(config.ranks, log_probs_of, config, batch)
    assert len({bits for bits, _ in results}) == 1
    assert (results[0][1] - alone).abs().max() <= 5e-6


# ---------------------------------------------------------------------- where parameters are


def local_shapes(rank: int, config: RunConfig) -> tuple[dict[str, tuple[int, ...]], int, dict[str, tuple[int, ...]]]:
    """Shapes of this rank's shards, bytes of parameters and moments, and the shapes of the full parameters."""
    trainer = Trainer(config, device=CPU)
    memory = trainer.memory()
    named = trainer.policy.named_weights()
    return (
        {name: tuple(p.to_local().shape) for name, p in named},
        memory.optimizer,
        {name: tuple(p.shape) for name, p in named},
    )


@pytest.mark.parametrize(
    "sections, shards", [(mesh(1, 2, 1), 2), (mesh(2, 2, 1), 2), (mesh(2, 1, 2), 2), (mesh(1, 2, 2), 4),
                         (mesh(1, 2, 1, fsdp={"sharding": "keep_parameters"}), 2),
                         (mesh(1, 2, 1, fsdp={"sharding": "optimizer"}), 2),
                         (mesh(1, 2, 2, fsdp={"sharding": "replicate"}), 1)],
)  # fmt: skip
def test_a_copy_is_sharded_over_dp_and_cp_and_no_further(
    untied: Path, ranks: RankPool, sections: dict[str, Any], shards: int
) -> None:
    config = settings(untied, **sections)
    results = ranks.run(config.ranks, local_shapes, config)
    for rank, (local, moments, full) in enumerate(results):
        for name, shape in full.items():
            rows = -(-shape[0] // shards)
            place = rank % shards
            held = max(0, min(shape[0], (place + 1) * rows) - place * rows)
            assert local[name] == (held, *shape[1:]), name
        if shards == 1:  # sgd keeps one float64 number a parameter
            assert moments == 8 * sum(torch.Size(shape).numel() for shape in full.values())


def unsharded_between(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, list[bool]]:
    """Which units are whole when the backward begins, after it, and after log-probs alone."""
    trainer = Trainer(config, device=CPU)
    states = {}

    def are_whole() -> list[bool]:
        modules = [module for module in trainer.policy.modules() if isinstance(module, FSDPModule)]
        return [group.is_unsharded for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]

    backward = torch.Tensor.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        states["between"] = are_whole()
        backward(*args, **kwargs)

    torch.Tensor.backward = watched  # type: ignore[method-assign]
    try:
        with KeepFloat64():
            trainer.forward_backward(batch)
    finally:
        torch.Tensor.backward = backward  # type: ignore[method-assign]
    states["after"] = are_whole()
    trainer.compute_log_probs(batch)
    states["after log-probs"] = are_whole()
    return states


@pytest.mark.parametrize("sharding, layers_stay", [("full", False), ("keep_parameters", True), ("optimizer", True)])
def test_parameters_stay_whole_until_backward_only_if_asked_to(
    untied: Path, ranks: RankPool, sharding: str, layers_stay: bool
) -> None:
    config = settings(untied, mesh={"dp": 2}, fsdp={"sharding": sharding})
    states = ranks.run(2, unsharded_between, config, make_batch(untied))[0]
    assert states["between"] == [True] + [layers_stay] * 4  # the root, the embedding, three layers
    assert not any(states["after"]) and not any(states["after log-probs"])


def stale_values(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[Any, ...]:
    """Log-probs after an update, and those of a trainer that loaded the updated weights afresh."""
    trainer = Trainer(config, device=CPU)
    trainer.compute_log_probs(batch)
    trainer.train_step(batch)
    trainer.sleep()
    after = trainer.compute_log_probs(batch).log_probs
    trainer.save(1)
    fresh = Trainer(config, device=CPU)
    before = fresh.compute_log_probs(batch).log_probs
    fresh.load(1)
    return before, after, fresh.compute_log_probs(batch).log_probs


@pytest.mark.parametrize(
    "fsdp",
    [{"sharding": "keep_parameters"}, {"sharding": "replicate"}, {"cpu_offload": True}],
    ids=str,
)
def test_no_call_reads_weights_of_before_the_update(
    untied: Path, ranks: RankPool, tmp_path: Path, fsdp: dict[str, Any]
) -> None:
    config = settings(untied, mesh={"dp": 2}, fsdp=fsdp, run={"dir": str(tmp_path)})
    for before, after, fresh in ranks.run(2, stale_values, config, make_batch(untied)):
        assert (after == fresh).all() and abs(after - before).max() > 1e-3


def places_under_offload(rank: int, config: RunConfig) -> tuple[list[bool], set[bool], set[str]]:
    policy = Trainer(config, device=CPU).policy
    modules = [module for module in policy.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    offloads = [parameter.offload_to_cpu for group in groups for parameter in group.fsdp_params]
    pins = {parameter.pin_memory for group in groups for parameter in group.fsdp_params}
    return offloads, pins, {p.to_local().device.type for p in policy.parameters()}


@pytest.mark.parametrize("offloads", [True, False])
def test_parameters_live_on_the_host_only_if_asked_to(untied: Path, ranks: RankPool, offloads: bool) -> None:
    config = settings(untied, fsdp={"cpu_offload": offloads})
    found, pins, devices = ranks.run(1, places_under_offload, config)[0]
    assert len(found) == 36 and set(found) == {offloads}
    assert pins == {False} and devices == {"cpu"}  # a CPU has nothing to pin for


# ---------------------------------------------------------------------- dtypes


def reduced_gradients(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}


@pytest.mark.parametrize("dp_replicate", [1, 2])
@pytest.mark.parametrize("name, bits", [("bfloat16", torch.bfloat16), ("float32", torch.float32)])
def test_gradients_are_summed_in_the_reduce_dtype(
    untied: Path, ranks: RankPool, name: str, bits: torch.dtype, dp_replicate: int
) -> None:
    batch = make_batch(untied)
    sections = {"mesh": {"dp_replicate": dp_replicate, "dp": 2 // dp_replicate}, "batch": {"max_tokens_per_rank": 512}}
    exact = ranks.run(2, reduced_gradients, settings(untied, **sections), batch)[0]
    reduced = settings(untied, **sections, precision={"reduce_dtype": name})
    low = ranks.run(2, reduced_gradients, reduced, batch)[0]
    # one micro-batch a rank: what is left of the sum has the dtype's few bits, in the masters' dtype
    assert all(g.dtype == torch.float64 and torch.equal(g, g.to(bits).double()) for g in low.values())
    assert not all(torch.equal(g, g.to(bits).double()) for g in exact.values())
    scale = sum(g.square().sum().item() for g in exact.values()) ** 0.5
    assert 0 < error_norm(low, exact) <= 4 * torch.finfo(bits).eps * scale


# ---------------------------------------------------------------------- units


def unit_names(rank: int, config: RunConfig) -> list[str]:
    policy = Trainer(config, device=CPU).policy
    return [name for name, module in policy.named_modules() if isinstance(module, FSDPModule)]


LAYERS = [f"hf.model.layers.{index}" for index in range(3)]


def test_default_units_are_root_layers_and_an_embedding_that_is_not_tied(folder: Path, ranks: RankPool) -> None:
    is_tied = '"tie_word_embeddings": true' in (folder / "config.json").read_text()
    names = ranks.run(1, unit_names, settings(folder))[0]
    assert names == ["", *([] if is_tied else ["hf.model.embed_tokens"]), *LAYERS]


def test_units_are_the_classes_that_are_named_and_a_tied_embedding_is_never_one(folder: Path, ranks: RankPool) -> None:
    names = ranks.run(1, unit_names, settings(folder, fsdp={"wrap": ["Qwen3MLP"]}))[0]
    assert names == ["", *(f"{layer}.mlp" for layer in LAYERS)]
    is_tied = '"tie_word_embeddings": true' in (folder / "config.json").read_text()
    wanted = settings(folder, fsdp={"wrap": ["Embedding", "Qwen3DecoderLayer"]})
    if not is_tied:
        assert ranks.run(1, unit_names, wanted)[0] == ["", "hf.model.embed_tokens", *LAYERS]
        return
    with refused(ConfigError, "fsdp.wrap", "Embedding"):
        ranks.run(1, unit_names, wanted)


def unit_names_and_gradients(
    rank: int, config: RunConfig, batch: RolloutBatch
) -> tuple[list[str], dict[str, torch.Tensor]]:
    trainer = Trainer(config, device=CPU)
    trainer.forward_backward(batch)
    names = [name for name, module in trainer.policy.named_modules() if isinstance(module, FSDPModule)]
    return names, {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gpt2"])
def test_every_module_can_be_a_unit_and_what_is_recomputed_changes_no_bit(
    kind: str, ranks: RankPool, tiny_folder: TinyFolder
) -> None:
    path = tiny_folder(kind)
    batch, units = make_batch(path), {"wrap": 1, "sharding": "keep_parameters"}
    stored = ranks.run(2, reduced_gradients, settings(path, mesh={"cp": 2}), batch)[0]
    assert max(gradient.abs().max().item() for gradient in stored.values()) > 0.01
    model = {"activation_checkpointing": "full"}
    names, ours = ranks.run(
        2, unit_names_and_gradients, settings(path, mesh={"cp": 2}, fsdp=units, model=model), batch
    )[0]
    # several matrices a layer: a layer's own norms, or the experts of a mixture, are units too
    assert len(names) > 2 + 2 * 4 and not {f"hf.model.layers.{index}" for index in range(2)} & set(names)
    assert largest_difference(ours, stored) <= 1e-12
    model = {"activation_checkpointing": "selective"}
    recomputed = ranks.run(2, reduced_gradients, settings(path, mesh={"cp": 2}, model=model), batch)[0]
    assert largest_difference(recomputed, stored) == 0.0


# ---------------------------------------------------------------------- gathers under way


def after_load_and_update_ref(rank: int, config: RunConfig, batch: RolloutBatch) -> list[float]:
    """Largest differences of log-probs: after load() from before, and of the reference after update_ref()."""
    trainer = Trainer(config, device=CPU)
    before = trainer.compute_log_probs(batch).log_probs
    trainer.save(0)
    trainer.train_step(batch)
    moved = float(np.abs(trainer.compute_log_probs(batch).log_probs - before).max())
    trainer.load(0)
    after_load = float(np.abs(trainer.compute_log_probs(batch).log_probs - before).max())
    trainer.compute_log_probs(batch, "ref")
    trainer.train_step(batch)
    trainer.update_ref()
    reference = trainer.compute_log_probs(batch, "ref").log_probs
    return [moved, after_load, float(np.abs(reference - trainer.compute_log_probs(batch).log_probs).max())]


def test_no_forward_uses_what_was_gathered_before_the_weights_changed(
    untied: Path, ranks: RankPool, tmp_path: Path
) -> None:
    # registered in another order than called: units are gathered ahead that were called already
    units = ["Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"]
    sections = mesh(1, 2, 1, fsdp={"wrap": units})
    config = settings(untied, **sections, run={"dir": str(tmp_path)})
    for moved, after_load, reference in ranks.run(2, after_load_and_update_ref, config, make_batch(untied)):
        assert moved > 1e-3 and after_load == 0 and reference == 0


def refused_update_ref(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[str, bool]:
    trainer = Trainer(config, device=CPU)
    before = trainer.compute_log_probs(batch, "ref").log_probs
    try:
        trainer.update_ref()
    except StateError as error:
        return str(error), bool((trainer.compute_log_probs(batch, "ref").log_probs == before).all())
    return "no error", False


@pytest.mark.parametrize("other", [{"kind": "llama"}, {"intermediate_size": 64}, {"rms_norm_eps": 0.1}])
def test_update_ref_refuses_a_reference_of_another_architecture_and_leaves_it_alone(
    untied: Path, ranks: RankPool, tiny_folder: TinyFolder, other: dict[str, Any]
) -> None:
    reference = tiny_folder(**{"num_hidden_layers": 3, **other})
    config = settings(untied, reference={"path": str(reference)})
    ((error, is_untouched),) = ranks.run(1, refused_update_ref, config, make_batch(untied))
    assert "another architecture" in error and "reference.path" in error and is_untouched
