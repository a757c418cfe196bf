"""Which strategy is chosen for which model and mesh, and what is refused before anything is built."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from slimefsdp.attention.select import AttentionShape, choose_strategy
from slimefsdp.batching.cp_sharding import zigzag_layout
from slimefsdp.errors import ConfigError
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.build import build_policy
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.perf_model.simulate import attention_comm_bytes
from tests.support.refusals import refused
from tests.support.tiny_models import ARCHITECTURES, TinyFolder


@pytest.mark.parametrize(
    ("shape", "cp", "name", "because"),
    [
        (AttentionShape(32, 8), 1, "local", "one rank"),
        (AttentionShape(32, 8), 2, "ring", "overlaps"),
        (AttentionShape(32, 8), 5, "ring", "overlaps"),
        (AttentionShape(32, 8), 8, "ulysses", "32 heads over 8 key heads"),
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


@pytest.mark.parametrize("sizes", [(2, 4), (4, 4), (8, 8)])
def test_where_fewer_bytes_are_the_reason_a_sequence_that_all_ranks_share_takes_fewer(sizes: tuple[int, int]) -> None:
    chosen = 0
    for kv_heads, per_key, cp in product(range(1, 17), range(1, 13), (2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 32)):
        heads = kv_heads * per_key
        choice = choose_strategy("auto", AttentionShape(heads, kv_heads), cp)
        layout = zigzag_layout([0, 8 * cp], cp)
        if choice.name != "ulysses":
            assert heads % cp or cp <= per_key + 1
            continue
        chosen += 1
        compute, wide = sizes
        ulysses, ring = (
            sum(
                attention_comm_bytes(
                    layout, name, heads=heads, kv_heads=kv_heads, head_dim=16, bytes_per_element=compute,
                    grad_bytes_per_element=wide,
                )
            )
            for name in ("ulysses", "ring")
        )  # fmt: skip
        assert ulysses < ring, (heads, kv_heads, cp)
    assert chosen > 50


WINDOWED = ("qwen2", "mistral", "gemma3_text", "gemma2", "phi3", "gpt_oss")
WRITTEN = [(kind, {}) for kind in ARCHITECTURES] + [
    ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}),  # its layers do not read layer_types
    ("llama", {"sliding_window": 8}),  # nor any window
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}),
]


@pytest.mark.parametrize(("kind", "changes"), WRITTEN)
def test_what_config_json_says_is_what_the_built_model_is(
    tiny_folder: TinyFolder, kind: str, changes: dict[str, Any]
) -> None:
    """The driver chooses by the first, the ranks by the second."""
    folder = read_model_folder(tiny_folder(kind, **changes))
    written = AttentionShape.of_model_spec(ModelSpec.from_config(folder.config))
    built = build_policy(folder, torch.float32).attention_shape()
    assert written == replace(built, has_sinks=False, has_softcap=False)
    assert written.has_windows == ((kind == "mixtral" and bool(changes)) or (not changes and kind in WINDOWED))


@pytest.mark.parametrize(
    ("setting", "shape", "values", "others"),
    [
        ("ring", AttentionShape(8, 2, has_windows=True), [], ["ulysses", "all_gather"]),
        ("ulysses", AttentionShape(6, 2), [6, 4], ["ring", "all_gather"]),
        ("ring_flash_attn", AttentionShape(8, 2, has_sinks=True), ["ring-flash-attn"], ["ring", "ulysses"]),
        ("ring_flash_attn", AttentionShape(8, 2, has_softcap=True), ["ring-flash-attn"], ["ring", "ulysses"]),
    ],
)
def test_a_strategy_that_cannot_serve_is_refused_with_those_that_can(
    setting: str, shape: AttentionShape, values: list[object], others: list[str]
) -> None:
    with refused(ConfigError, "attention.strategy", f"attention.strategy={setting}", "mesh.cp=4", *values) as caught:
        choose_strategy(setting, shape, 4)  # type: ignore[arg-type]
    offered = re.findall(r"\w+", str(caught.value.hint))
    assert set(others) <= set(offered) and setting not in offered
    choose_strategy(setting, shape, 1)  # type: ignore[arg-type]  # one rank per pack needs none
