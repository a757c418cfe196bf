"""Floors follow from the rates, and what is said to fit does, and little more would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slimefsdp.batching.cost import CostModel
from slimefsdp.errors import ResourceError
from slimefsdp.estimate.flops import executed_flops, forward_flops, training_flops
from slimefsdp.estimate.hardware import Device, Rates, fits
from slimefsdp.estimate.memory import MicroBatches, peak_memory
from slimefsdp.estimate.recommend import (
    LongestContext,
    StepTime,
    fewest_data_ranks,
    longest_contexts,
    memory_of_context,
    recommend,
    step_time,
    with_cap,
)
from slimefsdp.estimate.schedule import Schedule, measure_schedule
from slimefsdp.estimate.setup import SHARDINGS, MeshShape, TrainingSetup
from slimefsdp.estimate.traffic import sharding_traffic
from slimefsdp.model_spec import ModelSpec
from tests.support.plans import plan_of

MODEL = ModelSpec(2048, 16, 32, 8, 64, 8192, vocab=128_256, is_tied=True)
SETUP = TrainingSetup(MODEL, MeshShape(dp=8))
LENGTHS = np.array([4096] * 32)  # two in each of two micro-batches of a rank
RATES = Rates("made up", matrix_tflops=100, attention_tflops=50, memory_gbps=1000, comm_gbps=10, host_gbps=20)


def schedule_of(setup: TrainingSetup = SETUP) -> Schedule:
    cost = CostModel.of_model(MODEL)
    plan = plan_of(LENGTHS, dp=setup.mesh.data_ranks, max_pack_tokens=8192, cost_model=cost)
    return measure_schedule(plan, LENGTHS, setup, strategy="ring", cost=cost, counted_share=0.5)


SCHEDULE = schedule_of()


def seconds(**changes: Any) -> StepTime:
    return step_time(replace(SETUP, **changes), SCHEDULE, RATES)


def test_the_floor_is_what_runs_over_its_rate_and_what_is_sent_over_its_own() -> None:
    needed, forward = (of(MODEL, LENGTHS[:4], counted_rows=2 * 4096) for of in (training_flops, forward_flops))
    head = 3 / 4  # chunks of 1,024 rows of logits, and those of the last are kept
    found, recomputed, selective = seconds(), seconds(recompute="full"), seconds(recompute="selective")
    for time, layers in ((found, 0), (recomputed, 1)):
        ran = executed_flops(needed, forward, recomputed_layers=layers, recomputed_head=head)
        assert time.products == pytest.approx((ran.layers + ran.head) / 100e12)
        assert time.attention == pytest.approx(ran.attention / 50e12)
    assert found.comm == pytest.approx(sharding_traffic(SETUP, 2).total / 10e9) and found.host == 0
    assert found.total == found.products + found.attention + found.memory + found.comm
    assert selective.products == found.products and selective.memory > found.memory
    imbalance = replace(SCHEDULE.imbalance, micro_batches=1.5)
    late = step_time(SETUP, replace(SCHEDULE, imbalance=imbalance), RATES)
    assert late.products == pytest.approx(1.5 * found.products) and late.comm == found.comm


def test_the_fastest_that_fits_is_recommended() -> None:
    found = [recommend(SETUP, SCHEDULE, Device(RATES, gb * GB, None, on_cpu=False)) for gb in (8, 24, 1000)]
    compared = found[2].candidates
    assert [one.seconds.total for one in compared] == sorted(one.seconds.total for one in compared)
    assert {one.setup.sharding for one in compared} == set(SHARDINGS)
    best = [one.recommended for one in found]
    assert best[0] and best[1] and best[2] and best[2] == compared[0]
    assert best[0].seconds.total > best[1].seconds.total >= best[2].seconds.total
    assert fits(best[0].memory.total, 8 * GB) and "fsdp.sharding=" in found[0].advice
    on_cpu, device = replace(SETUP, on_cpu=True), Device(RATES, None, None, on_cpu=True)
    compiled = recommend(on_cpu, SCHEDULE, device, selective=False).candidates
    assert not any(one.setup.recompute == "selective" or one.setup.cpu_offload for one in compiled)


GB = 10**9


@pytest.mark.parametrize("gigabytes", [3, 4, 6])
def test_what_is_said_to_fit_does(gigabytes: int) -> None:
    large = replace(SCHEDULE, largest=MicroBatches(tokens=500_000, rows=250_000, count=1), longest=1)
    device = Device(RATES, gigabytes * GB, "--memory-gb", on_cpu=False)
    with pytest.raises(ResourceError) as caught:
        recommend(SETUP, large, device)
    assert caught.value.field == "--memory-gb" and caught.value.hint
    tokens = int(caught.value.hint.removeprefix("lower batch.max_tokens_per_rank to ").split(",")[0])
    assert 0 < tokens < 500_000
    recommend(SETUP, replace(large, largest=with_cap(large.largest, tokens)), device)
    with pytest.raises(ResourceError):
        recommend(SETUP, replace(large, largest=with_cap(large.largest, tokens + 2)), device)
    few, batch = replace(SETUP, mesh=MeshShape(), on_cpu=True), MicroBatches(256, 128, 1)
    dp = fewest_data_ranks(few, batch, gigabytes * GB)
    assert dp is not None and dp > 1
    recomputed = replace(few, recompute="full")
    held = [peak_memory(replace(recomputed, mesh=MeshShape(dp=n)), batch).total for n in (dp // 2, dp)]
    assert not fits(held[0], gigabytes * GB) and fits(held[1], gigabytes * GB)
    assert fewest_data_ranks(few, large.largest, 10**6) is None


SMALL = ModelSpec(hidden=256, layers=6, heads=8, kv_heads=2, head_dim=32, intermediate=768, vocab=5000)
ADAPTERS = TrainingSetup(SMALL, recompute="full", trained_share=0.0, lora_rank=8)


def contexts(setup: TrainingSetup = ADAPTERS, memory_bytes: int = 2**30, share: float = 1.0) -> list[LongestContext]:
    return longest_contexts(setup, memory_bytes, counted_share=share)


@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_longest_fits_and_a_longer_one_does_not(cp: int, share: float) -> None:
    found = contexts(replace(ADAPTERS, mesh=MeshShape(cp=cp)), share=share)
    assert found[0].setup.storage_settings == "model.activation_checkpointing=full"
    assert len({one.setup.storage_settings for one in found}) == len(found) == 6
    for one in found:
        assert one.memory == memory_of_context(one.setup, one.tokens, share) and fits(one.memory.total, 2**30)
        assert not fits(memory_of_context(one.setup, one.tokens + cp, share).total, 2**30)
    assert len(contexts(replace(ADAPTERS, on_cpu=True))) == 2, "a CPU has no other memory"


@pytest.mark.parametrize("recompute", ["none", "offload", "selective"])
def test_memory_never_falls_with_the_length(recompute: Any) -> None:
    setup = replace(ADAPTERS, recompute=recompute)
    held = [memory_of_context(setup, tokens).total for tokens in (*range(1, 300), 10**4, 10**5, 10**6)]
    assert held == sorted(held)


def test_what_waits_on_the_host_is_what_the_device_does_not_hold() -> None:
    tokens, away = 50_000, replace(ADAPTERS, recompute="offload")
    # with few rows, layers are fuller than the head
    kept, moved = (memory_of_context(setup, tokens, 0.001) for setup in (ADAPTERS, away))
    assert moved.host - kept.host == tokens * SMALL.layers * SMALL.hidden * 2
    # the last layer's own input is on the device while it computes
    assert kept.total - moved.total == pytest.approx(tokens * (SMALL.layers - 1) * SMALL.hidden * 2, rel=0.01)
