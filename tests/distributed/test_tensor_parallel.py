"""Tensor parallelism: any model on any mesh with tp ranks ends with the weights of one plain process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp._fully_shard import _fsdp_common
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import require_mesh_per_parameter
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import check_parallel
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.trainer import Trainer
from slimefsdp.training.plan import plan_training
from tests.support import plain_lora
from tests.support.classifiers import save_classifier
from tests.support.comparisons import largest_difference
from tests.support.float64 import KeepFloat64
from tests.support.plain_critic import PlainCritic, critic_batch, critic_settings, plain_targets
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.shared_layers import (
    COMPOSED,
    difference_from_plain,
    difference_of_checkpoints,
    digest_of_weights,
    on_mesh,
)
from tests.support.tiny_models import TinyFolder, save_pair

CPU = torch.device("cpu")
DEFAULT_CASES = 2
ON_TWO = {"mesh": {"tp": 2}}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CASES = [
    ("qwen3", TIED, on_mesh(1, 1, 1, 2)),
    ("qwen3", UNTIED, on_mesh(1, 1, 1, 2)),
    ("qwen3_moe", UNTIED, on_mesh(1, 1, 1, 2)),
    ("qwen3", UNTIED, on_mesh(1, 1, 1, 4)),  # two key-value heads
    ("qwen3", UNTIED, on_mesh(1, 2, 1, 2)),
    *(("qwen3", TIED, on_mesh(1, 1, 2, 2, strategy)) for strategy in ("ring", "all_gather", "ulysses")),
    ("qwen3", UNTIED, on_mesh(2, 2, 1, 2)),
    ("llama", {"attention_bias": True, "mlp_bias": True}, on_mesh(1, 1, 1, 2)),
    ("llama", {"attention_bias": True, "mlp_bias": True}, on_mesh(1, 1, 1, 4)),
    ("qwen2", {}, on_mesh(1, 1, 2, 2, "all_gather")),
    ("gemma2", {}, on_mesh(1, 2, 1, 2)),
    ("gemma3_text", {}, on_mesh(1, 1, 1, 2)),
    ("mistral", {}, on_mesh(1, 2, 1, 2)),
    ("gpt_oss", {}, on_mesh(1, 1, 1, 2)),
    ("mixtral", {}, on_mesh(1, 1, 2, 2, "ring")),
]


@pytest.mark.parametrize(("kind", "changes", "mesh"), CASES)
def test_weights_after_three_updates_equal_a_plain_process(
    tiny_folder: TinyFolder, ranks: RankPool, kind: str, changes: dict[str, Any], mesh: dict[str, Any]
) -> None:
    assert difference_from_plain(ranks, tiny_folder(kind, **changes), **mesh) <= 1e-12


@pytest.mark.parametrize("sections", COMPOSED, ids=str)
def test_it_composes_with_recomputation_and_sharding_levels(
    tiny_folder: TinyFolder, ranks: RankPool, sections: dict[str, Any]
) -> None:
    path = tiny_folder("qwen3", tie_word_embeddings=True)
    assert difference_from_plain(ranks, path, **ON_TWO, **sections) <= 1e-12


def compiled_adapters(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    import torch._dynamo

    torch._dynamo.utils.clear_compilation_metrics()
    found = plain_lora.lora_training(rank, config, batch)
    code, graphs = Qwen3MLP.forward.__code__, torch._dynamo.utils.get_compilation_metrics()
    starts = {(graph.co_filename, graph.co_firstlineno) for graph in graphs}
    return found | {"mlp is compiled": (code.co_filename, code.co_firstlineno) in starts}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on a CPU")
def test_compiled_blocks_train_weights_and_adapters_as_a_plain_process_does(
    tiny_folder: TinyFolder, ranks: RankPool
) -> None:
    path = tiny_folder("qwen3", tie_word_embeddings=True, num_hidden_layers=1)
    compiled: dict[str, Any] = ON_TWO | {"model": {"path": str(path), "compile": True}}
    assert difference_from_plain(ranks, path, **compiled) <= 1e-12
    optim, lora = {"name": "sgd", "lr": 0.05}, {"rank": 3, "alpha": 7.0}
    config, batch = settings(path, lora=lora, optim=optim, **compiled), make_batch(path)
    for ours in ranks.run(config.ranks, compiled_adapters, config, batch):
        plain = plain_lora.plain_training(path, config, batch, ours["start"], plain_lora.ALL).weights()
        assert largest_difference(ours["end"], plain) <= 1e-12 and ours["mlp is compiled"]


# ---------------------------------------------------------------------- adapters, critic, exact KL

OVER_TP = [on_mesh(1, 1, 1, 2), on_mesh(1, 2, 1, 2), on_mesh(1, 1, 1, 4), on_mesh(1, 1, 2, 2, "ring")]


@pytest.mark.parametrize("mesh", OVER_TP)
def test_adapters_of_every_matrix_are_those_of_peft(
    tiny_folder: TinyFolder, ranks: RankPool, mesh: dict[str, Any]
) -> None:
    targets = [*plain_lora.ALL, "lm_head"]
    optim = {"name": "sgd", "lr": 0.05}
    path = tiny_folder("qwen3", tie_word_embeddings=False)
    config = settings(path, lora={"rank": 3, "alpha": 7.0, "targets": targets}, optim=optim, **mesh)
    batch = make_batch(path)
    found = ranks.run(config.ranks, plain_lora.lora_training, config, batch)
    start = found[0]["start"]
    plain = plain_lora.plain_training(path, config, batch, start, targets).weights()
    assert largest_difference(plain, start) > 1e-2
    for ours in found:
        assert largest_difference(ours["start"], start) == 0
        assert largest_difference(ours["end"], plain) <= 1e-12
        assert ours["base moved"] == [] and ours["in sync"]


def exported_adapters(rank: int, config: RunConfig, target: Path) -> plain_lora.Weights:
    trainer = Trainer(config, device=CPU)
    plain_lora.fill_b(trainer)
    trainer.export_adapter(target)
    return plain_lora.adapters_of(trainer)


def adapters_of_folder(rank: int, config: RunConfig) -> plain_lora.Weights:
    return plain_lora.adapters_of(Trainer(config, device=CPU))


def test_a_peft_folder_is_written_and_read_over_tp(tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path) -> None:
    path, target = tiny_folder("qwen3", tie_word_embeddings=False), tmp_path / "adapter"
    lora = {"rank": 3, "alpha": 7.0, "targets": [*plain_lora.ALL, "lm_head"]}
    exported = ranks.run(2, exported_adapters, settings(path, lora=lora, **ON_TWO), target)[0]
    for mesh in ({}, {"tp": 2}):
        config = settings(path, lora={"path": str(target)}, mesh=mesh)
        for read in ranks.run(config.ranks, adapters_of_folder, config):
            assert largest_difference(read, exported) == 0


@pytest.mark.parametrize("mesh", OVER_TP)
def test_engines_and_exports_get_the_merged_weights(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    path = tiny_folder("llama", attention_bias=True, mlp_bias=True)
    lora = {"rank": 3, "alpha": 7.0, "targets": plain_lora.ALL}
    config = settings(path, lora=lora, **mesh)
    found = ranks.run(config.ranks, plain_lora.merged_weights, config, make_batch(path), tmp_path / "exported")[0]
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert set(exported) == set(found["engine"]) == set(found["base"])
    for name, base in found["base"].items():
        stem = name.removesuffix(".weight")
        merged = base
        if f"{stem}.lora_A" in found["adapters"]:
            a, b = (found["adapters"][f"{stem}.lora_{matrix}"] for matrix in "AB")
            merged = base + found["scale"] * b @ a
            assert (merged - base).abs().max() > 1e-3
        for theirs in (exported[name], found["engine"][name]):
            assert (theirs - merged).abs().max() <= 1e-14


@pytest.mark.parametrize("mesh", OVER_TP)
def test_a_critic_trains_as_one_plain_process(tmp_path: Path, ranks: RankPool, mesh: dict[str, Any]) -> None:
    path = save_classifier(tmp_path / "critic")
    config = critic_settings(path, **mesh, batch={"max_tokens_per_rank": 48}, loss={"epochs": 1})
    batch = critic_batch()
    targets, plan = plain_targets(batch), plan_training(config, batch, loss="value")
    with KeepFloat64():
        plain = PlainCritic(path, config)
        for update in range(len(plan.updates)):
            plain.backward(batch, targets, plan.samples_of(update))
            plain.step()
    for found in ranks.run(config.ranks, critic_weights, config, batch):
        assert largest_difference(found, plain.weights()) <= 1e-12


def critic_weights(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, torch.Tensor]:
    with KeepFloat64():
        trainer = Trainer(config, "critic", device=CPU)
        trainer.train_step(batch)
    return {name: p.full_tensor().detach() for name, p in trainer.policy.named_weights()}


def of_exact_kl(rank: int, config: RunConfig, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], Any]:
    with KeepFloat64():
        trainer = Trainer(config, device=CPU)
        metrics = trainer.forward_backward(batch)
        log_probs = trainer.compute_log_probs(batch)
    return {name: p.grad.full_tensor() for name, p in trainer.policy.named_weights()}, (metrics, log_probs)


@pytest.mark.parametrize("mesh", OVER_TP)
@pytest.mark.parametrize("kind", ["gemma2"])
def test_the_exact_kl_over_a_cut_vocabulary_is_that_of_one_rank(
    tmp_path: Path, ranks: RankPool, mesh: dict[str, Any], kind: str
) -> None:
    policy, reference = save_pair(tmp_path, kind=kind, vocab_size=96, intermediate_size=56)
    loss = {"kl_estimator": "full", "entropy_coefficient": 0.05}
    sections = {"loss": loss, "reference": {"path": str(reference)}, "batch": {"max_tokens_per_rank": 64}}
    batch = make_batch(policy).replace(ref_log_probs=None)
    if "attention" in mesh:
        mesh = mesh | {"attention": {"strategy": "all_gather"}}
    config = settings(policy, **sections, **mesh)
    gradients, (metrics, log_probs) = ranks.run(1, of_exact_kl, settings(policy, **sections), batch)[0]
    assert max(gradient.abs().max().item() for gradient in gradients.values()) > 0.05
    for found, (ours, of_ranks) in ranks.run(config.ranks, of_exact_kl, config, batch):
        assert largest_difference(found, gradients) <= 1e-12
        for name in ("kl_ref", "entropy", "loss", "num_tokens"):
            assert name not in metrics or abs(ours[name] - metrics[name]) <= 1e-12 * max(1.0, abs(metrics[name])), name
        np.testing.assert_allclose(of_ranks.log_probs, log_probs.log_probs, rtol=0, atol=1e-6)
        np.testing.assert_allclose(of_ranks.entropy, log_probs.entropy, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (on_mesh(1, 1, 1, 2), on_mesh(1, 1, 1, 1)),
        (on_mesh(1, 1, 1, 1), on_mesh(1, 1, 1, 2)),
        (on_mesh(1, 2, 1, 2), on_mesh(1, 1, 1, 4)),
        (on_mesh(1, 1, 1, 4), on_mesh(1, 3, 1, 1)),
        (on_mesh(1, 3, 1, 1), on_mesh(2, 1, 1, 2)),
        (on_mesh(2, 2, 1, 2), on_mesh(1, 1, 2, 2)),
    ],
)
def test_a_checkpoint_of_any_mesh_loads_on_any_other(
    tiny_folder: TinyFolder, ranks: RankPool, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    path = tiny_folder("llama", attention_bias=True, mlp_bias=True)
    assert difference_of_checkpoints(ranks, path, tmp_path, first, second) == []


@pytest.mark.parametrize("tp", [2, 4])
def test_weights_read_or_drawn_are_those_of_one_rank(tiny_folder: TinyFolder, ranks: RankPool, tp: int) -> None:
    path = tiny_folder("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    models = [{"read": "every_rank"}, {"read": "first_rank"}, {"init": "random"}]
    alone = ranks.run(1, digest_of_weights, [settings(path, model=model) for model in models])[0]
    assert alone[0] == alone[1] != alone[2]
    configs = [settings(path, model=model, mesh={"tp": tp}) for model in models]
    for digests in ranks.run(tp, digest_of_weights, configs):
        assert digests == alone


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "changes", "tp", "problem"),
    [
        ("phi3", {}, 2, "a model of type phi3"),
        ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2}, 4, "6 attention heads"),
        ("qwen3", {"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "3 key-value heads"),
        ("qwen3", {"intermediate_size": 55}, 2, "55 rows of the MLP"),
        ("qwen3", {"vocab_size": 97}, 2, "97 words of the vocabulary"),
    ],
)
def test_a_model_that_tp_cannot_cut_is_refused_before_a_rank_starts(
    tiny_folder: TinyFolder, kind: str, changes: dict[str, Any], tp: int, problem: str
) -> None:
    config = read_model_folder(tiny_folder(kind, **changes)).config
    with pytest.raises(ConfigError, match=problem) as caught:
        check_parallel(config, tp, 1)
    assert caught.value.field == "mesh.tp" and caught.value.hint
    check_parallel(config, 1, 1)


@pytest.mark.parametrize(
    "sections",
    [
        {"optim": {"name": "muon", "lr": 0.01}},
        {"optim": {"name": "adamw", "state_dtype": "8bit"}},
        {"fsdp": {"sharding": "replicate"}},
        {"fsdp": {"wrap": ["Linear"]}},
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_tp_are_refused(tmp_path: Path, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"mesh\.tp=2"):
        settings(tmp_path, **ON_TWO, **sections)


def test_a_torch_with_one_mesh_for_all_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_mesh_per_parameter()
    monkeypatch.delattr(_fsdp_common, "ShardPlacementResult")
    with pytest.raises(ConfigError, match="takes a mesh for each parameter") as error:
        require_mesh_per_parameter()
    assert error.value.field == "mesh.tp"
