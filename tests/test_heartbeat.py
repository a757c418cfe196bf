"""How far a process is: ticks, the usual gap of an activity, and whether its thread only waits for others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import _get_default_store

from slimefsdp.attention.cp_comm import Comm
from slimefsdp.heartbeat import IDLE, LAUNCH, Progress
from tests.support.rank_pool import RankPool
from tests.support.waiting import PATIENCE_S


class Clock:
    """One that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


_GOING_ON: list[ExitStack] = []  # an activity ends where nobody refers to it


def progress_after(*steps: tuple[float, str | None]) -> Progress:
    """Of (seconds, then the activity that begins where the one before ends, or None for a tick)."""
    clock = Clock()
    progress = Progress(clock)
    current = ExitStack()
    for seconds, activity in steps:
        clock.now += seconds
        if activity is None:
            progress.tick()
        else:
            current.close()
            current.enter_context(progress.during(activity))
    _GOING_ON.append(current)
    return progress


def test_time_without_a_tick_counts_from_the_last_one_in_whatever_activity() -> None:
    clock = Clock()
    progress = Progress(clock)
    clock.now += 5
    progress.enter("a")
    clock.now += 2
    assert progress.snapshot().since_tick_s == 2
    progress.tick()
    clock.now += 3
    assert (progress.snapshot().since_tick_s, progress.snapshot().ticks) == (3, 2)


def test_an_activity_is_measured_by_its_longest_gap_once_it_has_ended() -> None:
    steps = [(1, "a"), (4, None), (2, None)]
    assert progress_after(*steps).snapshot().usual_gap_s is None, "its first time may be slow in any part"
    assert progress_after(*steps, (1, "b"), (9, "a")).snapshot().usual_gap_s == 4
    assert progress_after(*steps, (7, "b"), (9, "a")).snapshot().usual_gap_s == 7, "the last gap counts as well"
    assert progress_after(*steps, (1, "b"), (9, "a"), (5, None)).snapshot().usual_gap_s == 4, "this one may be held up"
    assert progress_after(*steps, (1, "b"), (9, "a"), (9, "b")).snapshot().usual_gap_s == 9, "of its own activity alone"


def usual_after(*gaps_s: float) -> float | None:
    """Of an activity that came as often, with one gap each time."""
    times = [step for gap_s in gaps_s for step in ((0, "a"), (gap_s, IDLE))]
    return progress_after(*times, (0, "a")).snapshot().usual_gap_s


def test_an_activity_that_failed_is_no_measure() -> None:
    clock = Clock()
    progress = Progress(clock)
    with pytest.raises(ValueError), progress.during("a"):
        raise ValueError
    with progress.during("a"):
        assert progress.snapshot().usual_gap_s is None, "it never came to its end"
        clock.now += 7
    assert usual_after(7) == 7 and progress.snapshot().activity == LAUNCH
    with progress.during("a"):
        assert progress.snapshot().usual_gap_s == 7


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=PATIENCE_S)
    assert not thread.is_alive()


def test_what_goes_on_beside_a_call_is_progress_only_while_the_call_waits_for_it() -> None:
    clock = Clock()
    progress = Progress(clock)
    beside = progress.aside()(progress.tick)
    progress.enter("train_step")
    clock.now += 30
    before = progress.snapshot()
    in_another_thread(beside)
    assert (progress.snapshot().since_tick_s, progress.snapshot().ticks) == (30, before.ticks), (
        "a stuck call looks stuck"
    )
    with progress.joined():
        in_another_thread(beside)
        assert (progress.snapshot().since_tick_s, progress.snapshot().ticks) == (0, before.ticks + 1)
    clock.now += 5
    in_another_thread(beside)
    assert progress.snapshot().since_tick_s == 5
    in_another_thread(progress.tick)
    assert progress.snapshot().since_tick_s == 0, "a thread that works for the call"


def test_an_activity_that_gave_way_to_one_inside_of_it_has_not_ended() -> None:
    clock = Clock()
    progress = Progress(clock)
    with progress.during("outer"):
        clock.now += 2
        for _ in range(2):
            with progress.during("inner"):
                clock.now += 7
            assert progress.snapshot().usual_gap_s is None, "what is left of it has never been"
        with progress.during("inner"):
            assert progress.snapshot().usual_gap_s == 7
    with progress.during("outer"):
        assert progress.snapshot().usual_gap_s == 2, "without what went on inside"


def test_the_place_is_that_of_the_thread_that_entered_the_activity() -> None:
    progress, entered, released = Progress(), threading.Event(), threading.Event()

    def spins_here() -> None:
        progress.enter("a")
        entered.set()
        while not released.is_set():
            pass

    thread = threading.Thread(target=spins_here)
    thread.start()
    assert entered.wait(timeout=PATIENCE_S)
    found = progress.snapshot()
    released.set()
    thread.join(timeout=PATIENCE_S)
    assert found.place.startswith("spins_here (tests/test_heartbeat.py:") and not found.waits
    assert progress.snapshot().place == "nowhere in Python", "the thread is gone"


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def gather_object() -> None:
    dist.all_gather_object([None, None], "object")


def ring_step() -> None:
    rank = dist.get_rank()
    got, give = torch.empty(2), torch.ones(2)
    outgoing = [give if peer != rank else torch.empty(0) for peer in range(2)]
    arriving = [got if peer != rank else torch.empty(0) for peer in range(2)]
    Comm(dist.group.WORLD).exchange(outgoing, arriving).wait()


def traced_all_reduce() -> None:
    _functional_collectives.all_reduce(torch.ones(1), "sum", dist.group.WORLD).sum().item()


def waits_until_joined(rank: int, collective: Callable[[], None]) -> bool:
    """Rank 0 begins a collective; rank 1 joins when rank 0 was seen to wait, or was not within 20 s."""
    store = _get_default_store()
    if rank == 1:
        store.wait([collective.__name__], timedelta(seconds=60))
        collective()
        return True
    progress = Progress()

    def take_part() -> None:
        progress.enter("a")
        collective()

    thread = threading.Thread(target=take_part)
    thread.start()
    deadline = time.monotonic() + 20
    while not (seen := progress.snapshot().waits) and time.monotonic() < deadline:
        time.sleep(0.01)
    store.set(collective.__name__, "")
    thread.join(timeout=PATIENCE_S)
    return seen


def waits_in_each(rank: int) -> list[bool]:
    return [waits_until_joined(rank, one) for one in (all_reduce, gather_object, ring_step, traced_all_reduce)]


def test_a_thread_in_a_collective_is_seen_to_wait_for_others(ranks: RankPool) -> None:
    assert ranks.run(2, waits_in_each)[0] == [True] * 4


LOOKED_AT = """
import gc, threading, time
from slimefsdp import heartbeat

class Garbage:
    def __init__(self):
        self.cycle = self
    def __del__(self):
        time.sleep(0)  # another thread runs

def come_and_go():
    while True:
        threads = [threading.Thread(target=int) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

for _ in range(2):
    threading.Thread(target=come_and_go, daemon=True).start()
gc.set_threshold(1, 1, 1)
for _ in range(300):
    Garbage()
    assert gc.isenabled() and heartbeat.snapshot().ticks == 0
gc.disable()
heartbeat.snapshot()
assert not gc.isenabled()
"""


def test_a_process_may_be_looked_at_while_threads_come_and_go_and_garbage_is_collected() -> None:
    # in a process of its own: Python 3.11.7 locks up for ever where the collector runs inside sys._current_frames
    subprocess.run([sys.executable, "-c", LOOKED_AT], check=True, timeout=PATIENCE_S)
