"""A server that an engine starts ends with it, however it went, and leaves a log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from actors.engines.child_server import ChildServer
from tests.support.waiting import PATIENCE_S, is_alive, wait_until

# a server that has started another process, and says both pids
SERVER = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(1000)
"""
PARENT = f"""
import sys, time
from pathlib import Path
from actors.engines.child_server import ChildServer
server = ChildServer([sys.executable, "-c", {SERVER!r}], {{}}, Path(sys.argv[1]), Path("/"))
time.sleep(1000)
"""


def pids_in(log: Path) -> list[int]:
    assert wait_until(lambda: log.exists() and len(log.read_text().split()) == 2)
    return [int(pid) for pid in log.read_text().split()]


def started(tmp_path: Path, code: str) -> ChildServer:
    return ChildServer([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", tmp_path)


def test_all_processes_of_a_server_end_when_it_is_ended(tmp_path: Path) -> None:
    server = started(tmp_path, SERVER)
    pids = pids_in(server.log)
    assert pids[0] == server.pid and server.status() is None
    server.end()
    assert server.status() == -signal.SIGTERM and wait_until(lambda: not any(map(is_alive, pids)), 30)
    server.end()


def test_a_server_is_told_to_end_also_by_a_process_that_has_the_signal_blocked(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        server = started(tmp_path, SERVER)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    pids = pids_in(server.log)
    server.end()
    assert server.status() == -signal.SIGTERM and wait_until(lambda: not any(map(is_alive, pids)), 30)


@pytest.mark.default_tier  # two small processes without torch
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log)])
    pids = pids_in(log)
    parent.send_signal(number)
    parent.wait()
    assert wait_until(lambda: not any(map(is_alive, pids)), 30)


def test_a_server_ends_with_the_actor_that_started_it(cluster: None, tmp_path: Path) -> None:
    class Engine:
        def start(self, log: Path) -> None:
            self.server = ChildServer([sys.executable, "-c", SERVER], {}, log, Path("/"))

    actor = ray.remote(num_cpus=0)(Engine).remote()  # type: ignore[attr-defined]
    ray.get(actor.start.remote(tmp_path / "log"), timeout=PATIENCE_S)
    pids = pids_in(tmp_path / "log")
    ray.kill(actor)  # which has it kill its children first
    assert wait_until(lambda: not any(map(is_alive, pids)), 30)


def test_what_a_server_left_behind_ends_with_it(tmp_path: Path) -> None:
    server = started(tmp_path, SERVER)
    pids = pids_in(server.log)
    os.kill(pids[0], signal.SIGKILL)
    assert server.ends_within(30) and server.status() == -signal.SIGKILL
    assert wait_until(lambda: not is_alive(pids[1]), 30)


def test_a_server_that_ends_by_itself_is_known_by_its_status_and_its_last_lines(tmp_path: Path) -> None:
    server = started(tmp_path, "import sys; print('one'); print('two\\n\\nthree', file=sys.stderr); sys.exit(3)")
    assert server.ends_within(60) and server.status() == 3
    assert sorted(server.last_lines(9)) == ["one", "three", "two"] and len(server.last_lines(2)) == 2


def test_a_program_that_is_not_there_is_told_of_in_the_log(tmp_path: Path) -> None:
    server = ChildServer(["/no/such/program"], dict(os.environ), tmp_path / "log", tmp_path)
    assert server.ends_within(60) and server.status() == 127 and "/no/such/program" in server.last_lines(1)[0]
