"""Floors and recommendations follow from the rates and the room that they are given."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from slimefsdp.batching.hardware import Rates
from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.flops import executed_flops, forward_flops, training_flops
from slimefsdp.perf_model.memory import (
    SHARDINGS,
    ByteSizes,
    Computing,
    MicroBatches,
    Sharding,
    memory_per_rank,
    sharding_traffic,
    step_memory,
)
from slimefsdp.perf_model.step_time import (
    ColocatedModels,
    Workload,
    candidates,
    fewest_shard_ranks_that_fit,
    fits,
    most_tokens_that_fit,
    peak_memory,
    step_time,
    with_cap,
)

MODEL = ModelSpec(2048, 16, 32, 8, 64, 8192, vocab=128_256, is_tied=True)
LENGTHS = np.array([4096] * 8)
FORWARD = forward_flops(MODEL, LENGTHS, counted_rows=4 * 4096)
SIZES = ByteSizes()
WORK = Workload(
    model_spec=MODEL,
    dp_replicate=1,
    shard_ranks=8,
    sizes=SIZES,
    batch=MicroBatches(tokens=8192, rows=4096, count=4),
    needed=training_flops(MODEL, LENGTHS, counted_rows=4 * 4096),
    forward=FORWARD,
    tokens=8 * 4096,
    longest=4096,
)
AGAIN = 3 / 4  # of the head: chunks of 1,024 rows of logits, and those of the last are kept
RATES = Rates("made up", matrix_tflops=100, attention_tflops=50, memory_gbps=1000, comm_gbps=10, host_gbps=20)


def test_the_floor_is_what_runs_over_its_rate_and_what_is_sent_over_its_own() -> None:
    found = step_time(WORK, RATES, "full", Computing())
    ran = executed_flops(MODEL, LENGTHS, counted_rows=4 * 4096, recomputed_head=AGAIN)
    assert found.products == pytest.approx((ran.layers + ran.head) / 100e12)
    assert found.attention == pytest.approx(ran.attention / 50e12)
    sent = sharding_traffic(MODEL, "full", dp_replicate=1, shard_ranks=8, sizes=SIZES, micro_batches=4)
    assert found.comm == pytest.approx(sent.total / 10e9) and found.host == 0
    assert found.total == found.products + found.attention + found.memory + found.comm
    late = step_time(replace(WORK, slowdown=1.5), RATES, "full", Computing())
    assert late.products == pytest.approx(1.5 * found.products) and late.comm == found.comm


def test_muons_iterations_are_products_that_all_ranks_share() -> None:
    none, muon = (step_time(WORK, RATES, "full", Computing(newton_schulz_steps=steps)) for steps in (0, 5))
    shapes = [(2048, 2048), (512, 2048), (512, 2048), (2048, 2048), *[(2048, 8192)] * 3]  # short side, long side
    flops = 16 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in shapes)
    assert muon.products - none.products == pytest.approx(flops / 8 / 100e12) and muon.memory == none.memory
    lighter = replace(WORK, sizes=ByteSizes(matrix_states=1))
    assert step_time(lighter, RATES, "full", Computing()).memory < none.memory


def test_recomputation_costs_what_it_computes_again() -> None:
    none, every_second = (step_time(WORK, RATES, "full", how) for how in (Computing(), Computing("full", 2)))
    ran = executed_flops(MODEL, LENGTHS, counted_rows=4 * 4096, recomputed_layers=8, recomputed_head=AGAIN)
    assert every_second.products == pytest.approx((ran.layers + ran.head) / 100e12)
    assert every_second.attention == pytest.approx(ran.attention / 50e12)
    selective = step_time(WORK, RATES, "full", Computing("selective"))
    assert selective.products == none.products and selective.memory > none.memory
    offloaded = step_time(WORK, RATES, "full", Computing(cpu_offload=True))
    assert offloaded.host > 0 and offloaded.memory < none.memory


def test_a_head_of_one_chunk_computes_nothing_again() -> None:
    few = replace(WORK, batch=replace(WORK.batch, rows=130))
    ran = executed_flops(MODEL, LENGTHS, counted_rows=4 * 4096)
    assert step_time(few, RATES, "full", Computing()).products == pytest.approx((ran.layers + ran.head) / 100e12)


def test_gradients_reach_the_host_as_often_as_they_are_summed() -> None:
    def seconds(sharding: Sharding, count: int) -> float:
        work = replace(WORK, batch=replace(WORK.batch, count=count))
        return step_time(work, RATES, sharding, Computing(cpu_offload=True)).host

    shard = MODEL.parameters / 8 * 4
    assert seconds("optimizer", 4) == seconds("optimizer", 1)
    # parameters come from there, and gradients go there, in each of three more micro-batches
    assert seconds("keep_parameters", 4) - seconds("keep_parameters", 1) == pytest.approx(3 * 2 * shard / 20e9)


def test_candidates_come_fastest_first_and_the_first_that_fits_changes_with_the_room() -> None:
    compared = candidates(WORK, RATES, Computing())
    assert [one.seconds.total for one in compared] == sorted(one.seconds.total for one in compared)
    assert {one.sharding for one in compared} == set(SHARDINGS)
    room = [next(one for one in compared if fits(one.memory, gigabytes * 10**9)) for gigabytes in (8, 24, 1000)]
    assert room[0].seconds.total > room[1].seconds.total >= room[2].seconds.total
    assert room[2] == compared[0] and "fsdp.sharding=" in room[0].settings
    assert all(one.recompute != "selective" for one in candidates(WORK, RATES, Computing(), selective=False))
    assert not any(one.cpu_offload for one in candidates(WORK, RATES, Computing(on_cpu=True)))


@pytest.mark.parametrize("gigabytes", [3, 4, 6])
def test_what_is_said_to_fit_does(gigabytes: int) -> None:
    limit = gigabytes * 10**9
    large = replace(WORK, batch=MicroBatches(tokens=500_000, rows=250_000, count=1))

    def holds(work: Workload) -> bool:
        ways = candidates(work, RATES, Computing())
        return any(fits(one.memory, limit) for one in ways)

    assert not holds(large)
    tokens = most_tokens_that_fit(large, Computing(), limit)
    assert 0 < tokens < 500_000
    several = -(-500_000 // tokens)  # so gradients of earlier ones are there
    assert holds(replace(large, batch=MicroBatches(tokens, tokens // 2, several)))
    assert not holds(replace(large, batch=MicroBatches(tokens * 33 // 32, tokens * 33 // 64, several)))
    few = replace(WORK, shard_ranks=1, batch=MicroBatches(256, 128, 1))
    on_cpu = Computing(on_cpu=True)
    ranks = fewest_shard_ranks_that_fit(few, on_cpu, limit, most=1024)
    assert ranks is not None and ranks > 1
    held = [
        peak_memory(replace(few, shard_ranks=n), "full", replace(on_cpu, recompute="full")) for n in (ranks // 2, ranks)
    ]
    assert not fits(held[0], limit) and fits(held[1], limit)
    assert fewest_shard_ranks_that_fit(large, on_cpu, 10**6, most=1024) is None


def test_a_lower_cap_makes_more_micro_batches_of_at_least_one_row() -> None:
    assert with_cap(WORK, 3000).batch == MicroBatches(tokens=3000, rows=1500, count=11)
    sparse = replace(WORK, batch=MicroBatches(tokens=8192, rows=1, count=4))
    assert with_cap(sparse, 1024).batch == MicroBatches(tokens=1024, rows=1, count=32)


def test_models_beside_the_policy_take_their_room_where_they_rest() -> None:
    alone = peak_memory(WORK, "full", Computing())
    shard = MODEL.parameters // 8 * 4
    assert alone == step_memory(MODEL, "full", WORK.batch, shard_ranks=8, sizes=SIZES)
    stays = replace(WORK, beside=ColocatedModels(reference=MODEL, reference_rests_on_host=False))
    assert peak_memory(stays, "full", Computing()).total == alone.total + shard
    sleeps = replace(WORK, beside=ColocatedModels(reference=MODEL))
    asleep = peak_memory(sleeps, "full", Computing())
    assert asleep.total == alone.total and asleep.host == shard, "while the policy trains, the fuller moment"
    awake = peak_memory(sleeps, "full", Computing(full_kl=True))
    assert awake.others == shard, "whose hidden states the loss reads"
    assert peak_memory(sleeps, "full", Computing(on_cpu=True)).others == shard, "a CPU has no other memory to go to"


def test_a_critic_that_trains_finds_the_policy_beside_it() -> None:
    with_critic = replace(WORK, beside=ColocatedModels(critic=MODEL))
    found = peak_memory(with_critic, "full", Computing())
    policy = memory_per_rank(MODEL, "full", shard_ranks=8, sizes=SIZES)
    assert found.others == policy.parameters + policy.optimizer and found.host == 0
    stays = replace(WORK, beside=ColocatedModels(critic=MODEL, critic_rests_on_host=False))
    assert peak_memory(stays, "full", Computing()).others == policy.parameters + policy.optimizer
    assert peak_memory(stays, "full", Computing()).total > found.total


def test_a_critic_has_no_head_beside_its_embedding_while_it_rests_or_trains() -> None:
    untied = replace(MODEL, is_tied=False)
    work = replace(WORK, model_spec=untied, beside=ColocatedModels(critic=untied, critic_rests_on_host=False))
    shard = (untied.parameters - untied.embedding_parameters) // 8 * 4
    assert peak_memory(work, "full", Computing()).others == 3 * shard, "while the policy trains, the fuller moment"
    asleep = replace(work, beside=ColocatedModels(critic=untied))
    training = peak_memory(asleep, "full", Computing())
    assert training.parameters == shard and training.others == 3 * (shard + untied.embedding_parameters // 8 * 4)
    offloaded = peak_memory(asleep, "full", Computing(cpu_offload=True))
    assert offloaded.host == 3 * shard + 4 * (shard + untied.embedding_parameters // 8 * 4), "gradients of the policy"


def test_what_is_offloaded_is_counted_on_the_host_whoever_computes() -> None:
    beside = ColocatedModels(reference=MODEL, critic=MODEL)
    found = peak_memory(replace(WORK, beside=beside), "full", Computing(cpu_offload=True))
    shard = MODEL.parameters // 8 * 4
    assert found.others == found.parameters == found.optimizer == 0
    # the policy with its moments and gradients, the reference, the critic with its moments
    assert found.host == (3 + 1 + 1 + 3) * shard
