"""The value model: values and gradients of plain token classifiers, heads that begin at zero, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.mesh import build_mesh
from slimefsdp.errors import ModelError
from slimefsdp.models.build import build_model, load_model
from slimefsdp.models.decoder import ValueModel
from slimefsdp.models.hf_folder import SINGLE_FILE, read_model_folder
from slimefsdp.models.load_weights import check_tensor_names
from slimefsdp.training.packs import RankPacks, evaluate, micro_batches
from tests.support.all_pairs import all_pairs
from tests.support.classifiers import plain_classifier, save_classifier, separate_values
from tests.support.float64 import KeepFloat64
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused
from tests.support.tiny_models import SIZES, TinyFolder, save_tiny_model

CPU = torch.device("cpu")
SHAPES = ((30, 10), (2, 1), (9, 3), (70, 60), (8, 7), (7, 1))
WITH_CLASSIFIER = ("qwen3", "llama", "qwen2", "mistral", "gemma2", "phi3", "glm4", "qwen3_moe", "mixtral", "gpt_oss")
WITHOUT = ("gpt2", "gemma3_text", "olmo2")


def some_batch() -> RolloutBatch:
    rng = np.random.default_rng(0)
    return RolloutBatch.from_samples(
        [{"tokens": rng.integers(0, SIZES["vocab_size"], n).tolist(), "response_length": r} for n, r in SHAPES]
    )


def load_value_model(path: Path, dtype: torch.dtype = torch.float64, **options: Any) -> ValueModel:
    mesh = build_mesh(dist.get_world_size(), 1, CPU)
    return load_model(ValueModel, read_model_folder(path), mesh, Parallelism(dtype, dtype), **options)


def packed_values(model: ValueModel, batch: RolloutBatch) -> torch.Tensor:
    """[R] in the batch's order, all samples in one pack, every rank the same."""
    mesh = build_mesh(dist.get_world_size(), 1, CPU)
    order = np.array([3, 1, 0, 5, 4, 2])
    (micro_batch,) = micro_batches(RankPacks(batch, [order]), model.attention, mesh, trained_only=False)
    (values,) = evaluate(model, micro_batch, mesh)
    return values.new_zeros(batch.num_response_tokens).index_put((micro_batch.packed.response_index,), values)


def values_and_gradients(rank: int, path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    batch = some_batch()
    with KeepFloat64():
        model = load_value_model(path, dtype)
        values = packed_values(model, batch)
        (values * torch.arange(len(values)).sin()).sum().backward()
    gradients = {}
    for name, parameter in model.named_weights():
        assert isinstance(parameter.grad, DTensor), name
        gradients[name] = parameter.grad.full_tensor()
    return values.detach(), gradients


@pytest.mark.parametrize("kind", WITH_CLASSIFIER)
def test_a_pack_gives_the_values_and_gradients_of_a_plain_token_classifier(
    tmp_path: Path, ranks: RankPool, kind: str
) -> None:
    path, batch = save_classifier(tmp_path, kind), some_batch()
    ((values, gradients),) = ranks.run(1, values_and_gradients, path, torch.float64)
    with KeepFloat64():
        plain = plain_classifier(path)
        expected = separate_values(plain, batch)
        (expected * torch.arange(len(expected)).sin()).sum().backward()
    assert values.dtype == torch.float64 and expected.abs().max() > 0.1
    assert (values - expected).abs().max() <= 1e-12 * expected.detach().abs().max()
    theirs = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()}
    assert gradients.keys() == theirs.keys()
    floor = 1e-3 * max(float(gradient.abs().max()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        difference = (gradients[name] - gradient).abs().max()
        assert difference <= 1e-12 * gradient.abs().max().clamp(min=floor), name


def values_from_a_causal_lm(rank: int, path: Path, random_seed: int | None) -> tuple[float, list[str]]:
    batch = some_batch()
    model = load_value_model(path, torch.float32, random_seed=random_seed)
    values = packed_values(model, batch)
    assert values.dtype == torch.float32
    values.sum().backward()
    score = dict(model.named_weights())["score.bias"]
    assert isinstance(score.grad, DTensor) and score.grad.full_tensor() == dist.get_world_size() * len(values)
    return float(values.detach().abs().max()), [name for name, _ in model.named_weights()]


@pytest.mark.parametrize(("kind", "seed", "tie"), all_pairs(("qwen3", *WITHOUT), (None, 5), (False, True)))
def test_on_a_causal_lm_every_value_begins_at_exactly_zero(
    tiny_folder: TinyFolder, ranks: RankPool, tie: bool, seed: int | None, kind: str
) -> None:
    path = tiny_folder(kind, tie_word_embeddings=tie)
    for largest, names in ranks.run(2, values_from_a_causal_lm, path, seed):
        assert largest == 0.0
        assert {"score.weight", "score.bias"} <= set(names) and "lm_head.weight" not in names


def read_decoder(rank: int, path: Path) -> dict[str, torch.Tensor]:
    named = load_value_model(path, torch.float32).named_weights()
    return {name: parameter.full_tensor().detach().clone() for name, parameter in named}  # type: ignore[attr-defined]


def test_the_decoder_is_the_folders_own_whether_or_not_a_tied_head_was_saved(tmp_path: Path, ranks: RankPool) -> None:
    path = save_tiny_model(tmp_path, tie_word_embeddings=True)
    stored = load_file(path / SINGLE_FILE)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, path / SINGLE_FILE, metadata={"format": "pt"})
    for found in ranks.run(2, read_decoder, path):
        assert found.keys() - {"score.weight", "score.bias"} == stored.keys() - {"lm_head.weight"}
        assert all(torch.equal(found[name], stored[name]) for name in stored if name != "lm_head.weight")


def check_refusal(path: Path, field: str, *values: object) -> None:
    folder = read_model_folder(path)
    with refused(ModelError, field, *values):
        check_tensor_names(build_model(ValueModel, folder, torch.float32), folder)


def test_a_classifiers_head_is_wanted_whole_and_alone(tmp_path: Path) -> None:
    path = save_classifier(tmp_path)
    stored = load_file(path / SINGLE_FILE)
    for broken, name in (
        ({name: tensor for name, tensor in stored.items() if name != "score.bias"}, "score.bias"),
        (stored | {"lm_head.weight": torch.zeros(96, 32)}, "lm_head.weight"),
        (stored | {"extra": torch.zeros(1)}, "extra"),
    ):
        save_file(broken, path / SINGLE_FILE, metadata={"format": "pt"})
        check_refusal(path, "model.path", repr(name))


@pytest.mark.parametrize("kind", WITHOUT)
def test_an_architecture_without_a_token_classifier_is_not_exported(tiny_folder: TinyFolder, kind: str) -> None:
    folder = read_model_folder(tiny_folder(kind))
    with refused(ModelError, "critic.path", kind):
        build_model(ValueModel, folder, torch.float32).exported_config(folder.config)
