"""A writer that is really killed, at every point of the commit protocol, leaves what the next process continues from.

The processes form a chain: each loads what the one before left, checks it, takes a step and is killed while it saves.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.checkpoint import store
from slimefsdp.checkpoint.store import POINTS
from slimefsdp.config import RunConfig
from slimefsdp.trainer import Trainer
from tests.support.fresh_ranks import run_fresh
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, fingerprint, fresh_batch, settings

# reached only where an earlier save of the same step is replaced
REPLACING = {"commit: an earlier save of the step is moved aside", "commit: the earlier save of the step is removed"}
IN_PLACE = POINTS.index("commit: the pointer is in place")


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def straight_run(rank: int, send: Callable[[Any], None], config: RunConfig, steps: int) -> None:
    """The weights before and the loss of each step of a run that nobody disturbs; its step 0 is saved."""
    trainer = Trainer(config, device=CPU)
    trainer.save(0)
    trainer.finish_save()
    send([(fingerprint(trainer.policy), trainer.train_step(fresh_batch(step))["loss"].hex()) for step in range(steps)])


def continue_and_die(rank: int, send: Callable[[Any], None], config: RunConfig, point: str, dying_rank: int) -> None:
    trainer = Trainer(config, device=CPU)
    trainer.load()
    restored = trainer.restored()
    assert restored is not None
    weights = fingerprint(trainer.policy)
    if point in REPLACING:
        trainer.save(restored.step)  # the second save of it is the one that dies
        trainer.finish_save()
    else:
        send((restored.step, weights, trainer.train_step(fresh_batch(restored.step))["loss"].hex()))

    def die(reached: str) -> None:
        if reached == point and rank == dying_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    store.at_point = die
    if point in REPLACING:
        send((restored.step, weights, None))
        trainer.save(restored.step)
    else:
        trainer.save(restored.step + 1)
    trainer.finish_save()


def check_chain(config: RunConfig, links: list[tuple[str, int]]) -> None:
    steps = len(links) + 2
    sent, code = run_fresh(config.ranks, straight_run, config, steps)[0]
    assert code == 0
    (undisturbed,) = sent
    expected = 0
    for point, dying_rank in [*links, ("", 0)]:  # the last one is not killed
        results = run_fresh(config.ranks, continue_and_die, config, point, dying_rank)
        for sent, _ in results:
            ((step, weights, loss),) = sent
            assert (step, weights) == (expected, undisturbed[expected][0]), point
            assert loss is None or loss == undisturbed[expected][1]
        codes = [code for _, code in results]
        assert codes[dying_rank] == (-signal.SIGKILL if point else 0), (point, codes)
        expected += point not in REPLACING and point != "" and POINTS.index(point) >= IN_PLACE


@pytest.mark.slow  # a process for every point
def test_one_rank_killed_at_every_point(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, run={"dir": str(tmp_path)}, checkpoint={"keep_last": 1})
    check_chain(config, [(point, 0) for point in POINTS])


@pytest.mark.slow  # a process for every point
def test_either_of_two_ranks_killed(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, checkpoint={"keep_last": 1})
    links = [(point, 1) for point in POINTS if point.startswith("shard")]
    check_chain(config, [*links, *((point, 0) for point in POINTS[6:14:3])])


@pytest.mark.slow  # a process for every point
def test_killed_while_it_saves_in_the_background(folder: Path, tmp_path: Path) -> None:
    run = {"dir": str(tmp_path)}
    config = settings(folder, mesh={"dp": 2}, run=run, checkpoint={"keep_last": 1, "async_save": True})
    check_chain(config, [(POINTS[4], 1), (POINTS[4], 0), (POINTS[11], 0), (POINTS[13], 0), (POINTS[16], 0)])


def counted_points(rank: int, config: RunConfig) -> list[Counter[str]]:
    trainer = Trainer(config, device=CPU)
    counts = []
    nothing = store.at_point
    for step in (1, 2, 2):
        counts.append(Counter())
        store.at_point = lambda point: counts[-1].update([point])
        trainer.save(step)
        trainer.finish_save()
    store.at_point = nothing
    return counts


@pytest.mark.parametrize("async_save", [False, True])
def test_every_point_is_reached_once_a_save_where_there_is_something_to_do(
    folder: Path, ranks: RankPool, tmp_path: Path, async_save: bool
) -> None:
    run, checkpoint = {"dir": str(tmp_path)}, {"keep_last": 1, "async_save": async_save}
    first, other = ranks.run(2, counted_points, settings(folder, mesh={"dp": 2}, run=run, checkpoint=checkpoint))
    pruning = {"prune: a checkpoint is moved aside", "prune: a checkpoint is removed"}
    for counts, absent in zip(first, [REPLACING | pruning, REPLACING, pruning], strict=True):
        assert counts == Counter(point for point in POINTS if point not in absent)
    assert all(counts == Counter(point for point in POINTS if point.startswith("shard")) for counts in other)
    assert set().union(*first) == set(POINTS)
