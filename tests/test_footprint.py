"""Bytes of sharding, against arithmetic by hand."""

from __future__ import annotations

import pytest

from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.footprint import SHARDINGS, ByteSizes, Sharding, memory_per_rank, sharding_traffic

GB = 10**9
# 7 billion parameters in 35 equal layers
SEVEN = ModelDimensions(
    hidden=1000, layers=35, heads=1, kv_heads=1, head_dim=1000, intermediate=65_333, vocab=1, mlp_matrices=3
)


def test_seven_billion_parameters_on_four_ranks_take_what_was_worked_out_by_hand() -> None:
    assert SEVEN.parameters == pytest.approx(7e9, rel=1e-4)
    full, keep, replicate = (memory_per_rank(SEVEN, s, shard_ranks=4, sizes=ByteSizes()) for s in SHARDINGS)
    states = {"full": full, "keep_parameters": keep, "replicate": replicate}
    at_rest = {level: held.total - held.unsharded for level, held in states.items()}
    assert at_rest["full"] == at_rest["keep_parameters"] == pytest.approx(28 * GB, rel=1e-3)
    assert at_rest["replicate"] == pytest.approx(112 * GB, rel=1e-3)
    assert full.unsharded == replicate.unsharded == pytest.approx(0.4 * GB, rel=1e-2), "one layer of 35 in bfloat16"
    assert keep.unsharded == pytest.approx(14 * GB, rel=1e-3), "all of it in bfloat16"


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
        model = ModelDimensions(
            hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=100, vocab=500, is_tied=is_tied
        )
        held = memory_per_rank(model, level, shard_ranks=2, sizes=sizes)
        embedding = 500 * 64
        layer = 64 * (4 + 2) * 16 * 2 + 3 * 64 * 100
        beside = layer if is_tied else max(layer, embedding)
        expected = model.parameters if level == "keep_parameters" else embedding + beside
        assert held.unsharded == 4 * expected
        assert held.optimizer == held.gradients == held.parameters
