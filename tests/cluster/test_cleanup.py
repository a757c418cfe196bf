"""Whatever happens to the driver, its cluster's processes end with it; nobody else's do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors.cluster.cleanup import CleanupProcess, ProcessTree, running_processes
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ROOT = Path(__file__).parents[2]
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]
# a driver with a bystander from before its cleanup, a "raylet" with a child in a session of its own and an orphan (its
# parent has ended), and a bystander from after the raylet; it prints the pids, in this order behind that of the cleanup
DRIVER = """
import os, signal, subprocess, sys, time
from actors.cluster.cleanup import CleanupProcess
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
raylet = '''
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
child = subprocess.Popen(sleep, start_new_session=True)
start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2, start_new_session=True).pid)"
orphan = subprocess.run([sys.executable, "-c", start, *sleep], stdout=subprocess.PIPE, text=True).stdout
print(child.pid, orphan.strip(), flush=True)
time.sleep(300)
'''
before = subprocess.Popen(sleep)
cleanup = CleanupProcess()
with cleanup.marking():
    mother = subprocess.Popen([sys.executable, "-c", raylet], stdout=subprocess.PIPE, text=True)
children = mother.stdout.readline().strip()
after = None
if sys.argv[1] == "named":
    after = subprocess.Popen(sleep)
    cleanup.watch([mother.pid])
if sys.argv[1:] == ["named", "forks"] and os.fork() == 0:
    time.sleep(300)  # with the pipe to the cleanup open
time.sleep(1)  # the cleanup's next look
print(cleanup.pid, mother.pid, children, before.pid, after.pid if after else 0, flush=True)
command = sys.stdin.readline()
if command.strip() == "end":
    cleanup.end()
    print("ended", flush=True)
    sys.stdin.readline()
"""


def is_running(pid: int) -> bool:
    return pid in running_processes()


class Driver:
    """The script above, and the pids it printed."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        self.cleanup, mother, child, orphan, self.before, self.after = map(int, self._read().split())
        self.cluster = [mother, child, orphan]
        table = running_processes()
        assert table.keys() >= {self.cleanup, *self.cluster, self.before}
        self.began = {pid: table[pid][1] for pid in self.cluster}

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def tell(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        return self._read()


@pytest.fixture
def start() -> Iterator[Any]:
    drivers: list[Driver] = []

    def started(*arguments: str) -> Driver:
        drivers.append(Driver(*arguments))
        return drivers[-1]

    yield started
    for driver in drivers:
        with suppress(ProcessLookupError):
            os.killpg(driver.process.pid, signal.SIGKILL)
        driver.process.communicate()
        table = running_processes()
        for pid, began in driver.began.items():
            if pid in table and table[pid][1] == began:  # else another process has the pid now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.default_tier
@pytest.mark.parametrize("arguments", [("named",), ("named", "forks")], ids="-".join)
def test_a_killed_driver_takes_what_was_named_with_it_and_nothing_else(start: Any, arguments: tuple[str, ...]) -> None:
    driver = start(*arguments)
    driver.process.kill()
    assert wait_until(lambda: not any(map(is_running, [*driver.cluster, driver.cleanup])))
    assert is_running(driver.before) and is_running(driver.after)


def test_signals_to_the_cleanup_leave_it_at_its_post(start: Any) -> None:
    driver = start("named")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(driver.cleanup, number)
    os.killpg(driver.process.pid, signal.SIGTERM)  # the driver's group, in which the cleanup is not
    driver.process.wait(timeout=PATIENCE_S)
    assert wait_until(lambda: not any(map(is_running, [*driver.cluster, driver.cleanup])))


def test_at_the_drivers_word_the_cluster_is_gone_when_end_returns_and_the_rest_is_there(start: Any) -> None:
    driver = start("named")
    assert driver.tell("end") == "ended\n"
    assert not any(map(is_running, [*driver.cluster, driver.cleanup]))
    assert is_running(driver.before) and is_running(driver.after)


def test_what_was_started_just_before_the_word_is_ended_too() -> None:
    cleanup = CleanupProcess()
    time.sleep(1)  # it has looked by now, and the word comes before it looks again
    with subprocess.Popen(SLEEP) as process:
        cleanup.end()
        assert process.poll() == -signal.SIGKILL


def test_another_process_with_the_pid_of_one_that_is_gone_is_left_alone() -> None:
    with subprocess.Popen(SLEEP) as process:
        family = ProcessTree()
        family.adopt([process.pid], running_processes())
        family._members[process.pid] -= 1  # as if the one that was meant had started earlier
        family.end()
        assert process.poll() is None
        family.adopt([process.pid], running_processes())  # the control: this one is meant
        family.end()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL


def test_a_child_is_ended_though_its_parent_ended_first() -> None:
    script = "import subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *SLEEP[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as mother:
        assert mother.stdin and mother.stdout
        child = int(mother.stdout.readline())
        family = ProcessTree()
        family.adopt([mother.pid], running_processes())
        family.update(running_processes())
        mother.stdin.close()
        mother.wait(timeout=PATIENCE_S)
        assert is_running(child)
        family.end()
        assert not is_running(child) and not family
