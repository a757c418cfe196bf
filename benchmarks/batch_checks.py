"""What the driver does to a batch before any rank sees it, timed: validating, checking and planning it.

python benchmarks/batch_checks.py --json benchmarks/results/batch_checks.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.training.plan import plan_training
from slimefsdp.training.prepare import checked_advantages

ROUNDS = 7


def median_ms(action: Callable[[], Any]) -> float:
    """Median CPU milliseconds of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        action()
        seconds.append(time.process_time() - start)
    return round(1000 * statistics.median(seconds), 2)


def measure(mean_length: int) -> dict[str, float]:
    """Figures for about a million tokens in groups of eight samples of this mean length."""
    rng = np.random.default_rng(0)
    samples = 1_000_000 // mean_length // 8 * 8
    lengths = np.clip(rng.lognormal(np.log(mean_length), 0.5, samples), 8, 8000).astype(np.int64)
    responses = lengths // 2
    fields = {
        "tokens": rng.integers(0, 152_000, lengths.sum()),
        "lengths": lengths,
        "response_lengths": responses,
        "rewards": rng.random(samples).astype(np.float32),
        "group_ids": np.arange(samples) // 8,
        "rollout_log_probs": -rng.random(responses.sum()).astype(np.float32),
    }
    config = config_from_dict(
        {
            "model": {"path": "unused"},
            "mesh": {"dp": 8},
            "batch": {"samples_per_update": samples // 4, "max_tokens_per_rank": 16_384},
            "optim": {"total_updates": 1},
        }
    )
    batch = RolloutBatch(**fields)
    per_million = 1_000_000 / batch.num_tokens
    return {
        "samples": samples,
        "tokens": batch.num_tokens,
        "validate_ms_per_million_tokens": round(median_ms(lambda: RolloutBatch(**fields)) * per_million, 2),
        "check_ms_per_million_tokens": round(
            median_ms(lambda: checked_advantages(config, batch, 152_000, loss="policy")) * per_million, 2
        ),
        "plan_ms_per_million_tokens": round(median_ms(lambda: plan_training(config, batch)) * per_million, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    record = {
        "what": "driver CPU time before a rank sees a batch; median of rounds",
        "command": "python benchmarks/batch_checks.py",
        "date": datetime.date.today().isoformat(),
        "hardware": f"one of {os.cpu_count()} shared {platform.machine()} CPU cores",
        "versions": {name: version(name) for name in ("numpy",)},
        "cases": [measure(length) for length in (128, 1024, 4096)],
    }
    text = json.dumps(record, indent=1)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
