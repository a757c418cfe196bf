"""What corrections are for: sort-digits where the engines are up to 15 steps behind the policy, with and without one.

    python benchmarks/stale_engines.py --json benchmarks/results/stale_engines.json \\
        --picture docs/images/stale_engines.png

All runs begin with one warm-up. Prints a Markdown table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.sort_digits_algorithms import GRPO, compare

WHAT = (
    "held-out sampled accuracy of sort-digits under GRPO, 256 prompts x 8 samples at temperature 1, engines in "
    "step or given new weights every 15 steps, when they are evaluated too; means over steps"
)
STALE = ["rollout.sync_interval_steps=15", "run.steps=90"]
RUNS: dict[str, list[str]] = {
    "engines in step": ["run.steps=90"],
    "15 steps behind, uncorrected": STALE,
    "15 steps behind, TIS": [*STALE, "correction.method=tis", "correction.high=2"],
    "15 steps behind, MIS": [*STALE, "correction.method=mis", "correction.low=0.5", "correction.high=2"],
    "15 steps behind, decoupled PPO": [*STALE, "correction.method=importance", "correction.high=5"],
}
WATCHED = ("rollout_k3", "rollout_chi2", "rollout_rho", "correction_weight", "correction_above", "correction_dropped")


def with_statistics(run: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The run with the means over its steps of what people watch."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    found = {name: [row[name] for row in rows if name in row] for name in WATCHED}
    return run | {"means": {name: sum(values) / len(values) for name, values in found.items() if values}}


def table(runs: dict[str, Any]) -> str:
    """Returns the rows of the Markdown table."""
    lines = ["| run | before | after | `rollout_k3` | `correction_weight` |", "|---|---|---|---|---|"]
    for name, run in runs.items():
        weight = run["means"].get("correction_weight")
        lines.append(
            f"| {name} | {run['before']:.3f} | {run['after']:.3f} | {run['means']['rollout_k3']:.1e} "
            f"| {'' if weight is None else f'{weight:.2f}'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    compare(
        __doc__,
        {name: (GRPO, settings) for name, settings in RUNS.items()},
        what=WHAT,
        title="sort-digits, engines in step and behind",
        table_of=table,
        finish=with_statistics,
    )
