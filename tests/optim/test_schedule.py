"""The learning rate against its closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.optim.optimizer_step import learning_rate

SHAPES = ("constant", "linear", "cosine")


def rates(schedule: str, *, warmup: int, total: int, floor: float = 0.0, upto: int | None = None) -> np.ndarray:
    return np.array(
        [
            learning_rate(
                update, peak=2.0, schedule=schedule, warmup_updates=warmup, total_updates=total, min_ratio=floor
            )
            for update in range(upto or total)
        ]
    )


@pytest.mark.parametrize("schedule", SHAPES)
def test_warm_up_rises_linearly_to_the_peak_and_is_never_zero(schedule: str) -> None:
    assert rates(schedule, warmup=4, total=20)[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert rates(schedule, warmup=0, total=20)[0] == 2.0


@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_decays_are_straight_and_half_a_cosine_down_to_the_floor(floor: float) -> None:
    steps = np.linspace(0, 1, 17)  # from the first update after the warm-up to the last
    linear = 2.0 * (floor + (1 - floor) * (1 - steps))
    cosine = 2.0 * (floor + (1 - floor) * np.cos(np.pi * steps / 2) ** 2)
    assert np.abs(rates("linear", warmup=3, total=20, floor=floor)[3:] - linear).max() < 1e-12
    assert np.abs(rates("cosine", warmup=3, total=20, floor=floor)[3:] - cosine).max() < 1e-12


@given(
    st.sampled_from(["linear", "cosine"]), st.integers(0, 20), st.integers(1, 200), st.floats(0, 1), st.integers(0, 300)
)
def test_after_the_end_the_floor_stays_and_before_it_nothing_is_below(
    schedule: str, warmup: int, decay: int, floor: float, past: int
) -> None:
    total = warmup + decay
    values = rates(schedule, warmup=warmup, total=total, floor=floor, upto=total + past + 1)
    assert values[total:] == pytest.approx(np.full(past + 1, 2.0 * floor), abs=1e-12)
    after = values[warmup:]
    assert (np.diff(after) <= 1e-12).all() and (after >= 2.0 * floor - 1e-12).all() and values.max() <= 2.0 + 1e-12
