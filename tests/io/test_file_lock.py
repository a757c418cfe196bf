"""One process writes a folder; its end, however it comes, lets the next one in."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import LOCK, FolderLock

HOLD = """
import sys, time
from pathlib import Path
from slimefsdp.io.files import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.default_tier
def test_a_second_process_is_told_at_once_who_holds_the_folder_and_gets_it_when_that_one_is_killed(tmp_path, holder):
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        lock.acquire()
    assert str(holder.pid) in caught.value.message and socket.gethostname() in caught.value.message
    holder.kill()
    holder.wait()
    lock.acquire()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_process_holds_a_folder_once_and_gives_it_back(tmp_path: Path):
    lock, again = FolderLock(tmp_path / "new" / "run"), FolderLock(tmp_path / "new" / "run")
    lock.acquire()
    again.acquire()
    again.release()
    lock.release()  # is free already
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "new" / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    process.kill()
    process.wait()


def test_a_folder_that_was_removed_and_made_again_is_locked_again(tmp_path):
    lock = FolderLock(tmp_path / "run")
    lock.acquire()
    (tmp_path / "run" / LOCK).unlink()
    lock.acquire()
    assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


FORK = """
import os, sys, time
from pathlib import Path
from slimefsdp.io.files import FolderLock
FolderLock(Path(sys.argv[1])).acquire()
if not os.fork():
    print("held", flush=True)  # by its parent, when the child is on its way
time.sleep(600)
"""


@pytest.mark.default_tier
def test_a_forked_child_does_not_keep_the_lock_of_a_parent_that_is_killed(tmp_path: Path):
    # a group of its own, so that the child can be ended too
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "held\n"
        parent.kill()
        parent.wait()
        os.killpg(parent.pid, 0)  # the child is alive
        FolderLock(tmp_path).acquire()
        FolderLock(tmp_path).release()
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
