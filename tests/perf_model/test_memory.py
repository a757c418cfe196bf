"""Bytes of sharding, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slimefsdp.model_spec import ModelSpec
from slimefsdp.perf_model.memory import (
    SHARDINGS,
    ByteSizes,
    Computing,
    MicroBatches,
    Sharding,
    choose_sharding,
    memory_per_rank,
    sharding_traffic,
    step_memory,
)

GB = 10**9
# 7 billion parameters in 35 equal layers
SEVEN = ModelSpec(
    hidden=1000, layers=35, heads=1, kv_heads=1, head_dim=1000, intermediate=65_333, vocab=1, mlp_matrices=3
)


def test_seven_billion_parameters_on_four_ranks_take_what_was_worked_out_by_hand() -> None:
    assert SEVEN.parameters == pytest.approx(7e9, rel=1e-4)
    states = {level: memory_per_rank(SEVEN, level, shard_ranks=4, sizes=ByteSizes()) for level in SHARDINGS}
    full, keep, whole, replicate = (states[level] for level in ("full", "keep_parameters", "optimizer", "replicate"))
    at_rest = {level: held.total - held.unsharded for level, held in states.items()}
    assert at_rest["full"] == at_rest["keep_parameters"] == pytest.approx(28 * GB, rel=1e-3)
    assert at_rest["replicate"] == pytest.approx(112 * GB, rel=1e-3)
    assert full.unsharded == replicate.unsharded == pytest.approx(0.4 * GB, rel=1e-2), "one layer of 35 in bfloat16"
    assert keep.unsharded == pytest.approx(14 * GB, rel=1e-3), "all of it in bfloat16"
    assert whole.unsharded == pytest.approx(42 * GB, rel=1e-3), "and its gradients in float32"


@pytest.mark.parametrize(("ranks", "gigabytes"), [(4, 42), (8, 49)])
def test_a_micro_batch_gathers_twice_and_reduces_once(ranks: int, gigabytes: float) -> None:
    sent = sharding_traffic(SEVEN, "full", dp_replicate=1, shard_ranks=ranks, sizes=ByteSizes())
    assert sent.total == pytest.approx(gigabytes * GB, rel=1e-3) and sent.all_reduce == 0
    kept = sharding_traffic(SEVEN, "keep_parameters", dp_replicate=1, shard_ranks=ranks, sizes=ByteSizes())
    assert kept.all_gather == pytest.approx(sent.all_gather / 2, rel=1e-3)
    assert kept.reduce_scatter == sent.reduce_scatter


def test_copies_add_up_their_gradients() -> None:
    sent = sharding_traffic(SEVEN, "full", dp_replicate=2, shard_ranks=4, sizes=ByteSizes())
    assert sent.all_reduce == pytest.approx(7 * GB, rel=1e-3)  # a quarter of 28 GB, once there and once back, halved
    whole = sharding_traffic(SEVEN, "replicate", dp_replicate=2, shard_ranks=4, sizes=ByteSizes())
    assert whole.all_gather == whole.reduce_scatter == 0
    assert whole.all_reduce == pytest.approx(2 * 28 * GB * 7 / 8, rel=1e-3)


def test_one_rank_sends_nothing_and_holds_everything() -> None:
    for level in SHARDINGS:
        assert sharding_traffic(SEVEN, level, dp_replicate=1, shard_ranks=1, sizes=ByteSizes()).total == 0
        assert memory_per_rank(SEVEN, level, shard_ranks=1, sizes=ByteSizes()).parameters == SEVEN.parameters * 4


@pytest.mark.parametrize("level", SHARDINGS)
def test_the_head_is_gathered_with_a_layer_beside_it(level: Sharding) -> None:
    sizes = ByteSizes(compute=4, optimizer_states=1)
    for is_tied in (True, False):
        model = ModelSpec(
            hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=100, vocab=500, is_tied=is_tied
        )
        held = memory_per_rank(model, level, shard_ranks=2, sizes=sizes)
        embedding = 500 * 64
        layer = 64 * (4 + 2) * 16 * 2 + 3 * 64 * 100
        beside = layer if is_tied else max(layer, embedding)
        expected = embedding + beside
        if level in ("keep_parameters", "optimizer"):
            expected = model.parameters * (2 if level == "optimizer" else 1)  # with gradients of the same bytes
        assert held.unsharded == 4 * expected
        assert held.optimizer == held.gradients == held.parameters


def test_gradients_summed_once_are_sent_once_however_many_micro_batches_there_are() -> None:
    def sent(level: Sharding, micro_batches: int) -> int:
        return sharding_traffic(
            SEVEN, level, dp_replicate=2, shard_ranks=4, sizes=ByteSizes(), micro_batches=micro_batches
        ).total

    assert sent("optimizer", 9) == sent("optimizer", 1) == sent("keep_parameters", 1)
    assert sent("keep_parameters", 9) == pytest.approx(9 * sent("keep_parameters", 1))
    frozen = sharding_traffic(SEVEN, "full", dp_replicate=1, shard_ranks=4, sizes=ByteSizes(), trained_share=0.5)
    assert frozen.reduce_scatter == pytest.approx(21 * GB / 2, rel=1e-3)


STEP = MicroBatches(tokens=8192, rows=4096, count=4)


def peak(level: Sharding, batch: MicroBatches = STEP, ranks: int = 8, **computing: object) -> int:
    how = Computing(**computing)  # type: ignore[arg-type]
    return step_memory(SEVEN, level, batch, shard_ranks=ranks, sizes=ByteSizes(), computing=how).total


def test_a_step_holds_more_than_what_is_at_rest_and_grows_with_its_tokens() -> None:
    for level in SHARDINGS:
        at_rest = memory_per_rank(SEVEN, level, shard_ranks=8, sizes=ByteSizes())
        assert peak(level) > at_rest.parameters + at_rest.optimizer
        assert peak(level, MicroBatches(16_384, 8192, 4)) > peak(level)
    assert peak("full") < peak("keep_parameters") < peak("optimizer") < peak("replicate")
    assert peak("full", recompute="full") < peak("full", recompute="selective") < peak("full")
    assert peak("full", trained_share=0.5) < peak("full")
    assert peak("full", cpu_offload=True) == pytest.approx(peak("full") - 16 * SEVEN.parameters / 8, rel=0.01)
    assert peak("optimizer", MicroBatches(8192, 4096, 1)) < peak("optimizer"), (
        "one micro-batch keeps no whole gradients"
    )


def test_auto_takes_what_sends_least_among_what_fits() -> None:
    def chosen(gigabytes: float, batch: MicroBatches = STEP) -> Sharding:
        return choose_sharding(
            SEVEN, batch, memory_bytes=round(gigabytes * GB), dp_replicate=1, shard_ranks=8, sizes=ByteSizes()
        )

    levels = sorted(SHARDINGS, key=peak)
    limits = [peak(level) / GB for level in levels]
    assert chosen(1) == levels[0], "where nothing fits, what holds least"
    assert [chosen(limit * 1.0001) for limit in limits] == ["full", "keep_parameters", "optimizer", "optimizer"]
    # with one micro-batch there is nothing to put off, and sums on every rank send a third less than gathers and shards
    once = MicroBatches(8192, 4096, 1)
    assert chosen(1e6, once) == chosen(1e6, once)


def test_beside_adapters_the_model_is_held_once_in_the_compute_dtype() -> None:
    adapters = SEVEN.adapters(32, ["attention", "mlp"])
    assert 0.02 < adapters.parameters / SEVEN.parameters < 0.04
    for level, shards in (("full", 4), ("replicate", 1)):
        held = memory_per_rank(
            SEVEN, level, shard_ranks=4, sizes=ByteSizes(), trained_share=0.0, adapters=adapters
        )  # fmt: skip
        beside = adapters.parameters * 4 / shards
        assert held.parameters == pytest.approx(14 * GB / shards + beside, rel=1e-3)
        assert held.gradients == pytest.approx(beside) and held.optimizer == pytest.approx(2 * beside)


def test_adapters_alone_are_summed_and_the_head_has_no_gradient() -> None:
    adapters = SEVEN.adapters(32, ["attention", "mlp"])
    whole = sharding_traffic(SEVEN, "full", dp_replicate=2, shard_ranks=4, sizes=ByteSizes())
    sent = sharding_traffic(
        SEVEN, "full", dp_replicate=2, shard_ranks=4, sizes=ByteSizes(), trained_share=0.0, adapters=adapters
    )
    assert whole.all_gather < sent.all_gather < 1.04 * whole.all_gather
    assert sent.reduce_scatter == pytest.approx(adapters.parameters * 4 * 3 / 4, rel=1e-3)
    assert sent.all_reduce == pytest.approx(adapters.parameters * 4 / 4, rel=1e-3)
    for level in SHARDINGS:
        assert peak(level, trained_share=0.0, lora_rank=32) < peak(level)
    widest = replace(SEVEN, vocab=1_000_000)
    how = Computing(trained_share=0.0, lora_rank=32)
    frozen, trained = (
        step_memory(widest, "full", STEP, shard_ranks=8, sizes=ByteSizes(), computing=computing)
        for computing in (how, Computing())
    )
    # its gradient in float32 and rounded is as large as six bytes of each of its weights
    assert trained.head - frozen.head > 0.9 * 6 * widest.embedding_parameters


def test_muon_holds_one_state_of_the_matrices_in_layers_and_adamws_two_of_all_else() -> None:
    model = ModelSpec(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=100, vocab=500)
    muon = ByteSizes(matrix_states=1)
    held = memory_per_rank(model, "full", shard_ranks=1, sizes=muon)
    assert held.optimizer == 4 * (2 * model.layer_parameters + 2 * 2 * 500 * 64)
    adapters = model.adapters(8, ["attention", "mlp"])
    of_adapters = {"trained_share": 0.0, "adapters": adapters}
    assert memory_per_rank(model, "full", shard_ranks=1, sizes=muon, **of_adapters).optimizer == 4 * adapters.parameters
