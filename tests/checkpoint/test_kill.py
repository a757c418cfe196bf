"""A writer that is really killed in the middle of a save leaves what the next process continues from.

The processes form a chain: each loads what the one before left, checks it, takes a step and is killed while it saves.
"""

from __future__ import annotations

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
STEPS = 4  # as many as the chain has links


@pytest.fixture(scope="module")
def folder(tiny_folder: TinyFolder) -> Path:
    return tiny_folder()


def straight_run(rank: int, send: Callable[[Any], None], config: RunConfig) -> None:
    """Sends the weights before and the loss of each step of an undisturbed run, and saves its step 0."""
    trainer = Trainer(config, device=CPU)
    trainer.save(0)
    trainer.finish_save()
    send([(fingerprint(trainer.policy), trainer.train_step(fresh_batch(step))["loss"].hex()) for step in range(STEPS)])


def continue_and_die(rank: int, send: Callable[[Any], None], config: RunConfig, at: str, dying_rank: int) -> None:
    """Loads, takes a step, and dies in its save, at a point of `watch_disk`."""
    trainer = Trainer(config, device=CPU)
    trainer.load()
    restored = trainer.restored()
    assert restored is not None
    weights, step = fingerprint(trainer.policy), restored.step
    send((step, weights, trainer.train_step(fresh_batch(step))["loss"].hex()))

    def die(point: str) -> None:
        if rank == dying_rank and point == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if point == POINTER:
            send(POINTER)

    watch_disk(die)
    trainer.save(step + 1)
    trainer.finish_save()


def check_chain(config: RunConfig, links: Iterable[tuple[str, int]]) -> None:
    """Runs a process for each link, which is killed at that point on that rank, and checks what each one found."""
    (undisturbed,), code = run_fresh(config.ranks, straight_run, config)[0]
    assert code == 0
    expected = 0
    for at, dying_rank in links:
        results = run_fresh(config.ranks, continue_and_die, config, at, dying_rank)
        for (step, weights, loss), *_ in (sent for sent, _ in results):
            assert (step, weights) == (expected, undisturbed[expected][0]), at
            assert loss == undisturbed[expected][1]
        expected += POINTER in results[0][0]
        codes = [code for _, code in results]
        assert codes[dying_rank] == -signal.SIGKILL, (at, codes)


@pytest.mark.slow  # processes of their own for every link
def test_either_of_two_ranks_killed_while_they_save_in_the_background(folder: Path, tmp_path: Path) -> None:
    checkpoint = {"keep_last": 1, "async_save": True}
    config = settings(folder, mesh={"dp": 2}, run={"dir": str(tmp_path)}, checkpoint=checkpoint)
    half = "half of the tensors are written"
    links = [(half, 1), (half, 0), ("before rename .tmp_step", 0), (POINTER, 0)]
    check_chain(config, links)
