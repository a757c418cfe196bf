"""Trainers without a driver: all ranks have the commit of a model that rank 0 found, each from its own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from huggingface_hub import constants

from slimefsdp.config import RunConfig
from slimefsdp.errors import ModelError
from slimefsdp.io import hub
from slimefsdp.trainer import Trainer
from tests.support.hub import COMMITS, files_of, lay_out
from tests.support.rank_pool import RankPool
from tests.support.trainers import CPU, fingerprint, settings

OLD, NEW = COMMITS[:2]
NAME = "owner/tiny"


def trained_by(rank: int, config: RunConfig, caches: list[Path]) -> Any:
    """What a rank with a cache of its own begins with: folders and a digest of its weights; or its error in a list."""
    hub._snapshot.cache_clear()
    with (
        patch.object(constants, "HF_HUB_CACHE", str(caches[rank])),
        patch.object(constants, "HF_HUB_OFFLINE", True),
    ):
        try:
            trainer = Trainer(config, device=CPU)
            return trainer.folder.path, trainer.config.folder_of("ref")[0], fingerprint(trainer.policy)
        except ModelError as error:
            return [error]


@pytest.fixture
def caches(tmp_path: Path, folder: Path) -> list[Path]:
    """Of two machines; on that of rank 1 the main branch is still at an older commit."""
    found = [(tmp_path / str(rank)).resolve() for rank in range(2)]
    for cache, newest in zip(found, (NEW, OLD), strict=True):
        for commit in (OLD, NEW):
            lay_out(cache, NAME, commit, files_of(folder), refs=("main",) if commit == newest else ())
    return found


def test_all_ranks_have_the_commit_that_rank_0_found(ranks: RankPool, caches: list[Path], folder: Path) -> None:
    config = settings(Path("m"), model={"path": NAME}, reference={"path": f"{NAME}@{OLD}"}, mesh={"dp": 2})
    found = ranks.run(2, trained_by, config, caches)
    places = [cache / f"models--{NAME.replace('/', '--')}" / "snapshots" for cache in caches]
    assert [one[:2] for one in found] == [(place / NEW, place / OLD) for place in places]
    local = ranks.run(2, trained_by, settings(folder, mesh={"dp": 2}), caches)
    assert {one[2] for one in [*found, *local]} == {local[0][2]}


def test_where_rank_0_reads_for_all_the_others_need_no_cache(
    ranks: RankPool, caches: list[Path], tmp_path: Path
) -> None:
    config = settings(Path("m"), model={"path": NAME, "read": "first_rank"}, mesh={"dp": 2})
    found = ranks.run(2, trained_by, config, [caches[0], tmp_path / "none"])
    assert found[0] == found[1] and found[0][0].name == NEW
