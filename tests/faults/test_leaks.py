"""Neither recoveries nor calls leave anything behind in the processes that go on.

The long forms, 100 recoveries and 1,000 steps, are `benchmarks/soak.py`.
"""

from __future__ import annotations

import gc
from collections import Counter

from tests.support.faulty_worker import Fault, Supervised
from tests.support.process_resources import held_by_the_process
from tests.support.recorded_job import recorded_batch
from tests.support.waiting import wait_until

MEGABYTE = 2**20


def lose_a_rank(supervised: Supervised) -> None:
    """One recovery, in a step behind a checkpoint."""
    supervised.faults.arm(Fault(1, "after forward"))
    supervised.group.train_step(recorded_batch(1))
    assert len(supervised.faults.fired()) == 1
    supervised.group.save(1)


def classes() -> Counter[tuple[str, str]]:
    """How often there is a class of each name; by its type, since objects that stand for others answer isinstance."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), type))
    return Counter((str(vars(thing).get("__module__")), thing.__qualname__) for thing in found)


def test_recoveries_leave_no_file_thread_or_memory_behind_in_the_driver(supervised: Supervised) -> None:
    supervised.group.load(0)
    lose_a_rank(supervised)
    before, classes_before = held_by_the_process(), classes()
    lose_a_rank(supervised)
    # what is imported late has names of its own
    again = {name for name, count in classes().items() if name in classes_before and count > classes_before[name]}
    assert not again, "a class of Ray actors is made once: Ray keeps each for good"

    def is_as_before() -> bool:  # what belonged to the lost rank ends a while after it
        after = held_by_the_process()
        return after["files"] <= before["files"] and after["threads"] <= before["threads"]

    assert wait_until(is_as_before)
    assert held_by_the_process()["bytes"] - before["bytes"] < 8 * MEGABYTE
