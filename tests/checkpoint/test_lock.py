"""One process writes a folder; its end, however it comes, lets the next one in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slimefsdp.checkpoint.lock import LOCK, FolderLock
from slimefsdp.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from slimefsdp.checkpoint.lock import FolderLock
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


def test_a_second_process_is_told_at_once_who_holds_the_folder_and_gets_it_when_that_one_is_killed(tmp_path, holder):
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        lock.acquire()
    assert (
        f'"pid": {holder.pid}' in caught.value.message and f'"host": "{socket.gethostname()}"' in caught.value.message
    )
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


def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Not a directory"):
        FolderLock(tmp_path / "file" / "run").acquire()
