"""What protection costs where nothing fails: seconds inside of guarding code, and a supervised group beside a bare one.

    python benchmarks/guarding.py --json benchmarks/results/guarding.json

Guarding code is, on the driver, checking batches and plans, the call log, and the watchdog with its questions; in a
rank its ticks of progress, and its answers to the watchdog. The share is of a step's wall time; what driver and ranks
take is added up. Rounds of both groups alternate.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402

from actors.cluster.connect import disconnect  # noqa: E402
from actors.fault_tolerance.call_log import CallLog  # noqa: E402
from actors.fault_tolerance.supervisor import SupervisedGroup, Supervisor  # noqa: E402
from actors.workers import watchdog, worker_group  # noqa: E402
from actors.workers.train_worker import TrainWorker  # noqa: E402
from benchmarks.faults import software  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from benchmarks.rpc_overhead import cpu_seconds, random_batch, save_model, settings  # noqa: E402
from slimefsdp.training import prepare  # noqa: E402

LIMIT = 0.02  # of the step's time
WHAT = (
    "train_step of a supervised group: seconds inside of guarding code, medians over rounds; and against a bare "
    "WorkerGroup in alternating rounds"
)


class Stopwatch:
    """Seconds inside of functions, by a name given to them; what is nested counts once."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._threads = threading.local()

    @property
    def _running(self) -> list[float]:
        """Of each function that is open in this thread, the seconds of those inside of it."""
        if not hasattr(self._threads, "running"):
            self._threads.running = []
        found: list[float] = self._threads.running
        return found

    def watch(self, owner: Any, name: str, label: str | None) -> None:
        """From now on the function adds to a label; None: only takes its time off those around it."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self._timed(label):
                return original(*args, **kwargs)

        setattr(owner, name, timed)

    @contextmanager
    def _timed(self, label: str | None) -> Iterator[None]:
        start = time.perf_counter()
        self._running.append(0.0)
        try:
            yield
        finally:
            inside = time.perf_counter() - start
            own = inside - self._running.pop()
            if self._running:
                self._running[-1] += inside
            if label is not None:
                self.seconds[label] += own

    def take(self) -> dict[str, float]:
        """What was added since the last call."""
        taken, self.seconds = dict(self.seconds), Counter()
        return taken


class TimedWorker(TrainWorker):
    """A rank that knows how long it is in guarding code."""

    _answers_s = 0.0

    def start(self, *args: Any, **kwargs: Any) -> Any:
        from slimefsdp import heartbeat

        self._ticks = heartbeat.snapshot().ticks
        scratch = heartbeat.Progress()
        began = time.perf_counter()
        for _ in range(10_000):
            scratch.tick()
        self._tick_s = (time.perf_counter() - began) / 10_000
        return super().start(*args, **kwargs)

    @ray.method(concurrency_group="control")
    def progress(self) -> Any:
        start = time.perf_counter()
        try:
            return super().progress()
        finally:
            self._answers_s += time.perf_counter() - start

    def guarding(self) -> dict[str, float]:
        """Seconds since the last call."""
        from slimefsdp import heartbeat

        ticks = heartbeat.snapshot().ticks
        taken = {
            "ticks of progress": (ticks - self._ticks) * self._tick_s,
            "answers to the watchdog": self._answers_s,
        }
        self._answers_s, self._ticks = 0.0, ticks
        return taken


def driver_stopwatch() -> Stopwatch:
    """Watches this process's guarding code."""
    stopwatch = Stopwatch()
    for name in ("checked_advantages", "check_plan"):
        stopwatch.watch(prepare, name, "checking batch and plan")
    for name in ("submit", "_prepare_and_log"):
        stopwatch.watch(Supervisor, name, "call log")
    stopwatch.watch(watchdog.Watchdog, "look", "watchdog")
    for name in ("append", "remove", "forget"):
        stopwatch.watch(CallLog, name, "call log")
    for owner, name in (  # what a group without a supervisor does as well, and what is no check
        (worker_group.WorkerGroup, "check"), (worker_group.WorkerGroup, "prepared"),
        (worker_group.WorkerGroup, "begin"), (prepare, "_policy_advantages"),
    ):  # fmt: skip
        stopwatch.watch(owner, name, None)
    return stopwatch


def one_step(train_step: Callable[[], object], pids: list[int]) -> dict[str, float]:
    """Wall seconds, the driver's CPU seconds and the busiest rank's."""
    ranks, driver, start = [cpu_seconds(pid) for pid in pids], time.process_time(), time.perf_counter()
    train_step()
    wall, cpu = time.perf_counter() - start, time.process_time() - driver
    return {
        "wall_s": wall,
        "driver_cpu_s": cpu,
        "rank_cpu_s": max(cpu_seconds(pid) - before for pid, before in zip(pids, ranks, strict=True)),
    }


def guarded_step(group: SupervisedGroup, batch: Any, pids: list[int], stopwatch: Stopwatch) -> dict[str, Any]:
    """The same of a supervised group, and where guarding took how long."""
    workers = group._job.group("actor").receivers
    ray.get([worker.guarding.remote() for worker in workers], timeout=60)
    stopwatch.take()
    step = one_step(lambda: group.train_step(batch), pids)
    driver = stopwatch.take()
    ranks = ray.get([worker.guarding.remote() for worker in workers], timeout=60)
    in_rank = {name: min(rank[name] for rank in ranks) for name in ranks[0]}
    seconds = sum(driver.values()) + sum(in_rank.values())
    return step | {"guarding": driver | in_rank, "share": seconds / step["wall_s"]}


def pids_of(group: Any) -> list[int]:
    return [health.pid for health in group.health()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        config, batch = settings(Path(folder)), random_batch(args.tokens)
        bare = worker_group.WorkerGroup.launch(config)
        worker_group.TrainWorker = TimedWorker  # type: ignore[misc]
        group = SupervisedGroup.launch(config)
        stopwatch, rounds = driver_stopwatch(), []
        ours, theirs = pids_of(group), pids_of(bare)
        for _ in range(args.rounds + 1):
            guarded = guarded_step(group, batch, ours, stopwatch)
            rounds.append((guarded, one_step(lambda: bare.train_step(batch), theirs)))
        group.shutdown()
        bare.shutdown()
        disconnect()
    rounds = rounds[1:]  # one warms up
    share = statistics.median(guarded["share"] for guarded, _ in rounds)
    seconds = {
        name: statistics.median(each["guarding"][name] for each, _ in rounds) for name in rounds[0][0]["guarding"]
    }
    ratios = {
        name: statistics.median(each[name] for each, _ in rounds) / statistics.median(each[name] for _, each in rounds)
        for name in ("wall_s", "driver_cpu_s", "rank_cpu_s")
    }
    results = {
        **software(), "tokens": args.tokens, "share": share, "guarding_s": seconds,
        "step_s": statistics.median(each["wall_s"] for each, _ in rounds), "supervised_over_bare": ratios,
        "rounds": [{"supervised": guarded, "bare": plain} for guarded, plain in rounds],
    }  # fmt: skip
    write_record(args.json, WHAT, 1, results)
    print(f"{share:.2%} of a step of {results['step_s']:.2f} s is guarding: " + ", ".join(
        f"{name} {value * 1e3:.1f} ms" for name, value in seconds.items()
    ))  # fmt: skip
    print("supervised over bare: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
    sys.exit(0 if share <= LIMIT else 1)


if __name__ == "__main__":
    main()
