"""Which strategy is chosen for which model and mesh, and what is refused before anything is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slimefsdp.attention.choice import AttentionShape, choose_strategy
from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.errors import ConfigError
from slimefsdp.models.folder import read_model_folder
from slimefsdp.models.load import build_policy
from tests.tiny_models import ARCHITECTURES, save_tiny_model


@pytest.mark.parametrize(
    ("shape", "cp", "name", "because"),
    [
        (AttentionShape(32, 8), 1, "local", "one rank"),
        (AttentionShape(32, 8), 2, "ring", "overlaps"),
        (AttentionShape(32, 8), 5, "ring", "overlaps"),
        (AttentionShape(32, 8), 8, "ulysses", "32 heads over 8 key heads it moves fewer bytes"),
        (AttentionShape(32, 32), 2, "ring", "overlaps"),
        (AttentionShape(32, 32), 4, "ulysses", "fewer bytes"),
        (AttentionShape(30, 30), 4, "ring", "overlaps"),
        (AttentionShape(32, 8, has_windows=True), 2, "ulysses", "windows, and its heads can be divided"),
        (
            AttentionShape(30, 10, has_windows=True),
            4,
            "all_gather",
            "30 attention heads cannot be divided over 4 ranks",
        ),
    ],
)
def test_auto_chooses_by_windows_heads_and_bytes_and_says_why(
    shape: AttentionShape, cp: int, name: str, because: str
) -> None:
    choice = choose_strategy("auto", shape, cp)
    assert choice.name == name and because in choice.reason


WINDOWED = ("qwen2", "mistral", "gemma3_text", "gemma2", "phi3", "gpt_oss")
WRITTEN = [(kind, {}) for kind in ARCHITECTURES] + [
    ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}),  # its layers do not read layer_types
    ("llama", {"sliding_window": 8}),  # nor any window
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}),
]


@pytest.mark.parametrize(("kind", "changes"), WRITTEN)
def test_what_config_json_says_is_what_the_built_model_is(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """The driver chooses by the first, the ranks by the second."""
    folder = read_model_folder(save_tiny_model(tmp_path, kind, **changes))
    written = AttentionShape.of_dimensions(ModelDimensions.from_config(folder.config))
    built = build_policy(folder, torch.float32).attention_shape()
    assert written == replace(built, has_sinks=False, has_softcap=False)
    assert written.has_windows == ((kind == "mixtral" and bool(changes)) or (not changes and kind in WINDOWED))


@pytest.mark.parametrize(
    ("setting", "shape", "problem", "others"),
    [
        ("ring", AttentionShape(8, 2, has_windows=True), "cannot express sliding windows", "ulysses or all_gather"),
        ("ulysses", AttentionShape(6, 2), "6 attention heads cannot be divided over 4 ranks", "ring or all_gather"),
        ("ring_flash_attn", AttentionShape(8, 2, has_sinks=True), "no attention sinks", "ring or ulysses"),
        ("ring_flash_attn", AttentionShape(8, 2, has_softcap=True), "no attention soft-cap", "ring or ulysses"),
    ],
)
def test_a_strategy_that_cannot_serve_is_refused_with_those_that_can(
    setting: str, shape: AttentionShape, problem: str, others: str
) -> None:
    with pytest.raises(ConfigError, match=f"attention.strategy={setting} with mesh.cp=4: .*{problem}") as caught:
        choose_strategy(setting, shape, 4)  # type: ignore[arg-type]
    assert caught.value.field == "attention.strategy" and others in (caught.value.hint or "")
    choose_strategy(setting, shape, 1)  # type: ignore[arg-type]  # one rank per pack needs none
