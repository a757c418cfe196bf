"""Starting Ray: a first attempt that fails leaves nothing and is made again; what Ray says goes into a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
# the processes of the first attempt are there when its node "times out", by the exception of Ray's own; then an actor
# prints, starts a process in a session of its own whose parent ends, and dies of a signal
DRIVER = """
import json, os, signal, subprocess, sys
from pathlib import Path
import ray
from ray._private.node import Node
from actors.cluster.connect import connect, disconnect
from actors.cluster.cleanup import running_processes
from slimefsdp.config import config_from_dict
from tests.support.waiting import wait_until

start, attempts = Node.start_ray_processes, []

def timing_out(node):
    start(node)
    attempts.append([info.process.pid for infos in node.all_processes.values() for info in infos])
    if len(attempts) == 1:
        raise Exception("The current node timed out during startup.")

Node.start_ray_processes = timing_out
log = Path(sys.argv[1])
connect(config_from_dict({"model": {"path": "x"}, "mesh": {"device": "cpu"}, "optim": {"total_updates": 1}}), log)
there = running_processes()

@ray.remote(max_restarts=0)
class Talker:
    def talk(self):
        print("said by an actor", flush=True)
        start = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:], stdout=2, start_new_session=True).pid)"
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        orphan = subprocess.run([sys.executable, "-c", start, *sleep], stdout=subprocess.PIPE, text=True).stdout
        return os.getpid(), int(orphan)

talker = Talker.remote()
pid, orphan = ray.get(talker.talk.remote())
lives = orphan in running_processes()
spoken = wait_until(lambda: "said by an actor" in log.read_text())
os.kill(pid, signal.SIGKILL)
died = wait_until(lambda: "(raylet)" in log.read_text())
disconnect()
print(json.dumps({
    "attempts": attempts, "of_first": sorted(set(attempts[0]) & there.keys()), "of_second": sorted(set(attempts[1]) & there.keys()),
    "after": sorted({pid for pids in attempts for pid in pids} & running_processes().keys()), "spoken": spoken, "died": died,
    "orphan": [lives, orphan in running_processes()],
}))
"""  # noqa: E501


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ray_is_started_again_after_a_failure_and_its_messages_go_into_a_file(tmp_path: Path) -> None:
    log = tmp_path / "run" / "ray.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, log],
        capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()  # nothing of Ray's beside it
    found: dict[str, Any] = json.loads(line)
    assert len(found["attempts"]) == 2 and len(found["attempts"][0]) >= 2
    assert found["of_first"] == [] and found["of_second"] == sorted(found["attempts"][1]) and found["after"] == []
    assert found["spoken"] and found["died"]
    assert found["orphan"] == [True, False], "what an actor leaves behind ends with the cluster"
    assert "\x1b[" not in done.stderr + log.read_text() and "(raylet)" not in done.stderr
