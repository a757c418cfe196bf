"""A calibration measures what this machine does, and all ranks have the same numbers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from slimefsdp.batching.hardware import Rates
from slimefsdp.perf_model.calibrate import measure_rates
from tests.support.rank_pool import RankPool

CPU = torch.device("cpu")


def measured(rank: int) -> tuple[Rates, dict[str, Any]]:
    return measure_rates(CPU, torch.float32, dist.group.WORLD, scale=0.05)


def test_ranks_agree_on_the_rates_of_the_slowest(ranks: RankPool) -> None:
    found = ranks.run(2, measured)
    rates, details = found[0]
    assert rates == found[1][0] and details["ranks"] == 2 and rates.dtype == "float32"
    numbers = [value for name, value in asdict(rates).items() if name not in ("source", "dtype")]
    assert all(value > 0 for value in numbers)
    assert set(details["comm_gbps_by_collective"]) == {"all_gather", "reduce_scatter", "all_reduce"}
    for _, one in found:  # nobody is slower than what all plan by
        assert rates.matrix_tflops <= max(one["matrix_tflops_by_size"].values())
        assert rates.attention_tflops <= max(one["attention_tflops_by_tokens"].values())


def test_a_rank_alone_sends_nothing_and_copies_instead() -> None:
    rates, _ = measure_rates(CPU, torch.float64, scale=0.05)
    assert rates.comm_gbps == rates.memory_gbps == rates.host_gbps and rates.dtype == "float64"
