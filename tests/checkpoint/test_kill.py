"""A writer that is really killed, before any disk operation of a save, leaves what the next process continues from.

The processes form a chain: each loads what the one before left, checks it, takes a step and is killed while it saves.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from slimefsdp.config import RunConfig
from slimefsdp.trainer import Trainer
from tests.support.disk_points import watch_disk
from tests.support.fresh_ranks import run_fresh
from tests.support.tiny_models import TinyFolder
from tests.support.trainers import CPU, fingerprint, fresh_batch, settings

POINTER = "after replace .latest.tmp"  # from here on the new checkpoint is the newest one
STEPS = 40  # more than any chain takes


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def straight_run(rank: int, send: Callable[[Any], None], config: RunConfig) -> None:
    """Sends the weights before and the loss of each step of an undisturbed run, and saves its step 0."""
    trainer = Trainer(config, device=CPU)
    trainer.save(0)
    trainer.finish_save()
    send([(fingerprint(trainer.policy), trainer.train_step(fresh_batch(step))["loss"].hex()) for step in range(STEPS)])


def continue_and_die(
    rank: int, send: Callable[[Any], None], config: RunConfig, at: int | str, dying_rank: int, is_again: bool
) -> None:
    """Loads, takes a step, and dies in its save, or in a second save of the step that it loaded.

    Args:
        at: the number of the disk operation before which it dies, or a point of `watch_disk`.
    """
    trainer = Trainer(config, device=CPU)
    trainer.load()
    restored = trainer.restored()
    assert restored is not None
    weights, loss, step = fingerprint(trainer.policy), None, restored.step
    if not is_again:
        loss = trainer.train_step(fresh_batch(step))["loss"].hex()
        step += 1
    send((restored.step, weights, loss))
    operations = 0

    def die(point: str) -> None:
        nonlocal operations
        operations += point.startswith("before")
        if rank == dying_rank and at in (operations, point):
            os.kill(os.getpid(), signal.SIGKILL)
        if point == POINTER:
            send(POINTER)

    watch_disk(die)
    trainer.save(step)
    trainer.finish_save()


def check_chain(config: RunConfig, links: Iterable[tuple[int | str, int]], *, is_again: bool = False) -> int:
    """Runs a chain until a process survives its save, or the links end; returns how many were killed."""
    (undisturbed,), code = run_fresh(config.ranks, straight_run, config)[0]
    assert code == 0
    expected = 0
    for killed, (at, dying_rank) in enumerate(links):
        results = run_fresh(config.ranks, continue_and_die, config, at, dying_rank, is_again)
        for (step, weights, loss), *_ in (sent for sent, _ in results):
            assert (step, weights) == (expected, undisturbed[expected][0]), at
            assert loss in (None, undisturbed[expected][1])
        expected += POINTER in results[0][0] and not is_again
        codes = [code for _, code in results]
        if codes == [0] * config.ranks:
            return killed
        assert codes[dying_rank] == -signal.SIGKILL, (at, codes)
    return len(list(links))


@pytest.mark.slow  # a process for every operation
def test_a_rank_killed_before_every_disk_operation(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, run={"dir": str(tmp_path)}, checkpoint={"keep_last": 1})
    assert check_chain(config, ((at, 0) for at in itertools.count(1))) > 15


@pytest.mark.slow
def test_a_rank_killed_while_it_replaces_its_save_of_a_step(folder: Path, tmp_path: Path) -> None:
    config = settings(folder, run={"dir": str(tmp_path)}, checkpoint={"keep_last": 1})
    links = [(point, 0) for point in ("after rename step", "before rmdir .replaced_step")]
    assert check_chain(config, links, is_again=True) == len(links)


@pytest.mark.slow
@pytest.mark.parametrize("async_save", [False, True])
def test_either_of_two_ranks_killed(folder: Path, tmp_path: Path, async_save: bool) -> None:
    checkpoint = {"keep_last": 1, "async_save": async_save}
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, checkpoint=checkpoint)
    half = "half of the tensors are written"
    of_first = ("before mkdir .tmp_step", half, "before rename .tmp_step", "before replace .latest.tmp", POINTER)
    links = [(half, 1), ("before fsync rank_00001.json", 1), *((point, 0) for point in of_first)]
    assert check_chain(config, links) == len(links)
