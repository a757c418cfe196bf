"""The loss scale follows what became of the updates, and is a power of two at every moment."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.optim.optimizer_step import LossScale


def test_it_doubles_after_the_interval_and_halves_at_once() -> None:
    scaling = LossScale(4.0, growth_interval=3)
    seen = []
    for is_finite in (True, True, True, True, True, False, True, True, True):
        scaling.adjust(is_finite=is_finite)
        seen.append(scaling.scale)
    # two finite ones before the overflow do not count afterwards
    assert seen == [4.0, 4.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def test_it_ends_at_its_floor() -> None:
    scaling = LossScale(2.0, growth_interval=1)
    assert not scaling.is_at_floor
    for _ in range(3):
        scaling.adjust(is_finite=False)
        assert scaling.scale == 1.0 and scaling.is_at_floor
    scaling.adjust(is_finite=True)
    assert scaling.scale == 2.0 and not scaling.is_at_floor


@given(st.integers(0, 24), st.integers(1, 5), st.lists(st.booleans(), max_size=60))
def test_it_is_always_a_power_of_two_of_at_least_one(exponent: int, interval: int, outcomes: list[bool]) -> None:
    scaling = LossScale(2**exponent, interval)
    for is_finite in outcomes:
        scaling.adjust(is_finite=is_finite)
        assert scaling.scale >= 1 and math.frexp(scaling.scale)[0] == 0.5
