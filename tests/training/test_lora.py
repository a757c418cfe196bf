"""Adapters train as those of peft do on one plain process, on any mesh, and leave as a merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.config import RunConfig
from tests.support.comparisons import largest_difference
from tests.support.plain_lora import ALL, lora_gradients, plain_gradients
from tests.support.plain_step import make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder

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
