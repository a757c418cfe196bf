"""What tests of whole runs share: a reward, the rows that a run left, what of them must not differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slimefsdp.config import RunConfig

TIMES = {"time", "train_seconds", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank"}
UNSTEADY = ("seconds/", "memory/")
calls_left = 10**9  # of `variety`, before it breaks


def startable(example: Path, folder: Path) -> dict[str, Any]:
    """Settings, as a file holds them, with which `train` would start."""
    return {
        "run": {"dir": str(folder / "run"), "steps": 2},
        "model": {"path": str(example / "model")},
        "mesh": {"device": "cpu"},
        "optim": {"total_updates": 10},
        "data": {"train": str(example / "train.jsonl")},
        "rollout": {"reward": "actors.rollout.rewards:sorted_digits"},
    }


class Untouchable:
    """Stands for a rank that must not be called."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"a rank was called: {name}")


def variety(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """A reward that a random model gets some of."""
    global calls_left
    calls_left -= 1
    if calls_left < 0:
        raise OSError("the judge's disk is full")
    return {"reward": len(set(response)) / 10, "exact": float(response == record["answer"])}


def rows_of(config: RunConfig) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    assert config.run.dir is not None
    return [json.loads(line) for line in (config.run.dir / "metrics.jsonl").read_text().splitlines()]


def bits(row: dict[str, float]) -> dict[str, str]:
    """Every metric that is no time and no size of memory, to the last bit."""
    names = {name: name.removeprefix("critic/") for name in row}
    steady = [name for name, own in names.items() if own not in TIMES and not own.startswith(UNSTEADY)]
    return {name: float(row[name]).hex() for name in steady}
