"""Ctrl-C while ranks or engines start, in a driver that lives on: what was reserved and started for them is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.util.placement_group import placement_group_table

from actors.cluster.cleanup import running_processes
from actors.engines.pool import EnginePool
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.usefixtures("cluster"),
]


def reserved() -> set[str]:
    """The placement groups that hold or wait for room."""
    return {name for name, group in placement_group_table().items() if group["state"] != "REMOVED"}


def processes(kind: str) -> set[tuple[int, int]]:
    """The processes of this driver's actors of a class, by pid and start time."""
    table = running_processes()
    family = {os.getpid()}
    while children := {pid for pid, (parent, _) in table.items() if parent in family} - family:
        family |= children
    found = set()
    for pid in family & table.keys():
        try:
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{kind}".encode()):
                found.add((pid, table[pid][1]))
        except OSError:  # ended meanwhile
            continue
    return found


@pytest.fixture
def interrupted() -> Iterator[None]:
    """SIGINT as in a terminal, also where whoever runs the tests has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize(
    ("launch", "kind"),
    [
        (WorkerGroup.launch, "TrainWorker"),
        (EnginePool.launch, "EmbeddedEngine"),
    ],
    ids=["ranks", "engines"],
)
def test_an_interrupted_launch_gives_its_places_back_and_leaves_no_process(
    make_config: Callable[..., RunConfig], launch: Callable[[RunConfig], object], kind: str
) -> None:
    places, there = reserved(), processes(kind)
    started: set[tuple[int, int]] = set()

    def interrupt() -> None:
        wait_until(lambda: bool(processes(kind) - there))
        started.update(processes(kind) - there)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch(make_config())
        time.sleep(120)  # the launch took no longer than the signal
    thread.join()
    assert started, "the launch was interrupted while a process was there"
    assert wait_until(lambda: reserved() <= places)
    assert wait_until(lambda: processes(kind) <= there)
