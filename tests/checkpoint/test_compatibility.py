"""What decides whether a checkpoint fits a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimefsdp.checkpoint.manifest import architecture_of, check_identity, differences
from slimefsdp.errors import CheckpointError
from tests.support.refusals import names, refused

FILE = Path("run/step_00000001/manifest.json")
OWN = {"model_type": "qwen3", "config.json": {"hidden_size": 32, "rope": {"theta": 1e4}}, "optim.name": "adamw"}


def test_equal_identities_pass() -> None:
    check_identity(OWN, OWN, FILE)


@pytest.mark.parametrize(
    ("changes", "field", "saved", "own"),
    [
        ({"optim.name": "sgd"}, "optim.name", "sgd", "adamw"),
        ({"config.json": {"hidden_size": 64, "rope": {"theta": 1e4}}}, "hidden_size", 64, 32),
        ({"config.json": {"hidden_size": 32, "rope": {"theta": 5}}}, "theta", 5, 10000.0),
        ({"config.json": {"hidden_size": 32}}, "rope", FILE, {"theta": 1e4}),
        ({"more": 1}, "more", 1, FILE),
    ],
)
def test_the_first_difference_is_named_with_both_values_and_the_file(changes, field, saved, own) -> None:
    with refused(CheckpointError, field, field, saved, own, FILE):
        check_identity(OWN | changes, OWN, FILE)


def test_keys_that_change_no_number_are_no_part_of_an_architecture() -> None:
    config = {"hidden_size": 32, "transformers_version": "5.0", "_name_or_path": "x", "torch_dtype": "float32"}
    assert architecture_of(config) == {"hidden_size": 32}


def test_a_difference_names_the_setting_and_both_values_and_only_what_both_sides_have_is_compared() -> None:
    (difference,) = differences({"lr": 1, "gone": 2, "same": 3}, {"lr": 4, "new": 5, "same": 3})
    assert all(names(difference, value) for value in ("lr", 4, 1))
