"""Neither recoveries nor calls leave anything behind in the processes that go on.

The long forms, 100 recoveries and 1,000 steps, are `benchmarks/soak.py`.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import ray

from tests.faults.conftest import Supervised
from tests.faults.faulty_worker import Fault
from tests.faults.recorded_job import recorded_batch
from tests.process_resources import held_by_the_process

MEGABYTE = 2**20


def lose_a_rank(supervised: Supervised) -> None:
    """One recovery, in a step behind a checkpoint."""
    supervised.faults.arm(Fault(1, "after forward"))
    supervised.group.train_step(recorded_batch(1))
    assert len(supervised.faults.fired()) == 1
    supervised.group.save(1)


def classes() -> int:
    # by its type: objects that stand for others answer isinstance for them, and warn
    return sum(issubclass(type(thing), type) for thing in gc.get_objects())


@pytest.mark.slow
def test_recoveries_leave_no_file_thread_or_memory_behind_in_the_driver(supervised: Supervised) -> None:
    supervised.group.load(0)
    lose_a_rank(supervised)
    before = held_by_the_process() | {"classes": classes()}
    lose_a_rank(supervised)
    after = held_by_the_process() | {"classes": classes()}
    assert after["classes"] == before["classes"], "a class of Ray actors is made once: Ray keeps each for good"
    assert after["files"] <= before["files"] and after["threads"] <= before["threads"]
    assert after["bytes"] - before["bytes"] < 8 * MEGABYTE


@pytest.mark.slow
def test_calls_leave_no_file_thread_or_memory_behind_in_driver_and_ranks(supervised: Supervised, receiver: Any) -> None:
    group = supervised.group
    group.load(0)
    ranks = group._group._workers

    def held(steps: range) -> list[dict[str, int]]:
        for step in steps:
            group.compute_log_probs(recorded_batch(step))
            group.train_step(recorded_batch(step))
            group.sleep()
            group.wake_up()
            group.save(1)
            group.update_weights([receiver])
        return [*ray.get([rank.held.remote() for rank in ranks], timeout=60), held_by_the_process()]

    before, after = held(range(1, 9)), held(range(9, 25))
    for early, late in zip(before, after, strict=True):
        assert late["files"] <= early["files"] and late["threads"] <= early["threads"]
        assert late["bytes"] - early["bytes"] < 8 * MEGABYTE
