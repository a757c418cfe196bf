from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest

from tests.rank_pool import RankPool

pytest_plugins = ("tests.ray_fixtures",)

# shared machines stall: a deadline per example would fail tests that are right
hypothesis.settings.register_profile("slimefsdp", deadline=None)
hypothesis.settings.load_profile("slimefsdp")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Processes that become gloo ranks, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()
