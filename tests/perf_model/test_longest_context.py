"""The longest sample that fits: more with more memory, less with more to hold, and one token more does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.longest_context import (
    LongestContext,
    attention_workspace,
    longest_contexts,
    memory_of_context,
    most_that_fit,
)
from slimefsdp.perf_model.memory import ByteSizes, Computing
from slimefsdp.perf_model.simulate import MeshShape
from slimefsdp.perf_model.step_time import ColocatedModels, fits

MODEL = ModelSpec(hidden=256, layers=6, heads=8, kv_heads=2, head_dim=32, intermediate=768, vocab=5000)
GIB = 2**30
ADAPTERS = Computing(recompute="full", trained_share=0.0, lora_rank=8)
HOW: dict[str, Any] = {"sizes": ByteSizes(), "beside": ColocatedModels()}


def contexts(computing: Computing = ADAPTERS, memory_bytes: int = GIB, **changes: Any) -> list[LongestContext]:
    settings = {"mesh": MeshShape(1, 1, 1), **HOW, **changes}
    return longest_contexts(MODEL, "full", computing=computing, memory_bytes=memory_bytes, **settings)


def test_the_settings_come_first_and_every_way_once() -> None:
    found = contexts()
    assert found[0].settings == "model.activation_checkpointing=full"
    assert len({one.settings for one in found}) == len(found) == 6
    on_cpu = contexts(replace(ADAPTERS, on_cpu=True))
    assert [one.settings for one in on_cpu] == [
        "model.activation_checkpointing=full", "model.activation_checkpointing=none"
    ]  # fmt: skip


@pytest.mark.parametrize("computing", [ADAPTERS, Computing(), replace(ADAPTERS, offload_activations=True)])
@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("counted_share", [1.0, 0.25])
def test_the_longest_fits_and_a_longer_one_does_not(computing: Computing, cp: int, counted_share: float) -> None:
    mesh = MeshShape(1, 1, cp)
    for one in contexts(computing, mesh=mesh, counted_share=counted_share):
        how = replace(
            computing, recompute=one.recompute, offload_activations=one.offload_activations,
            cpu_offload=one.cpu_offload, recompute_every=1,
        )  # fmt: skip
        shape: dict[str, Any] = {"mesh": mesh, "computing": how, "counted_share": counted_share, **HOW}
        assert one.memory == memory_of_context(MODEL, "full", one.tokens, **shape)
        assert fits(one.memory, GIB)
        assert not fits(memory_of_context(MODEL, "full", one.tokens + cp, **shape), GIB)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("offload", [False, True])
def test_memory_never_falls_with_the_length(recompute: Any, offload: bool) -> None:
    how = replace(ADAPTERS, recompute=recompute, offload_activations=offload and recompute == "full")
    shape: dict[str, Any] = {"mesh": MeshShape(1, 1, 1), "computing": how, **HOW}
    held = [memory_of_context(MODEL, "full", tokens, **shape).total for tokens in (*range(1, 300), 10**4, 10**5, 10**6)]
    assert held == sorted(held)


def test_more_memory_and_less_to_keep_make_it_longer() -> None:
    tokens = {one.settings: one.tokens for one in contexts()}
    full, none, host = (
        tokens[f"model.activation_checkpointing={way}"]
        for way in ("full", "none", "full model.offload_activations=true")
    )
    assert none < full < host
    assert contexts(memory_bytes=2 * GIB)[0].tokens > 1.9 * full
    assert contexts(mesh=MeshShape(1, 1, 2))[0].tokens > 1.9 * full
    assert contexts(Computing(recompute="full"))[0].tokens < full


def test_what_waits_on_the_host_is_what_the_device_does_not_hold() -> None:
    # of few rows, so that layers are fuller than the head
    shape: dict[str, Any] = {"mesh": MeshShape(1, 1, 1), "counted_share": 0.001, **HOW}
    tokens = 50_000
    kept = memory_of_context(MODEL, "full", tokens, computing=ADAPTERS, **shape)
    away = replace(ADAPTERS, offload_activations=True)
    moved = memory_of_context(MODEL, "full", tokens, computing=away, **shape)
    assert moved.host - kept.host == tokens * MODEL.layers * MODEL.hidden * 2
    # the last layer's own input is on the device while it computes
    assert kept.total - moved.total == pytest.approx(tokens * (MODEL.layers - 1) * MODEL.hidden * 2, rel=0.01)
    on_cpu = memory_of_context(MODEL, "full", tokens, computing=replace(away, on_cpu=True), **shape)
    without = memory_of_context(MODEL, "full", tokens, computing=replace(ADAPTERS, on_cpu=True), **shape)
    assert on_cpu == without


def test_nothing_fits_too_little() -> None:
    assert {one.tokens for one in contexts(memory_bytes=1000)} == {0}


def test_the_largest_number_is_found_wherever_it_is() -> None:
    for most in (1, 7, 64, 1000):
        for answer in range(most + 1):
            assert most_that_fit(lambda tokens, answer=answer: tokens <= answer, most) == answer


def test_attention_s_own_bytes_are_float32_gradients_of_its_queries() -> None:
    assert attention_workspace(MODEL, 1000, 1) == 1000 * 8 * (32 + 1) * 4
    assert attention_workspace(MODEL, 1000, 4) == 250 * 8 * (32 + 1) * 4
