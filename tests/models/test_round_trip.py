"""Folder -> Trainer -> folder: every tensor comes back bit for bit, and transformers computes the same with it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimefsdp.errors import CheckpointError, ConfigError, SlimeError
from slimefsdp.models.hf_folder import SINGLE_FILE
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.refusals import assert_refusal
from tests.support.tiny_models import ARCHITECTURES, save_tiny_model
from tests.support.trainers import CPU, settings

TOKENS = torch.arange(3, 35).view(2, 16)


def export_each(rank: int, folders: list[tuple[Path, Path, str]]) -> None:
    for path, out, dtype in folders:
        Trainer(settings(path, mesh={"dp": 2}), device=CPU).export_hf(out, dtype)


def opened(path: Path) -> tuple[torch.dtype, torch.Tensor]:
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        return model.dtype, model.eval()(input_ids=TOKENS).logits


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_what_is_loaded_and_exported_is_the_source_in_every_bit(tmp_path: Path, ranks: RankPool, kind: str) -> None:
    folders = [
        (
            save_tiny_model(tmp_path / f"{tie}-{dtype}", kind, tie_word_embeddings=tie, dtype=getattr(torch, dtype)),
            tmp_path / f"{tie}-{dtype}-out",
            dtype,
        )
        for tie in (False, True)
        for dtype in ("float32", "bfloat16")
    ]
    ranks.run(2, export_each, folders)
    for path, out, dtype in folders:
        source, exported = load_file(path / SINGLE_FILE), load_file(out / SINGLE_FILE)
        assert exported.keys() == source.keys()
        for name, tensor in source.items():
            assert exported[name].dtype == tensor.dtype == getattr(torch, dtype), name
            assert torch.equal(exported[name], tensor), name
        assert opened(out)[0] == getattr(torch, dtype) and torch.equal(opened(out)[1], opened(path)[1])


def export_as(rank: int, path: Path, out: Path, dtypes: list[str | None]) -> list[SlimeError | None]:
    """What exporting one model in each dtype raises."""
    trainer = Trainer(settings(path, mesh={"dp": 2}), device=CPU)
    ends: list[SlimeError | None] = []
    for dtype in dtypes:
        try:
            trainer.export_hf(out / str(dtype), dtype)
            ends.append(None)
        except SlimeError as error:
            ends.append(error)
    return ends


def test_an_export_has_the_dtype_asked_for_and_is_refused_where_it_would_be_infinite(
    tmp_path: Path, ranks: RankPool
) -> None:
    path = save_tiny_model(tmp_path / "in", initializer_range=3e4)  # above 65504 in some places
    dtypes = [None, "bfloat16", "float64", "float16", "int8"]
    first, second = ranks.run(2, export_as, path, tmp_path, dtypes)
    for ends in (first, second):
        assert ends[:3] == [None] * 3
        assert_refusal(ends[3], CheckpointError, "dtype", torch.float16)
        assert_refusal(ends[4], ConfigError, "dtype", "'int8'")
    assert not (tmp_path / "float16").exists() and not (tmp_path / "int8").exists()
    source = load_file(path / SINGLE_FILE)
    for dtype, expected in ((None, torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        for name, tensor in load_file(tmp_path / str(dtype) / SINGLE_FILE).items():
            assert tensor.dtype == expected and torch.equal(tensor, source[name].to(expected)), name
