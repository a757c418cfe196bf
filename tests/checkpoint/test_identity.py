"""What decides whether a checkpoint fits a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimefsdp.checkpoint.identity import architecture_of, check_identity, differences
from slimefsdp.errors import CheckpointError

FILE = Path("run/step_00000001/manifest.json")
OWN = {"model_type": "qwen3", "config.json": {"hidden_size": 32, "rope": {"theta": 1e4}}, "optim.name": "adamw"}


def test_equal_identities_pass() -> None:
    check_identity(OWN, OWN, FILE)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"optim.name": "sgd"}, "optim.name", "optim.name is sgd in run/step_00000001/manifest.json, but adamw"),
        ({"config.json": {"hidden_size": 64, "rope": {"theta": 1e4}}}, "hidden_size", "hidden_size is 64"),
        ({"config.json": {"hidden_size": 32, "rope": {"theta": 5}}}, "theta", "but 10000.0 in this run"),
        ({"config.json": {"hidden_size": 32}}, "rope", "rope is not set in"),
        ({"more": 1}, "more", "more is 1 in .* but not set in this run"),
    ],
)
def test_the_first_difference_is_named_with_both_values_and_the_file(changes, field, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        check_identity(OWN | changes, OWN, FILE)
    assert caught.value.field == field


def test_keys_that_change_no_number_are_no_part_of_an_architecture() -> None:
    config = {"hidden_size": 32, "transformers_version": "5.0", "_name_or_path": "x", "torch_dtype": "float32"}
    assert architecture_of(config) == {"hidden_size": 32}


def test_differences_are_told_from_this_runs_side() -> None:
    assert differences({"lr": 1, "gone": 2, "same": 3}, {"lr": 4, "new": 5, "same": 3}) == ["lr is 4 (saved: 1)"]
