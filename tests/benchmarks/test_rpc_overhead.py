"""What the benchmark of the calls' cost reads of processes, and how sure it says to be."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np

from benchmarks.rpc_overhead import cpu_seconds, descendants, interval_of_median, of_those_alive
from tests.support.waiting import PATIENCE_S


def test_children_and_theirs_are_found_and_their_time_is_counted_until_they_end() -> None:
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdin is not None
        parent.stdout.readline()  # the grandchild has done its work
        (grandchild,) = descendants(parent.pid)
        assert {parent.pid, grandchild} <= set(descendants(os.getpid()))
        assert cpu_seconds(grandchild) >= 0.4
        assert of_those_alive([parent.pid, grandchild]).keys() == {parent.pid, grandchild}
        parent.stdin.write(b"\n")
        parent.stdin.close()
        parent.wait(timeout=PATIENCE_S)
    deadline = time.monotonic() + 30
    while of_those_alive([grandchild]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert of_those_alive([parent.pid, grandchild]) == {}


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    intervals = [interval_of_median(rng.lognormal(0.0, 0.05, 48)) for _ in range(100)]
    assert 0.9 <= np.mean([low <= 1.0 <= high for low, high in intervals]) <= 0.99
