"""The filter `mixed_groups` keeps the groups whose rewards differ, whatever is taken off these later."""

from __future__ import annotations

import numpy as np
import pytest

from actors.engines.pool import SampledResponse
from actors.rollout.groups import ScoredSample, mixed_groups

RECORD = {"prompt": "sort 31"}


def group(*rewards: float, trained: float = 0.0) -> list[ScoredSample]:
    sample = SampledResponse(0, 0, [1, 2], 1, [-0.5], "2", True)
    return [ScoredSample(sample, {"reward": reward}, trained) for reward in rewards]


@pytest.mark.parametrize("rewards", [(0, 0, 0), (1, 1, 1), (0.25, 0.25), (0, 1, 1), (0.5, 0.25), (0, 0, 1e-30)])
def test_mixed_groups_keeps_the_groups_that_have_an_advantage(rewards: tuple[float, ...]) -> None:
    assert mixed_groups(RECORD, group(*rewards)) == bool(np.std(np.array(rewards, dtype=np.float64)) > 0)


def test_mixed_groups_looks_at_rewards_before_anything_is_taken_off_them() -> None:
    assert not mixed_groups(RECORD, [*group(1.0, trained=1.0), *group(1.0, trained=0.5)])
    assert mixed_groups(RECORD, [*group(1.0, trained=0.5), *group(0.5, trained=0.5)])
