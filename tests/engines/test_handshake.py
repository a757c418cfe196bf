"""Whether an engine computes as the trainer does, by log-probs of what it sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from actors.engines.handshake import means_apart
from slimefsdp.errors import EngineError
from tests.support.refusals import refused

OWNERS = np.array([0, 0, 1, 1])


def test_engines_whose_log_probs_are_close_are_taken(make_config: Any) -> None:
    config = make_config(rollout={"engine_logprob_bound": 0.5})
    assert means_apart(config, OWNERS, np.array([0.25, 0.75, 0.0, 0.25])) == [0.5, 0.125]


@pytest.mark.parametrize("apart", [0.76, float("nan"), float("inf")])
def test_the_engine_that_is_furthest_away_is_named(make_config: Any, apart: float) -> None:
    config = make_config(rollout={"engine_logprob_bound": 0.5})
    with refused(EngineError, "rollout.engine_logprob_bound", "engine 1") as caught:
        means_apart(config, OWNERS, np.array([0.25, 0.75, 0.25, apart]))
    assert caught.value.rank == 1
