"""Lengths from a word or a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError
from slimefsdp.estimate.lengths import read_samples, sample_lengths


def test_distributions_have_the_shape_they_are_named_by() -> None:
    assert sample_lengths("fixed(512)", 3).tolist() == [512] * 3
    uniform = sample_lengths("uniform(10, 20)", 5000)
    assert set(uniform) == set(range(10, 21))
    drawn = sample_lengths("lognormal(1000, 0.8)", 200_000)
    assert drawn.dtype == np.int64 and drawn.min() >= 1
    assert drawn.mean() == pytest.approx(1000, rel=0.02) and np.log(drawn).std() == pytest.approx(0.8, rel=0.02)
    cut = sample_lengths(" lognormal( 1000 ,0.8, 900, 1100) ", 1000)
    assert (cut.min(), cut.max()) == (900, 1100)


def test_files_give_the_lengths_that_they_hold(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_text(json.dumps([5, 3, 1024]))
    assert sample_lengths(str(tmp_path / "lengths.json"), 99).tolist() == [5, 3, 1024]
    batch = RolloutBatch.from_samples(
        [
            {"tokens": list(range(2, 2 + length)), "response_length": 1, "reward": 0.0, "group_id": 0}
            for length in (4, 9)
        ]
    )
    batch.save(tmp_path / "batch.safetensors")
    loaded = read_samples(str(tmp_path / "batch.safetensors"), 99)
    assert isinstance(loaded, RolloutBatch) and loaded.same_as(batch)
    assert sample_lengths(str(tmp_path / "batch.safetensors"), 99).tolist() == [4, 9]


@pytest.mark.parametrize(
    "text",
    [
        "fixed()", "fixed(0)", "fixed(1.5)", "fixed(nan)", "fixed(1e30)", "uniform(5, 3)", "uniform(1, inf)",
        "lognormal(100)", "lognormal(100, -1)", "lognormal(100, 1, 9, 3)", "gamma(1, 2)", "nothing.json", "", "a\0b",
        "x" * 5000,
    ],
)  # fmt: skip
def test_what_is_neither_a_distribution_nor_a_file_is_answered_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sample_lengths(text, 10)
    assert caught.value.field == "--lengths" and repr(text) in caught.value.message
    assert caught.value.hint
