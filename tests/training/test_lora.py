"""Adapters train as those of peft do on one plain process, on any mesh, and leave as a merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import CheckpointError, ConfigError, SlimeError, StateError
from slimefsdp.models.decoder import ValueModel
from slimefsdp.models.lora import Lora, add_adapters
from slimefsdp.optim.optimizer_step import layer_group
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference
from tests.support.plain_lora import (
    ALL,
    EXPERTS,
    life_of_adapters,
    load_run,
    lora_gradients,
    lora_training,
    merged_weights,
    plain_gradients,
    plain_training,
    save_run,
)
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import TinyFolder, tiny_model
from tests.support.trainers import error_of, fresh_batch

CPU = torch.device("cpu")
DEFAULT_CASES = 1  # of each test on ranks in the default tier; --all has every case


def lora_settings(path: Path, **sections: Any) -> RunConfig:
    lora = {"rank": 3, "alpha": 7.0, **sections.pop("lora", {})}
    return settings(path, lora=lora, **sections)


LAYERS, WITH_HEAD = ["attention", "mlp"], ["attention", "mlp", "head"]
# kind, changes, our targets, peft's
MODELS: dict[str, tuple[str, dict[str, Any], list[str], Any]] = {
    "qwen3": ("qwen3", {}, LAYERS, ALL),
    "tied llama": ("llama", {"tie_word_embeddings": True}, ["all-linear"], ALL),
    "phi3": ("phi3", {}, LAYERS, ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "qwen3 with its head": ("qwen3", {}, [*ALL, "lm_head"], [*ALL, "lm_head"]),
    "qwen3_moe": ("qwen3_moe", {}, ["all-linear", "experts"], {**EXPERTS, "target_modules": ALL[:4]}),
    "mixtral": ("mixtral", {"intermediate_size": 24}, ["experts"], EXPERTS),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 24}, ["attention", "experts"], {**EXPERTS, "target_modules": ALL[:4]}),
}


@pytest.mark.parametrize("model", ["qwen3_moe", "qwen3 with its head"])  # others train, below
def test_gradients_equal_those_of_peft_in_float64(tiny_folder: TinyFolder, ranks: RankPool, model: str) -> None:
    kind, changes, ours, theirs = MODELS[model]
    folder = tiny_folder(kind, **{"vocab_size": 97, "intermediate_size": 55, **changes})
    config, batch = lora_settings(folder, lora={"targets": ours}), make_batch(folder)
    start, gradients, others = ranks.run(1, lora_gradients, config, batch)[0]
    plain = plain_gradients(folder, config, batch, start, theirs)
    assert min(g.abs().max().item() for g in plain.values()) > 1e-4
    assert largest_difference(gradients, plain) <= 1e-12
    assert others == []


MESHES = {
    "dp 2": (1, 2, 1),
    "cp 2": (1, 1, 2),
    "one rank": (1, 1, 1),
    "dp 2 x cp 2": (1, 2, 2),
    "two copies of two shards": (2, 2, 1),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"name": "sgd"}, "adamw": {"name": "adamw", "lr": 0.01, "eps": 1e-4}}


def axes(mesh: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("dp_replicate", "dp", "cp"), mesh, strict=True))


def compare_training(ranks: RankPool, folder: Path, config: RunConfig, targets: Any = ALL) -> None:
    """Every rank's adapters after a step, which are peft's after the same updates."""
    batch = make_batch(folder)
    found = ranks.run(config.ranks, lora_training, config, batch)
    start = found[0]["start"]
    plain = plain_training(folder, config, batch, start, targets).weights()
    for ours in found:
        assert largest_difference(ours["start"], start) == 0  # drawn alike, however they are sharded
        assert largest_difference(ours["end"], plain) <= 1e-12
        assert ours["base moved"] == [] and ours["in sync"] and ours["metrics"]["updates"] >= 3
        assert set(ours["norms"]) == {layer_group(name) for name in start}
        assert {name for unit in ours["description"].units for name in unit.parameters} >= plain.keys()
    assert largest_difference(plain, start) > 1e-2


@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_after_several_updates_are_those_of_peft_on_any_mesh(folder: Path, ranks: RankPool, mesh: str) -> None:
    optim = OPTIMIZERS["sgd" if MESHES[mesh][2] > 1 else "adamw"]
    config = lora_settings(folder, mesh=axes(MESHES[mesh]), optim=optim, lora={"targets": WITH_HEAD})
    compare_training(ranks, folder, config, [*ALL, "lm_head"])


@pytest.mark.parametrize("model", ["tied llama", "phi3", "mixtral", "gpt_oss"])
def test_adapters_of_other_architectures_are_those_of_peft(
    tiny_folder: TinyFolder, ranks: RankPool, model: str
) -> None:
    kind, changes, ours, theirs = MODELS[model]
    folder = tiny_folder(kind, **{"vocab_size": 97, "intermediate_size": 55, **changes})
    config = lora_settings(folder, lora={"targets": ours}, mesh={"dp": 2}, optim=OPTIMIZERS["adamw"])
    compare_training(ranks, folder, config, theirs)


FULL, SELECTIVE = ({"activation_checkpointing": kind} for kind in ("full", "selective"))
SHARED = {"share_prefixes": "always"}
SPREAD: dict[str, dict[str, Any]] = {
    "keep_parameters, recomputed": {"fsdp": {"sharding": "keep_parameters"}, "mesh": {"dp": 2}, "model": FULL},
    "optimizer, shared prompts": {"fsdp": {"sharding": "optimizer"}, "mesh": {"dp": 2}, "batch": SHARED},
    "replicate, partly recomputed": {"fsdp": {"sharding": "replicate"}, "mesh": {"dp": 2}, "model": SELECTIVE},
    "on the host, whole": {"fsdp": {"cpu_offload": True, "sharding": "optimizer"}, "mesh": {"dp": 2, "cp": 2}},
    "small units": {"fsdp": {"wrap": ["Qwen3MLP", "Linear"]}, "mesh": {"cp": 2}},
    "clipped": {"optim": {"max_grad_norm": 0.01, "lr": 5.0}, "mesh": {"dp": 2}},
}


def spread_settings(folder: Path, targets: list[str], changes: dict[str, Any]) -> RunConfig:
    sections = {name: dict(values) for name, values in changes.items()}
    sections["model"] = {"path": str(folder), **sections.get("model", {})}
    return lora_settings(folder, lora={"targets": targets}, **sections)


@pytest.mark.parametrize("spread", SPREAD)
def test_adapters_are_those_of_peft_however_the_model_is_spread_and_stored(
    folder: Path, ranks: RankPool, spread: str
) -> None:
    compare_training(ranks, folder, spread_settings(folder, WITH_HEAD, SPREAD[spread]), [*ALL, "lm_head"])


@pytest.mark.parametrize(("target", "dp"), [("head", 2), ("*head", 1)])
def test_adapters_of_the_head_are_those_of_peft(folder: Path, ranks: RankPool, target: str, dp: int) -> None:
    config = lora_settings(folder, lora={"targets": [target]}, mesh={"dp": dp}, optim=OPTIMIZERS["adamw"])
    compare_training(ranks, folder, config, ["lm_head"])


ONE_STACK = {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.gate_up_proj"]}
ADAMW, SGD = OPTIMIZERS["adamw"], OPTIMIZERS["sgd"]
OF_EXPERTS: dict[str, tuple[list[str], Any, dict[str, Any]]] = {
    "cp 2, partly recomputed": (["*.mlp.experts"], EXPERTS, {"mesh": {"cp": 2}, "model": SELECTIVE, "optim": ADAMW}),
    "dp 2 x cp 2": (["experts"], EXPERTS, {"mesh": {"dp": 2, "cp": 2}, "optim": ADAMW}),
    "two copies of two shards": (["experts"], EXPERTS, {"mesh": {"dp_replicate": 2, "dp": 2}, "optim": SGD}),
    "one stack, one rank": (["*.1.*.gate_up_proj"], ONE_STACK, {"optim": SGD}),
    "keep_parameters, recomputed": (
        ["experts"],
        EXPERTS,
        {"fsdp": {"sharding": "keep_parameters"}, "mesh": {"dp": 2}, "model": FULL, "optim": SGD},
    ),
    "optimizer, shared prompts": (
        ["experts"],
        EXPERTS,
        {"fsdp": {"sharding": "optimizer"}, "mesh": {"dp": 2}, "batch": SHARED, "optim": ADAMW},
    ),
    "replicate, with the rest": (
        ["attention", "experts", "head"],
        {**EXPERTS, "target_modules": [*ALL[:4], "lm_head"]},
        {"fsdp": {"sharding": "replicate"}, "mesh": {"dp": 2}, "optim": ADAMW},
    ),
    "small units on the host": (
        ["*.experts.*"],
        EXPERTS,
        {"fsdp": {"wrap": ["Qwen3MoeExperts"], "cpu_offload": True}, "mesh": {"dp": 2}, "optim": ADAMW},
    ),
}


@pytest.mark.parametrize("case", OF_EXPERTS)
def test_adapters_of_experts_are_those_of_peft(tiny_folder: TinyFolder, ranks: RankPool, case: str) -> None:
    folder = tiny_folder("qwen3_moe", vocab_size=97)
    targets, theirs, changes = OF_EXPERTS[case]
    compare_training(ranks, folder, spread_settings(folder, targets, changes), theirs)


# ---------------------------------------------------------------------- the reference


@pytest.mark.parametrize(
    ("estimator", "mesh", "dtype", "targets"),
    [
        ("k3", "one rank", "float32", LAYERS),
        ("full", "one rank", "bfloat16", WITH_HEAD),
        ("full", "dp 2 x cp 2", "float32", WITH_HEAD),
    ],
    ids=str,
)
def test_the_reference_is_the_policy_without_adapters_and_no_second_copy(
    folder: Path, ranks: RankPool, mesh: str, dtype: str, estimator: str, targets: list[str]
) -> None:
    # one update a step: the first is at the weights that old log-probs are recomputed with
    sections: dict[str, Any] = {
        "mesh": axes(MESHES[mesh]),
        "precision": {"compute_dtype": dtype},
        "loss": {"kl_estimator": estimator, "epochs": 1, "old_log_probs": "recompute", "kl_coefficient": 0.1},
        "batch": {"samples_per_update": None},
        "optim": {"name": "adamw", "lr": 0.05},
        "lora": {"targets": targets},
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


def test_experts_without_their_adapters_are_the_reference_and_begin_as_it(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    config = lora_settings(
        tiny_folder("qwen3_moe", vocab_size=97),
        mesh={"dp": 2},
        precision={"compute_dtype": "bfloat16"},  # of which all experts are one grouped product
        loss={"kl_estimator": "full", "epochs": 1, "old_log_probs": "recompute", "kl_coefficient": 0.1},
        batch={"samples_per_update": None},
        optim={"name": "adamw", "lr": 0.05},
        lora={"targets": ["experts"]},
    )
    for life in ranks.run(2, life_of_adapters, config, fresh_batch()):
        kl = [values["kl_ref"] for values in life["metrics"]]
        assert kl[0] == 0.0 and min(kl[1:]) > 1e-4 and life["metrics"][0]["ratio"] == 1.0
        assert all(np.array_equal(said, life["before"]) for said in life["reference"])
        assert life["reference bytes"] == 0


def test_gradients_of_one_grouped_product_are_those_of_one_expert_after_the_other(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    folder = tiny_folder("qwen3_moe", vocab_size=97)
    config, batch = lora_settings(folder, lora={"targets": ["experts"]}), make_batch(folder)
    grouped = lora_settings(folder, lora={"targets": ["experts"]}, precision={"compute_dtype": "float32"})
    start, _, _ = ranks.run(1, lora_gradients, config, batch)[0]
    _, ours, _ = ranks.run(1, lora_gradients, grouped, batch)[0]
    plain = plain_gradients(folder, config, batch, start, EXPERTS)
    largest = max(gradient.abs().max().item() for gradient in plain.values())
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
    assert largest_difference({name: one.double() for name, one in ours.items()}, plain) <= 1e-4 * largest


# ---------------------------------------------------------------------- weights that leave


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("qwen3 with its head", "dp 2"),
        ("qwen3_moe", "dp 2"),
        ("tied llama", "one rank"),
        ("phi3", "cp 2"),
        ("gpt_oss", "dp 2 x cp 2"),
    ],
)
def test_engines_and_exports_get_what_peft_merges(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, model: str, mesh: str
) -> None:
    kind, changes, ours, theirs = MODELS[model]
    folder = tiny_folder(kind, **{"vocab_size": 97, "intermediate_size": 55, **changes})
    config, batch = lora_settings(folder, lora={"targets": ours}, mesh=axes(MESHES[mesh])), make_batch(folder)
    found = ranks.run(config.ranks, merged_weights, config, batch, tmp_path / "export")[0]
    plain = plain_training(folder, config, batch, found["start"], theirs)
    merged = plain.merged()
    assert largest_difference(found["engine"], merged) <= 1e-12
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    assert largest_difference(dict(exported.named_parameters()), found["engine"]) == 0
    chosen = theirs if isinstance(theirs, dict) else {"target_modules": theirs}
    ends = [f"{target}.weight" for target in chosen["target_modules"]] + list(chosen.get("target_parameters", []))
    changed = [name for name in found["base"] if name.endswith(tuple(ends))]
    assert found["came first"] == sorted(merged) and found["came"] == sorted(changed) != sorted(merged)
    assert found["bytes"] == 8 * sum(merged[name].numel() for name in changed)
    apart = [name for name, weight in merged.items() if not torch.equal(weight, found["base"][name])]
    assert sorted(apart) == sorted(changed)


def test_what_is_merged_is_rounded_once(folder: Path, ranks: RankPool, tmp_path: Path) -> None:
    # one rank, so that the product is computed as it is here
    config = lora_settings(folder, precision={"compute_dtype": "bfloat16"})
    found = ranks.run(1, merged_weights, config, make_batch(folder), tmp_path / "export")[0]
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, base in found["base"].items():
        assert base.dtype == found["engine"][name].dtype == torch.bfloat16
        expected = base.float()
        if (a := found["adapters"].get(name.replace("weight", "lora_A"))) is not None:
            b = found["adapters"][name.replace("weight", "lora_B")]
            assert a.dtype == b.dtype == torch.float32
            expected = torch.addmm(expected, b, a, alpha=found["scale"])
        assert torch.equal(exported[name], expected) and exported[name].dtype == torch.float32
        assert torch.equal(found["engine"][name], expected.bfloat16())


# ---------------------------------------------------------------------- checkpoints


HELD: dict[str, tuple[str, str, list[str], list[str]]] = {  # dtype, written on, targets, read elsewhere on
    "one rank": ("float64", "one rank", LAYERS, ["cp 2"]),
    "of experts": ("float64", "dp 2", ["experts", "head"], ["one rank", "two copies of two shards"]),
    "saved in the background": ("bfloat16", "dp 2", LAYERS, ["one rank"]),
}


@pytest.mark.parametrize("case", HELD)
def test_a_checkpoint_holds_the_adapters_and_moves_between_meshes(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, case: str
) -> None:
    dtype, mesh, targets, elsewhere = HELD[case]
    folder = tiny_folder("qwen3_moe", vocab_size=97) if "experts" in targets else tiny_folder(vocab_size=97)
    sections: dict[str, Any] = {
        "run": {"dir": str(tmp_path)},
        "optim": OPTIMIZERS["adamw"],
        "precision": {"compute_dtype": dtype},
        "checkpoint": {"async_save": case not in MESHES},
        "lora": {"targets": targets},
    }
    config, batches = lora_settings(folder, mesh=axes(MESHES[mesh]), **sections), [fresh_batch(n) for n in range(3)]
    straight = ranks.run(config.ranks, save_run, config, batches)[0]
    held = {name for file in straight["folder"].glob("*.safetensors") for name in load_file(file)}
    adapters = set(straight["adapters"])
    assert {name for name in held if name.startswith("model.")} == {f"model.{name}" for name in adapters}
    moments = {f"optimizer.{name}.{key}" for name in adapters for key in ("step", "exp_avg", "exp_avg_sq")}
    assert held == moments | {f"model.{name}" for name in adapters}
    again = ranks.run(config.ranks, load_run, config, batches)[0]
    assert again["losses"] == straight["losses"]
    assert largest_difference(again["adapters"], straight["adapters"]) == 0
    for other in elsewhere:
        there = lora_settings(folder, mesh=axes(MESHES[other]), **sections)
        for moved in ranks.run(there.ranks, load_run, there, batches):
            assert largest_difference(moved["loaded"], straight["saved"]) == 0
            if dtype == "float64":
                assert largest_difference(moved["adapters"], straight["adapters"]) <= 1e-12
            losses = [[float.fromhex(loss) for loss in life["losses"]] for life in (moved, straight)]
            assert losses[0] == pytest.approx(losses[1], rel=1e-12 if dtype == "float64" else 0.05)
    assert largest_difference(straight["saved"], straight["adapters"]) > 1e-2


def loads(rank: int, configs: list[RunConfig], batches: list[RolloutBatch]) -> list[dict[str, Any]]:
    return [load_run(rank, config, batches) for config in configs]


def test_a_checkpoint_of_other_adapters_or_none_or_other_weights_is_refused_by_name(
    folder: Path, tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path
) -> None:
    sections: dict[str, Any] = {"run": {"dir": str(tmp_path)}, "mesh": {"dp": 2}}
    sections["precision"] = {"compute_dtype": "float32"}
    config, batches = lora_settings(folder, **sections), [fresh_batch()]
    ranks.run(2, save_run, config, batches)
    other_weights = tiny_folder(vocab_size=97, intermediate_size=55, seed=1)
    others = {
        "lora.rank": lora_settings(folder, **sections, lora={"rank": 2}),
        "lora.alpha": lora_settings(folder, **sections, lora={"alpha": 8.0}),
        "lora.targets": lora_settings(folder, **sections, lora={"targets": ["mlp"]}),
        "precision.compute_dtype": lora_settings(folder, **{**sections, "precision": {"compute_dtype": "bfloat16"}}),
        "model.path": lora_settings(other_weights, **sections),
    }
    others["lora.rank of none"] = settings(folder, **sections)
    for lives in ranks.run(2, loads, list(others.values()), batches):
        for field, life in zip(others, lives, strict=True):
            error = life["error"]
            assert isinstance(error, CheckpointError), field
            assert error.field == field or ("lora.rank" in field and "lora.rank" in repr(error))


# ---------------------------------------------------------------------- what is refused


def refusals(rank: int, configs: list[RunConfig]) -> list[SlimeError | None]:
    return [error_of(lambda: Trainer(config, device=CPU)) for config in configs]  # noqa: B023


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str, list[str]]] = {
    "nothing": (
        "qwen3",
        {},
        {"targets": ["*.q_projj"]},
        "lora.targets",
        ["'*.q_projj'", "q_proj"],
    ),
    "a rank above a side": ("qwen3", {}, {"rank": 33}, "lora.rank", ["33", "q_proj", "64 x 32", "at most 32"]),
    "a tied head": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"targets": ["lm_head"]},
        "lora.targets",
        ["lm_head", "tie_word_embeddings"],
    ),
    "a tied head by its word": (
        "qwen3",
        {"tie_word_embeddings": True},
        {"targets": WITH_HEAD},
        "lora.targets",
        ["head"],
    ),
    "an embedding": ("qwen3", {}, {"targets": ["*embed*"]}, "lora.targets", ["model.embed_tokens", "outside"]),
    "a norm": ("qwen3", {}, {"targets": ["*.self_attn.*"]}, "lora.targets", ["q_norm", "Qwen3RMSNorm"]),
    "MLPs that are experts": ("qwen3_moe", {}, {}, "lora.targets", ["'mlp'", "no module"]),
    "a rank above a side of an expert": (
        "qwen3_moe",
        {},
        {"targets": ["experts"], "rank": 25},
        "lora.rank",
        ["25", "24"],
    ),
    "a router": ("qwen3_moe", {}, {"targets": ["*.mlp.gate"]}, "lora.targets", ["mlp.gate", "Qwen3MoeTopKRouter"]),
    "Conv1D": ("gpt2", {}, {}, "lora.targets", ["'attention'", "transformer.h.0.attn.c_attn", "Conv1D"]),
}


def test_what_can_have_no_adapter_is_refused_by_all_before_weights_are_read(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    configs = [
        lora_settings(tiny_folder(kind, **changes), lora=lora, mesh={"dp": 2})
        for kind, changes, lora, _, _ in REFUSED.values()
    ]
    for errors in ranks.run(2, refusals, configs):
        for (case, (*_, field, named)), error in zip(REFUSED.items(), errors, strict=True):
            assert isinstance(error, ConfigError) and error.field == field and error.hint, case
            assert all(part in str(error) for part in named), str(error)


def test_a_critic_trains_its_whole_head_and_no_adapter_of_it() -> None:
    critic = ValueModel(tiny_model())
    add_adapters(critic, Lora(3, 7.0, ["attention", "head"], seed=0), base_dtype=torch.float32)
    trained = [name for name, _ in critic.trained_weights() if "self_attn" not in name]
    assert trained == ["score.weight", "score.bias"]
    # as the targets of a folder at lora.path, which names the modules of the policy
    critic = ValueModel(tiny_model())
    add_adapters(critic, Lora(3, 7.0, ["model.layers.0.mlp.up_proj", "lm_head"], seed=0), base_dtype=torch.float32)
    assert [name for name, _ in critic.trained_weights() if "mlp.up_proj" not in name] == trained
    for head in (["head"], ["lm_head"]):
        with refused(ConfigError, "lora.targets", head):
            add_adapters(ValueModel(tiny_model()), Lora(3, 7.0, head, seed=0), base_dtype=torch.float32)


# ---------------------------------------------------------------------- the example
