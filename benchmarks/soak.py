"""Long runs under random faults, and what many recoveries and many steps leave behind.

    python benchmarks/soak.py --json benchmarks/results/soak.json
    python benchmarks/soak.py --recoveries 100 --json benchmarks/results/soak_recoveries.json
    python benchmarks/soak.py --steps 1000 --json benchmarks/results/soak_steps.json

The first trains 100 steps undisturbed, then again under a supervisor while faults strike at random (kinds, moments,
ranks and steps from a seed): every bit must be the same, and exactly those faults must have fired. The others watch
resident memory, open files and threads, of the driver over recoveries, of the driver and of every rank over steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402

from actors.cluster.connect import disconnect  # noqa: E402
from benchmarks.faults import Arena, software  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from tests.support.faulty_worker import CRASHES, HANGS, MOMENTS, Fault  # noqa: E402
from tests.support.process_resources import held_by_the_process  # noqa: E402
from tests.support.recorded_job import recorded_batch  # noqa: E402

RANKS = 2
SAVE_EVERY = 5
SAMPLES = 20  # of what processes hold, over a run
WARM_UP = 0.2  # of a run: caches fill
# no leak over a whole run: one would go on; Ray's and grpc's pools may start a thread late
LIMITS = {"bytes": 16 * 2**20, "files": 0.5, "threads": 2.0}
Held = dict[str, int]


def drawn_faults(steps: int, number: int, seed: int) -> dict[int, Fault]:
    """By the step in which it strikes: no two in one step, saves where there are some."""
    rng = random.Random(seed)
    found: dict[int, Fault] = {}
    while len(found) < number:
        moment = rng.choice([moment for moment in MOMENTS if moment != "init"])
        step = rng.randrange(1, steps + 1)
        if moment.startswith("save"):
            step = -(-step // SAVE_EVERY) * SAVE_EVERY
        fault = Fault(rng.randrange(RANKS), moment, rng.choice(CRASHES + HANGS))
        if step <= steps:
            found.setdefault(step, fault)
    return dict(sorted(found.items()))


def under_faults(arena: Arena, steps: int, faults: dict[int, Fault]) -> dict[str, Any]:
    """The same job with and without faults."""
    expected = arena.undisturbed(steps=steps, save_every=SAVE_EVERY)
    group = arena.supervised("supervised")
    fired: list[Fault] = []

    def arm(step: int) -> None:
        fired.extend(each.fault for each in arena.plan.fired())
        arena.plan.arm(*([faults[step]] if step in faults else []))

    start = time.perf_counter()
    outcome = arena.job(group, steps=steps, save_every=SAVE_EVERY, at_step=arm)
    seconds = time.perf_counter() - start
    arm(steps + 1)
    recoveries = group.recoveries
    group.shutdown()
    return {
        "steps": steps,
        "faults": [f"step {step}: {fault}" for step, fault in faults.items()],
        "fired": [str(fault) for fault in fired],
        "recovered_s": [round(recovery.seconds, 2) for recovery in recoveries],
        "calls_repeated": [recovery.calls_repeated for recovery in recoveries],
        "identical": outcome == expected,
        "last_loss": outcome.losses[-1],
        "seconds": round(seconds, 1),
        "passed": outcome == expected and fired == list(faults.values()) and len(recoveries) == len(faults),
    }


def over_recoveries(arena: Arena, number: int, seed: int) -> dict[str, Any]:
    """What the driver holds after each of many recoveries."""
    group = arena.supervised("recoveries")
    rng = random.Random(seed)
    moments = [moment for moment in MOMENTS if moment not in ("init", "sleep", "wake", "weight update")]
    samples: list[dict[str, Held]] = []
    for index in range(1, number + 1):
        arena.plan.arm(Fault(rng.randrange(RANKS), rng.choice(moments)))
        group.train_step(recorded_batch(index))
        group.save(index)
        assert len(arena.plan.fired()) == 1
        samples.append({"driver": held_by_the_process()})
        progress(index, number, samples[-1])
    recoveries = group.recoveries
    group.shutdown()
    found = grown(samples)
    passed = found["passed"] and len(recoveries) == number and not any(each.differences for each in recoveries)
    return {"recoveries": len(recoveries), **found, "passed": passed, "samples": samples}


def over_steps(arena: Arena, number: int) -> dict[str, Any]:
    """What driver and ranks hold in the course of many steps, with every other call now and then."""
    group = arena.supervised("steps")
    samples: list[dict[str, Held]] = []
    threads: Counter[str] = Counter()  # at the first sample
    start = time.perf_counter()
    for step in range(1, number + 1):
        group.train_step(recorded_batch(step))
        if step % 10 == 0:
            group.compute_log_probs(recorded_batch(step))
            group.sleep()
            group.wake_up()
            group.update_weights([arena.receiver])
            group.save(step)
            ray.get(arena.receiver.take.remote(), timeout=60)
        if step % max(1, number // SAMPLES) == 0:
            ranks = ray.get([worker.held.remote() for worker in group._group._workers], timeout=60)
            held = {f"rank {rank}": found for rank, found in enumerate(ranks)}
            samples.append({"driver": held_by_the_process(), **held})
            progress(step, number, samples[-1])
            threads = threads or thread_names()
    seconds = time.perf_counter() - start
    later = thread_names() - threads
    in_sync = group.check_sync().is_in_sync
    group.shutdown()
    found = grown(samples)
    passed = found["passed"] and in_sync and not group.recoveries
    record = {"steps": number, "seconds": round(seconds, 1), "threads_that_came_later": dict(later)}
    return {**record, **found, "passed": passed, "samples": samples}


def grown(samples: list[dict[str, Held]]) -> dict[str, Any]:
    """By process, what it holds more at the end than after the warm-up (means of a fifth of the samples each)."""
    fifth = max(1, int(WARM_UP * len(samples)))
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]

    def mean(some: list[dict[str, Held]], process: str, what: str) -> float:
        return sum(sample[process][what] for sample in some) / len(some)

    found = {
        process: {
            what: round(mean(late, process, what) - mean(early, process, what), 1) for what in samples[0][process]
        }
        for process in samples[0]
    }
    passed = all(each[what] <= limit for each in found.values() for what, limit in LIMITS.items())
    return {"grown": found, "passed": passed}


def thread_names() -> Counter[str]:
    """Of this process, Python's and others'."""
    return Counter(file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm"))


def progress(done: int, of: int, sample: dict[str, Held]) -> None:
    print(f"{done}/{of} " + "  ".join(f"{name} {held}" for name, held in sample.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--soak-steps", type=int, default=100, help="of the run under random faults")
    parser.add_argument("--faults", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recoveries", type=int, help="instead: so many of them")
    parser.add_argument("--steps", type=int, help="instead: so many without a fault")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    runs: dict[str, Callable[[Arena], dict[str, Any]]] = {
        "what the driver holds after each of many recoveries": lambda arena: over_recoveries(
            arena, args.recoveries, args.seed
        ),
        "what driver and ranks hold over many steps without a fault": lambda arena: over_steps(arena, args.steps),
        "a job under random faults against the same job undisturbed": lambda arena: under_faults(
            arena, args.soak_steps, drawn_faults(args.soak_steps, args.faults, args.seed)
        ),
    }
    what = list(runs)[0 if args.recoveries else 1 if args.steps else 2]
    with tempfile.TemporaryDirectory() as folder:
        results = runs[what](Arena(Path(folder), RANKS))
        disconnect()
    write_record(args.json, what, 1, {**software(), **results})
    print({name: value for name, value in results.items() if name != "samples"})
    sys.exit(0 if results["passed"] else 1)


if __name__ == "__main__":
    main()
