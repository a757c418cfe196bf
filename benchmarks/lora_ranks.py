"""The sort-digits example with adapters of several ranks beside the run of all weights, from one warm-up.

    python benchmarks/lora_ranks.py --json benchmarks/results/lora_ranks.json --picture docs/images/lora_ranks.png

Prints the Markdown table of docs/lora.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import write_record  # noqa: E402
from benchmarks.sort_digits_algorithms import GRPO, draw, run_algorithm, warm_up  # noqa: E402

RUNS: dict[str, list[str]] = {
    "all weights": [],
    "rank 1": ["lora.rank=1", "optim.lr=3e-3"],
    "rank 8": ["lora.rank=8", "optim.lr=3e-3"],
    "rank 32": ["lora.rank=32", "optim.lr=3e-3"],
    "rank 8, a third of the rate": ["lora.rank=8", "optim.lr=1e-3"],
    "rank 8, the rate of all weights": ["lora.rank=8"],
}
"""Name -> what is set otherwise than in the example."""


def table(runs: dict[str, Any]) -> str:
    """The rows of docs/lora.md."""
    lines = ["| trained | settings | before | after |", "|---|---|---|---|"]
    for name, run in runs.items():
        settings = ", ".join(f"`{setting}`" for setting in run["settings"]) or f"none (`{GRPO}`)"
        lines.append(f"| {name} | {settings} | {run['before']:.3f} | {run['after']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    runs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(options.seed, folder)
        for number, run in enumerate(options.only):
            runs[run] = run_algorithm(GRPO, RUNS[run], options.seed, folder, f"runs/{number}")
            print(f"{run}: {runs[run]['before']:.3f} -> {runs[run]['after']:.3f}", flush=True)
    what = "held-out sampled accuracy of sort-digits, 256 prompts x 8 samples at temperature 1, every 15 steps"
    write_record(options.json, what, 1, runs)
    print(table(runs))
    if options.picture is not None:
        draw(runs, options.picture, "GRPO on sort-digits: adapters and all weights, one seed")


if __name__ == "__main__":
    main()
