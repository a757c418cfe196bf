"""Ten thousand episodes whose environments are late, raise, hang, end their process or say far too much.

    OMP_NUM_THREADS=1 python benchmarks/episodes.py --json benchmarks/results/episodes.json

Real engines, environments in real processes, a tiny random model. What each episode must come to follows from its
record, so that all are accounted for one by one; and what driver, engine and environments hold of memory is watched.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from actors.rollout.environment import MOST_CHARACTERS  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from slimefsdp import Environment, StepResult  # noqa: E402

KINDS = {"plain": 0.964, "raise": 0.015, "giant": 0.01, "wrong": 0.01, "exit": 0.0005, "hang": 0.0005}
FAILURES = {
    "raise": "the world is full", "giant": f"more than {MOST_CHARACTERS:,}", "wrong": "which is no StepResult",
    "exit": "ended its process", "hang": "did not return within",
}  # fmt: skip
MIB = 2**20
WORKERS = {"Unruly": 4, "UnrulyLater": 2}  # processes of each class


def kind_of(number: int) -> tuple[str, int, int]:
    """What the episode of a record does, in which turn, and how many turns it would have."""
    rng = random.Random(number)
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    turns = rng.randint(1, 4)
    return kind, rng.randint(1, turns), turns


class Unruly(Environment):
    """One of these kinds."""

    def reset(self, record: Mapping[str, Any], seed: int) -> str:
        self.kind, self.at, self.turns = kind_of(record["number"])
        self.turn, self.rng = 0, random.Random(seed)
        return str(record["prompt"])

    def answer(self) -> Any:
        """To the next response."""
        self.turn += 1
        if self.turn == self.at and self.kind != "plain":
            if self.kind == "raise":
                raise OSError("the world is full")
            if self.kind == "exit":
                os._exit(7)
            if self.kind == "hang":
                time.sleep(600)
            return "wrong" if self.kind == "wrong" else StepResult("9" * (20 * MOST_CHARACTERS))
        if self.turn == self.turns:
            return StepResult(reward=float(self.turn), done=True)
        return StepResult("".join(self.rng.choices("0123456789", k=5)))

    def step(self, response: str, finished: bool) -> Any:
        """Late by up to 2 ms."""
        time.sleep(0.002 * self.rng.random())
        return self.answer()


class UnrulyLater(Unruly):
    """In coroutines, late by up to 100 ms."""

    async def step(self, response: str, finished: bool) -> Any:
        await asyncio.sleep(0.1 * self.rng.random())
        if self.turn + 1 == self.at and self.kind == "hang":
            await asyncio.sleep(600)
        return self.answer()


def held(pids: Mapping[str, int]) -> dict[str, float]:
    """Resident memory of processes, in MiB."""
    found = {}
    for name, pid in pids.items():
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        found[name] = round(pages * os.sysconf("SC_PAGE_SIZE") / MIB, 1)
    return found


def played(config: Any, number: int, at_once: int, log: str) -> dict[str, Any]:
    """Episodes of so many records, each of which must come to what its kind says."""
    import ray

    from actors.engines.pool import EnginePool
    from actors.rollout.episodes import EpisodeRunner
    from actors.rollout.user_code_workers import UserCodeWorkers
    from actors.workers.worker_group import WorkerGroup
    from slimefsdp.errors import SlimeError

    group = WorkerGroup.launch(config)
    engines = EnginePool.launch(config)
    workers = UserCodeWorkers.launch(config)
    try:
        engines.update_from(group)
        group.shutdown()
        runner = EpisodeRunner(config, engines, workers)
        pid = ray.get(engines.receivers[0].__ray_call__.remote(lambda self: os.getpid()), timeout=60)
        found: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        memory: list[dict[str, float]] = []
        turns = tokens = 0
        began = time.perf_counter()
        for first in range(0, number, at_once):
            numbers = range(first, min(first + at_once, number))
            records = [{"prompt": f"sort {one}", "number": one} for one in numbers]
            _, outcomes = runner.run(records, 1, (0, first), list(numbers), seconds)
            assert len(outcomes) == len(records)
            for (place, _), outcome in outcomes.items():
                kind, at, wanted = kind_of(numbers[place])
                if isinstance(outcome, SlimeError):
                    assert FAILURES.get(kind, "?") in outcome.message, (kind, outcome)
                    assert f"in turn {at} of" in outcome.message, (kind, at, outcome)
                else:
                    sample, scores = outcome
                    assert kind == "plain" and scores["reward"] == scores["turns"] == wanted, (kind, scores)
                    turns += sample.turns
                    tokens += sample.response_length
                found[kind] += 1
            memory.append(held({"driver": os.getpid(), "engine": pid}))
            done, took = sum(found.values()), time.perf_counter() - began
            print(f"{log}: {done} episodes, {done / took:.0f} a second, {memory[-1]}", file=sys.stderr, flush=True)
        took = time.perf_counter() - began
    finally:
        workers.shutdown()
        engines.shutdown()
    expected = Counter(kind_of(one)[0] for one in range(number))
    assert found == expected, (found, expected)
    middle = len(memory) // 2
    growth = {
        name: round(memory[-1][name] - memory[middle][name], 1) for name in memory[0]
    }  # over the second half of the run
    return {
        "episodes": number, "by_kind": dict(sorted(found.items())), "turns_of_whole_ones": turns,
        "tokens_of_whole_ones": tokens, "seconds": round(took, 1), "episodes_per_second": round(number / took, 1),
        "seconds_generate": round(seconds["generate"], 1), "seconds_environments": round(seconds["reward"], 1),
        "mib_at_the_end": memory[-1], "mib_grown_in_the_second_half": growth,
    }  # fmt: skip


def main() -> None:
    """Runs both classes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=500)
    parser.add_argument("--environments", nargs="+", choices=WORKERS, default=list(WORKERS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from actors.cluster.connect import disconnect
    from slimefsdp.config import config_from_dict

    results = {}
    with tempfile.TemporaryDirectory() as name:
        script = [sys.executable, str(ROOT / "scripts/make_sort_digits.py"), name]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        model = Path(name) / "model"
        for environment in options.environments:
            config = config_from_dict(
                {
                    "model": {"path": str(model)},
                    "mesh": {"dp": 1, "device": "cpu"},
                    "precision": {"compute_dtype": "float32"},
                    "batch": {"max_tokens_per_rank": 512},
                    "optim": {"total_updates": 1},
                    "rollout": {"max_new_tokens": 4, "environment": f"benchmarks.episodes:{environment}"},
                    "environment": {},
                }
            )
            results[environment] = played(config, options.episodes, options.at_once, environment)
    disconnect()
    write_record(options.json, "episodes of unruly environments, each accounted for", 1, results)
    print(results)


if __name__ == "__main__":
    main()
