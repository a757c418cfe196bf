"""Rates are read as they were written, or refused by name."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.batching.hardware import (
    DEVICES,
    Rates,
    device_bytes,
    guessed_rates,
    read_calibration,
    write_calibration,
)
from slimefsdp.errors import ConfigError
from tests.support.refusals import refused

RATES = Rates("here", 2.0, 0.5, 10.0, 4.0, 5.0, "float32")


def test_a_calibration_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_calibration(tmp_path / "rates.json", RATES, {"ranks": 2})
    assert read_calibration(tmp_path / "rates.json", field="x") == RATES
    assert json.loads((tmp_path / "rates.json").read_text())["ranks"] == 2
    assert RATES.attention_slowdown == 4 and RATES.flops_per_byte == 500


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"rates": {}}', '{"rates": 1}', "\udcff",
        *(json.dumps({"rates": {**asdict(RATES), "comm_gbps": value}})
          for value in (0, -1, True, "1", None, float("nan"), float("inf"), 1e300, 1e-300, int("9" * 400))),
        json.dumps({"rates": asdict(RATES) | {"source": 3}}), json.dumps({"rates": asdict(RATES) | {"dtype": "int3"}}),
        json.dumps({"rates": asdict(RATES)})[:-1] + ', "rates": 1}', '{"rates": ' + "[" * 100_000,
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rates_is_refused_by_the_setting_that_names_it(content: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        read_calibration(path, field="batch.cost_model")
    assert caught.value.field == "batch.cost_model" and str(path) in caught.value.message


def test_a_missing_file_and_one_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with refused(ConfigError, "--calibration", tmp_path / "nowhere.json"):
        read_calibration(tmp_path / "nowhere.json", field="--calibration")
    with refused(ConfigError, "--out", tmp_path / "no" / "folder.json"):
        write_calibration(tmp_path / "no" / "folder.json", RATES, {})


@pytest.mark.parametrize("device", DEVICES)
def test_guesses_are_said_to_be_guesses(device: str) -> None:
    rates: Any = guessed_rates(device, 2)
    assert "guess" in rates.source and rates.attention_slowdown >= 1
    if device != "CPU":
        assert guessed_rates(device, 4).matrix_tflops == rates.matrix_tflops / 2
    assert (device_bytes(device) is None) == (device == "CPU")
