"""Metrics reduced over ranks against plain numpy over everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slimefsdp.algorithms.objective import MetricSums
from slimefsdp.training import packs
from slimefsdp.training.metrics import mean_over_updates
from tests.support.rank_pool import RankPool


def packs_of(rank: int) -> list[np.ndarray]:
    """Values of this rank's micro-batches, uneven, one of them empty."""
    rng = np.random.default_rng(rank)
    return [rng.random(size) * 3 for size in (4 + rank, 0, 1)]


def reduced(rank: int) -> dict[str, Any]:
    sums, only_maxima = MetricSums(torch.device("cpu")), MetricSums(torch.device("cpu"))
    for pack in packs_of(rank):
        values = torch.tensor(pack, dtype=torch.float32, requires_grad=True)
        sums.add_total("loss", values.sum() * 0.5)
        sums.add_mean("ratio", values)
        sums.add_mean("clipped", values > 1)
        sums.add_mean("nothing", values[:0])
        sums.add_mean("small", values, values < 1)
        sums.add_mean("none of them", values, values < 0)
        sums.add_max("ratio_max", values)
        sums.add_max("small_max", values, values < 1)
        only_maxima.add_max("largest", values)
    group = dist.group.WORLD
    assert group is not None
    return {"sums": packs.reduced(sums, group), "empty": packs.reduced(MetricSums(torch.device("cpu")), group),
            "maxima": packs.reduced(only_maxima, group)}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2])
def test_totals_means_and_maxima_are_those_of_all_tokens(ranks: RankPool, world_size: int) -> None:
    everything = np.concatenate([pack for rank in range(world_size) for pack in packs_of(rank)])
    for result in ranks.run(world_size, reduced):
        assert result["sums"] == pytest.approx(
            {
                "loss": everything.sum() * 0.5,
                "ratio": everything.mean(),  # of tokens, not of packs or ranks
                "clipped": (everything > 1).mean(),
                "small": everything[everything < 1].mean(),
                "ratio_max": everything.max(),
                "small_max": everything[everything < 1].max(),
            },
            rel=1e-6,
        )  # a mean over nothing is not there
        assert result["maxima"] == pytest.approx({"largest": everything.max()})
        assert result["empty"] == {}


def test_a_step_reports_means_of_its_updates_and_the_largest_maximum() -> None:
    updates = [{"loss": 1.0, "ratio_max": 5.0}, {"loss": 2.0, "ratio_max": 3.0, "kl": 4.0}, {"loss": 6.0}]
    assert mean_over_updates(updates) == {"loss": 3.0, "ratio_max": 5.0, "kl": 4.0}
    assert mean_over_updates([]) == {}
