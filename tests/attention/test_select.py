"""Which strategy is chosen for which model and mesh, and what is refused before anything is built."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
import torch

from slimefsdp.attention import varlen
from slimefsdp.attention.call_plan import AttentionParams
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.batching.cp_sharding import zigzag_layout
from slimefsdp.errors import ConfigError
from slimefsdp.estimate.setup import ByteSizes
from slimefsdp.estimate.traffic import attention_comm_bytes
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.build import build_policy
from slimefsdp.models.hf_folder import read_model_folder
from tests.support.refusals import refused
from tests.support.tiny_models import ARCHITECTURES, TinyFolder


@pytest.mark.parametrize(
    ("shape", "cp", "name", "because"),
    [
        (AttentionShape(32, 8, 128), 1, "local", "one rank"),
        (AttentionShape(32, 8, 128), 2, "ring", "overlaps"),
        (AttentionShape(32, 8, 128), 5, "ring", "overlaps"),
        (AttentionShape(32, 8, 128), 8, "ulysses", "32 attention heads and 8 key-value heads"),
        (AttentionShape(32, 32, 128), 2, "ring", "overlaps"),
        (AttentionShape(32, 32, 128), 4, "ulysses", "fewer bytes"),
        (AttentionShape(30, 30, 128), 4, "ring", "overlaps"),
        (AttentionShape(32, 8, 128, has_windows=True), 2, "ulysses", "sliding windows"),
        (
            AttentionShape(30, 10, 128, has_windows=True),
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


@pytest.mark.parametrize("compute", [2, 4, 8])
def test_where_fewer_bytes_are_the_reason_a_sequence_that_all_ranks_share_takes_fewer(compute: int) -> None:
    chosen = 0
    for kv_heads, per_key, cp in product(range(1, 17), range(1, 13), (2, 3, 4, 6, 7, 8, 12, 14, 16, 24, 32)):
        heads = kv_heads * per_key
        choice = choose_strategy("auto", AttentionShape(heads, kv_heads, 16), cp)
        layout = zigzag_layout([0, 8 * cp], cp)
        if choice.name != "ulysses":
            assert heads % cp or cp <= per_key + 1
            continue
        chosen += 1
        model = ModelSpec(64, 1, heads, kv_heads, 16, 64, 97)
        ulysses, ring = (
            sum(attention_comm_bytes(layout, name, model, ByteSizes(compute=compute))) for name in ("ulysses", "ring")
        )
        assert ulysses < ring, (heads, kv_heads, cp)
    assert chosen > 50


WINDOWED = ("qwen2", "mistral", "gemma3_text", "gemma2", "phi3", "gpt_oss")
WRITTEN = [(kind, {}) for kind in ARCHITECTURES] + [
    ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}),  # its layers do not read layer_types
    ("llama", {"sliding_window": 8}),  # nor any window
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 2}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("llama", {"attn_logit_softcapping": 2.0}),  # which reads no such thing
    ("llama", {"head_dim": None, "hidden_size": 48}),
]


@pytest.mark.parametrize(("kind", "changes"), WRITTEN)
def test_what_config_json_says_is_what_the_built_model_is(
    tiny_folder: TinyFolder, kind: str, changes: dict[str, Any]
) -> None:
    """The driver chooses by the first, the ranks by the second."""
    folder = read_model_folder(tiny_folder(kind, **changes))
    written = AttentionShape.of_model_spec(ModelSpec.from_config(folder.config))
    policy = build_policy(folder, torch.float32)
    built = policy.attention_shape()
    assert written == built
    has_windows = kind in WINDOWED and "sliding_window" not in changes and "layer_types" not in changes
    assert written.has_windows == (has_windows or (kind == "mixtral" and bool(changes)))
    assert written.has_softcap == (kind == "gemma2" and "attn_logit_softcapping" not in changes)
    assert written.has_sinks == (kind == "gpt_oss")
    layer = next(module for name, module in policy.named_modules() if name.endswith(("self_attn", ".attn")))
    assert written.head_dim == layer.head_dim


@pytest.mark.parametrize(
    ("setting", "shape", "values", "others"),
    [
        ("ring", AttentionShape(8, 2, 128, has_windows=True), [], ["ulysses", "all_gather"]),
        ("ulysses", AttentionShape(6, 2, 128), [6, 4], ["ring", "all_gather"]),
        ("ring_flash_attn", AttentionShape(8, 2, 128, has_sinks=True), ["ring-flash-attn"], ["ring", "ulysses"]),
        ("ring_flash_attn", AttentionShape(8, 2, 128, has_softcap=True), ["ring-flash-attn"], ["ring", "ulysses"]),
        ("ring_flash_attn", AttentionShape(8, 2, 264), ["ring-flash-attn", 264], ["ring", "ulysses"]),
        ("ring_flash_attn", AttentionShape(8, 2, 20), ["ring-flash-attn", 20], ["ring", "ulysses"]),
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


@pytest.mark.parametrize(
    ("kernel", "shape", "deterministic", "values", "way_out"),
    [
        ("flash_attn_3", AttentionShape(8, 2, 128, has_softcap=True), False, ["soft-cap"], "flash_attn,"),
        ("flash_attn_3", AttentionShape(8, 2, 36), False, [36, 8, 256], "default"),
        ("flash_attn_3", AttentionShape(8, 2, 320), False, [320, 8, 256], "default"),
        ("flash_attn_3", AttentionShape(8, 2, 200), True, [200, 192, "run.deterministic=true"], "run.deterministic"),
        ("flash_attn", AttentionShape(8, 2, 36), False, [36, 8, 256], "default"),
        ("flash_attn", AttentionShape(8, 2, 320), True, [320, 8, 256], "default"),
    ],
)
def test_kernels_that_would_not_compute_a_model_are_refused(
    kernel: Any, shape: AttentionShape, deterministic: bool, values: list[object], way_out: str
) -> None:
    with refused(ConfigError, "attention.kernel", f"attention.kernel={kernel}", *values) as caught:
        check_kernel(kernel, shape, deterministic=deterministic)
    assert way_out in str(caught.value.hint)
    check_kernel("torch", shape, deterministic=deterministic)


@pytest.mark.parametrize("head_dim", [8, 20, 200, 256, 264])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_flash_attention_3_is_taken_where_no_call_goes_to_the_kernel_in_plain_torch(
    head_dim: int, softcap: float | None
) -> None:
    """What is refused by a model's shape is what `varlen_forward` gives to another kernel, call by call."""
    q = torch.empty(3, 4, head_dim, dtype=torch.bfloat16, device="meta")
    kernel = varlen._kernel_for(q, AttentionParams(scale=1.0, softcap=softcap))
    shape = AttentionShape(4, 4, head_dim, has_softcap=softcap is not None)
    if kernel == "cuda":
        check_kernel("flash_attn_3", shape, deterministic=False)
        return
    with refused(ConfigError, "attention.kernel"):
        check_kernel("flash_attn_3", shape, deterministic=False)
