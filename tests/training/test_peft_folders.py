"""Training begins from adapters that peft trained and goes on as peft would; what it leaves, peft opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slimefsdp.config import RunConfig
from slimefsdp.convert.convert import checkpoint_to_hugging_face
from slimefsdp.errors import CheckpointError, ConfigError, ModelError, SlimeError
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.peft_folders import (
    ContinuedStep,
    adapters_in,
    begun,
    continued,
    farthest,
    logits_of,
    merged_logits,
    metadata_of,
    opened_by_peft,
    rewrite,
    trained_by_peft,
)
from tests.support.plain_lora import ALL, EXPERTS, adapters_of, save_run
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import error_of, fresh_batch

CPU = torch.device("cpu")
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "qwen3": ("qwen3", {}, ["q_proj", "v_proj", "down_proj", "lm_head"]),
    "tied llama": ("llama", {"tie_word_embeddings": True}, "all-linear"),
    "phi3": ("phi3", {}, FUSED),
    "qwen3_moe": ("qwen3_moe", {}, {**EXPERTS, "target_modules": ["q_proj"]}),
    "mixtral": ("mixtral", {"intermediate_size": 24}, {**EXPERTS, "target_parameters": ["experts.down_proj"]}),
    "gpt_oss": ("gpt_oss", {"intermediate_size": 24}, {**EXPERTS, "target_modules": ["lm_head"]}),
}
MESHES: dict[str, dict[str, int]] = {"dp 2": {"dp": 2}, "one rank": {}, "cp 2": {"cp": 2}}


def lora_settings(base: Path, **sections: Any) -> RunConfig:
    return settings(base, lora={"rank": 3, "alpha": 7.0}, **sections)


@pytest.fixture
def trained(folder: Path, tmp_path: Path) -> Path:
    """Adapters of rank 3 and alpha 7, which peft trained on `folder`."""
    return trained_by_peft(folder, lora_settings(folder), make_batch(folder), tmp_path / "trained", ALL)


OPTIMIZERS: dict[str, dict[str, Any]] = {"sgd": {"name": "sgd"}, "adamw": {"name": "adamw", "lr": 0.01, "eps": 1e-4}}
CASES = [
    ("qwen3", "dp 2", "sgd"),
    ("qwen3_moe", "dp 2", "adamw"),
    ("tied llama", "one rank", "adamw"),
    ("phi3", "cp 2", "adamw"),
    ("mixtral", "one rank", "adamw"),
    ("gpt_oss", "cp 2", "adamw"),
]


@pytest.mark.parametrize(("model", "mesh", "optimizer"), CASES)
def test_training_goes_on_from_a_folder_of_peft_as_peft_would_and_peft_opens_what_comes_of_it(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, model: str, mesh: str, optimizer: str
) -> None:
    kind, changes, targets = MODELS[model]
    base = tiny_folder(kind, **{"vocab_size": 97, "intermediate_size": 55, **changes})
    before = lora_settings(base, optim={"lr": 1e-4})  # far from there, gradients are so large that 1e-12 is no rounding
    theirs = trained_by_peft(base, before, make_batch(base, seed=1), tmp_path / "peft", targets)
    config = settings(base, lora={"path": str(theirs)}, mesh=MESHES[mesh], optim=OPTIMIZERS[optimizer])
    batch = make_batch(base)
    found = ranks.run(config.ranks, continued, config, batch, tmp_path / "out")
    with KeepFloat64():
        plain = ContinuedStep(base, config, theirs)
        plain.backward(batch, np.arange(batch.num_samples))
        gradients = plain.gradients()
        plain.optimizer.zero_grad()
        plain.train(batch, plan_training(config, batch))
    for ours in found:
        assert (ours["settings"].rank, ours["settings"].alpha) == (3, 7.0)
        assert largest_difference(ours["start"], adapters_in(theirs)) == 0
        assert largest_difference(ours["gradients"], gradients) <= 1e-12
        assert largest_difference(ours["end"], plain.weights()) <= 1e-12
        assert ours["in sync"]
    assert largest_difference(found[0]["end"], found[0]["start"]) > 1e-3
    adapter = tmp_path / "out" / "adapter"
    assert largest_difference(adapters_in(adapter), found[0]["end"]) == 0
    theirs_now = logits_of(plain.model, batch)
    assert farthest(opened_by_peft(base, adapter, batch), theirs_now) <= 1e-12
    assert farthest(merged_logits(tmp_path / "out" / "merged", batch), theirs_now) <= 1e-12
    again = ranks.run(1, begun, settings(base, lora={"path": str(adapter)}))[0]
    assert largest_difference(again["start"], found[0]["end"]) == 0


# ---------------------------------------------------------------------- in


def test_a_copy_that_rank_0_alone_has_is_read_for_all(folder: Path, ranks: RankPool, trained: Path) -> None:
    sections: dict[str, Any] = {"lora": {"path": str(trained)}, "mesh": {"dp": 2}}
    config = settings(folder, **{**sections, "model": {"path": str(folder), "read": "first_rank"}})
    for ours in ranks.run(2, begun_where_only_rank_0_has_it, config):
        assert largest_difference(ours["start"], adapters_in(trained)) == 0


def begun_where_only_rank_0_has_it(rank: int, config: RunConfig) -> dict[str, Any]:
    if rank:
        nowhere = config.lora.model_copy(update={"path": Path("/nowhere")})
        config = config.model_copy(update={"lora": nowhere})
    return begun(rank, config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_adapters_of_a_half_precision_begin_as_the_same_values(
    folder: Path, ranks: RankPool, trained: Path, dtype: str
) -> None:
    halved = {
        name: tensor.to(getattr(torch, dtype))
        for name, tensor in load_file(trained / "adapter_model.safetensors").items()
    }
    rewrite(trained, tensors=dict(halved))
    ours = ranks.run(1, begun, settings(folder, lora={"path": str(trained)}))[0]["start"]
    assert {value.dtype for value in ours.values()} == {torch.float64}
    assert largest_difference(ours, adapters_in(trained)) == 0


def test_what_the_settings_say_too_must_be_what_the_folder_says(folder: Path, ranks: RankPool, trained: Path) -> None:
    same = {"rank": 3, "alpha": 7.0, "targets": ["attention", "*.mlp.*"]}
    config = settings(folder, lora={"path": str(trained), **same})
    assert largest_difference(ranks.run(1, begun, config)[0]["start"], adapters_in(trained)) == 0
    for field, given, values in (
        ("lora.rank", {"rank": 4}, ["lora.rank=4", 3, trained]),
        ("lora.alpha", {"alpha": 8.0}, ["lora.alpha=8.0", 7.0, trained]),
        ("lora.targets", {"targets": ["attention"]}, ["lora.targets=['attention']", "mlp.down_proj", trained]),
    ):
        config = settings(folder, lora={"path": str(trained), **given}, mesh={"dp": 2})
        for (error,) in ranks.run(2, refusal, config):
            assert_refusal(error, ConfigError, field, *values)


def refusal(rank: int, config: RunConfig) -> list[SlimeError | None]:
    return [error_of(lambda: Trainer(config, device=CPU))]


A = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
B = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
SPOILED = torch.zeros(32, 3, dtype=torch.float64)
SPOILED[-1, -1] = float("nan")  # in the rows of the last rank
OF_RANKS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor | None], list[str]]] = {
    "NaN": ({}, {B: SPOILED}, [B, "NaN"]),
    "a module that target_modules chooses": ({}, {A: None, B: None}, [A, "is missing", "v_proj"]),
    "all-linear": ({"target_modules": "all-linear"}, {A: None, B: None}, [A, "is missing"]),
    "a module that the model lacks": (
        {"target_modules": [*ALL, "x"]},
        {"base_model.model.x.lora_A.weight": SPOILED.T.contiguous(), "base_model.model.x.lora_B.weight": SPOILED},
        ["base_model.model.x.lora_A.weight", "x.weight", "32 x 32"],
    ),
    "another shape": ({}, {A: torch.zeros(3, 33)}, [A, "32 x 33", "32 x 32"]),
}


@pytest.mark.parametrize("case", OF_RANKS)
def test_a_tensor_that_does_not_fit_the_model_is_named_by_all_ranks(
    folder: Path, ranks: RankPool, trained: Path, case: str
) -> None:
    config, tensors, named = OF_RANKS[case]
    rewrite(trained, config=config, tensors=tensors)
    for (error,) in ranks.run(2, refusal, settings(folder, lora={"path": str(trained)}, mesh={"dp": 2})):
        assert_refusal(error, ModelError, "lora.path", *named)


def test_adapters_that_were_trained_beside_other_weights_are_refused_by_all(
    folder: Path, tiny_folder: TinyFolder, ranks: RankPool, trained: Path, tmp_path: Path
) -> None:
    config = settings(folder, lora={"path": str(trained)}, mesh={"dp": 2})
    ranks.run(2, exported, config, tmp_path / "ours")
    digest = metadata_of(tmp_path / "ours")["slimefsdp.base_digest"]
    other = tiny_folder(vocab_size=97, intermediate_size=55, seed=1)
    for path, may_begin in ((tmp_path / "ours", False), (trained, True)):  # peft records no digest
        errors = ranks.run(2, refusal, settings(other, lora={"path": str(path)}, mesh={"dp": 2}))
        for (error,) in errors:
            assert (error is None) == may_begin
            if not may_begin:
                assert_refusal(error, ModelError, "lora.path", digest, tmp_path / "ours", other)
    # of other bits that stand for the same weights, nothing is known
    config = settings(folder, lora={"path": str(tmp_path / "ours")}, precision={"compute_dtype": "float32"})
    assert ranks.run(1, refusal, config) == [[None]]


# ---------------------------------------------------------------------- out


def exported(rank: int, config: RunConfig, folder: Path) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    said = trainer.export_adapter(folder) if config.lora.are_trained else None
    return {
        "said": said,
        "adapters": adapters_of(trainer),
        "again": error_of(lambda: trainer.export_adapter(folder)),
        "no path": error_of(lambda: trainer.export_adapter(3)),  # type: ignore[arg-type]
    }


def saved_and_exported(rank: int, config: RunConfig, out: Path) -> Path:
    trainer = Trainer(config, device=CPU)
    trainer.train_step(fresh_batch())
    trainer.save(1)
    trainer.finish_save()
    return trainer.export_adapter(out)


def test_a_checkpoint_of_adapters_becomes_the_folder_that_the_run_exports(
    folder: Path, tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path
) -> None:
    config = lora_settings(folder, run={"dir": str(tmp_path / "run")}, mesh={"dp": 2})
    ours = ranks.run(2, saved_and_exported, config, tmp_path / "exported")[0]
    specs = checkpoint_to_hugging_face(tmp_path / "run", tmp_path / "made", None, dtype=None, note=print)
    assert len(specs) == len(adapters_in(ours))
    assert largest_difference(adapters_in(tmp_path / "made"), adapters_in(ours)) == 0
    said, wanted = (json.loads((path / "adapter_config.json").read_text()) for path in (tmp_path / "made", ours))
    assert said | {"target_modules": None} == wanted | {"target_modules": None}
    assert sorted(said["target_modules"]) == sorted(wanted["target_modules"])
    assert metadata_of(tmp_path / "made") == metadata_of(ours)
    checkpoint_to_hugging_face(tmp_path / "run", tmp_path / "half", folder, dtype="bfloat16", note=print)
    halved = adapters_in(tmp_path / "half")
    assert {tensor.dtype for tensor in halved.values()} == {torch.bfloat16}
    assert largest_difference(halved, {name: one.bfloat16() for name, one in adapters_in(ours).items()}) == 0
    other = tiny_folder("llama", vocab_size=97, intermediate_size=55)
    error = error_of(
        lambda: checkpoint_to_hugging_face(tmp_path / "run", tmp_path / "no", other, dtype=None, note=print)
    )
    assert isinstance(error, CheckpointError) and not (tmp_path / "no").exists()


def resumed(rank: int, config: RunConfig) -> dict[str, Any]:
    trainer = Trainer(config, device=CPU)
    trainer.load()
    return {"adapters": adapters_of(trainer)}


def test_a_run_that_began_from_a_folder_resumes_from_its_checkpoint(
    folder: Path, ranks: RankPool, trained: Path, tmp_path: Path
) -> None:
    config = settings(folder, lora={"path": str(trained)}, run={"dir": str(tmp_path / "run")}, mesh={"dp": 2})
    batches = [fresh_batch(seed) for seed in range(1)]
    saved = ranks.run(2, save_run, config, batches)[0]
    assert largest_difference(ranks.run(2, resumed, config)[0]["adapters"], saved["adapters"]) == 0
    assert largest_difference(saved["adapters"], adapters_in(trained)) > 0
