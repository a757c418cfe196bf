"""Rates are measured alike on all ranks, come back as they were written, or are refused by the setting's name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slimefsdp.errors import ConfigError
from slimefsdp.estimate.calibrate import measure_rates
from slimefsdp.estimate.hardware import (
    Rates,
    read_calibration,
    write_calibration,
)
from tests.support.rank_pool import RankPool
from tests.support.refusals import refused

CPU = torch.device("cpu")
RATES = Rates("here", 2.0, 0.5, 10.0, 4.0, 5.0, "float32")


def measured(rank: int) -> tuple[Rates, dict[str, Any]]:
    return measure_rates(CPU, torch.float32, dist.group.WORLD, scale=0.05)


def test_ranks_agree_on_the_rates_of_the_slowest(ranks: RankPool) -> None:
    found = ranks.run(2, measured)
    rates, details = found[0]
    assert rates == found[1][0] and details["ranks"] == 2 and rates.dtype == "float32"
    numbers = [value for name, value in asdict(rates).items() if name not in ("source", "dtype")]
    assert all(value > 0 for value in numbers)
    for _, one in found:  # nobody is slower than what all plan by
        assert rates.matrix_tflops <= max(one["matrix_tflops_by_size"].values())
        assert rates.attention_tflops <= max(one["attention_tflops_by_tokens"].values())


def test_a_calibration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_calibration(tmp_path / "rates.json", RATES, {"ranks": 2})
    assert read_calibration(tmp_path / "rates.json", field="x") == RATES
    assert json.loads((tmp_path / "rates.json").read_text())["ranks"] == 2
    assert RATES.attention_slowdown == 4 and RATES.flops_per_byte == 500
    with refused(ConfigError, "--calibration", tmp_path / "nowhere.json"):
        read_calibration(tmp_path / "nowhere.json", field="--calibration")
    with refused(ConfigError, "--calibrate", tmp_path / "no" / "folder.json"):
        write_calibration(tmp_path / "no" / "folder.json", RATES, {})


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"rates": {}}', '{"rates": 1}', "\udcff",
        *(json.dumps({"rates": {**asdict(RATES), "comm_gbps": value}})
          for value in (0, True, "1", None, float("nan"), float("inf"), int("9" * 400))),
        json.dumps({"rates": asdict(RATES) | {"source": 3}}), json.dumps({"rates": asdict(RATES) | {"dtype": "int3"}}),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rates_is_refused_by_the_setting_that_names_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with refused(ConfigError, "batch.cost_model", path):
        read_calibration(path, field="batch.cost_model")
