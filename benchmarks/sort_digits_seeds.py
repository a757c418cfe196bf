"""The demo on several seeds (data, warm-up, GRPO), recorded: held-out accuracy before and after, curves, time.

    python benchmarks/sort_digits_seeds.py --seeds 0 1 2 --json benchmarks/results/sort_digits_seeds.json

Prints the Markdown table that the README shows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CURVE = ("step", "eval/exact", "eval/reward", "rollout/reward", "entropy", "rollout_mismatch_max")


def run_seed(seed: int, folder: Path) -> dict[str, Any]:
    """One seed from nothing, as scripts/demo.sh does it; figures of the GRPO run."""

    def run(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return time.perf_counter() - start

    run(str(ROOT / "scripts/make_sort_digits.py"), "data/sort_digits", "--seed", str(seed))
    warmup_s = run("-m", "actors.cli", "train", str(ROOT / "configs/sort_digits_sft.yaml"), f"run.seed={seed}")
    grpo_s = run("-m", "actors.cli", "train", str(ROOT / "configs/sort_digits_grpo.yaml"), f"run.seed={seed}")
    rows = [json.loads(line) for line in (folder / "runs/sort_digits_grpo/metrics.jsonl").read_text().splitlines()]
    accuracy = [row["eval/exact"] for row in rows if "eval/exact" in row]
    return {
        "seed": seed,
        "before": accuracy[0],
        "after": accuracy[-1],
        "largest_rollout_mismatch": max(row.get("rollout_mismatch_max", 0.0) for row in rows),
        "warmup_seconds": round(warmup_s, 1),
        "grpo_seconds": round(grpo_s, 1),
        "curve": [{key: row[key] for key in CURVE if key in row} for row in rows],
    }


def table(record: dict[str, Any]) -> str:
    """The README's rows."""
    lines = [
        "| seed | before RL | after RL | largest rollout/trainer log-prob difference | warm-up + GRPO |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {run['seed']} | {run['before']:.3f} | {run['after']:.3f} | {run['largest_rollout_mismatch']:.1e} "
        f"| {run['warmup_seconds']:.0f} s + {run['grpo_seconds']:.0f} s |"
        for run in record["runs"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_seed(seed, Path(folder)))
    record = {
        "what": "held-out sampled accuracy of the sort-digits demo, 256 prompts x 8 samples at temperature 1",
        "command": "python benchmarks/sort_digits_seeds.py --seeds " + " ".join(map(str, options.seeds)),
        "date": datetime.date.today().isoformat(),
        "hardware": f"{os.cpu_count()} shared {platform.machine()} CPU cores, gloo",
        "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
        "runs": runs,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
