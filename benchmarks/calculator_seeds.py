"""The calculator example on several seeds (data, warm-up, GRPO), recorded: held-out rewards before and after, curves.

    python benchmarks/calculator_seeds.py --seeds 0 1 2 --json benchmarks/results/calculator_seeds.json \\
        --picture docs/images/calculator_grpo.png

Prints Markdown tables, of which docs/environments.md shows a part. The record is written after each seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import environment  # noqa: E402
from benchmarks.sort_digits_seeds import run_seed  # noqa: E402

CURVE = (
    *("step", "eval/reward", "eval/tool_calls", "eval/tool_errors", "rollout/reward", "rollout/tool_calls"),
    *("rollout/tool_errors", "rollout/turns", "entropy", "rollout_mismatch_max", "seconds/step"),
)
# what is right of the answers: numbers from 1000 to 9999 are guessed in the warm-up, and as many calls are made
STRATEGIES = {
    "answers at once, with a number at random": 1 / 9000,
    "what the warm-up shows, without a slip": 0.5 + 0.5 / 9702,
    "asks the calculator and repeats what it said": 1.0,
}


def table(record: dict[str, Any]) -> str:
    """Returns the record as two tables; docs/environments.md shows a part of the second."""
    lines = ["| policy | right answers |", "|---|---|"]
    lines += [f"| {name} | {share:.4f} |" for name, share in record["strategies"].items()]
    lines += [
        "",
        "| seed | before RL | after RL | calls of an episode | failed calls | largest log-prob difference | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in record["runs"]:
        first, last = ([point for point in run["curve"] if "eval/reward" in point][place] for place in (0, -1))
        calls, errors = (
            f"{first[f'eval/{name}']:.3f} -> {last[f'eval/{name}']:.3f}" for name in ("tool_calls", "tool_errors")
        )
        lines.append(
            f"| {run['seed']} | {run['before']:.3f} | {run['after']:.3f} | {calls} | {errors} "
            f"| {run['largest_rollout_mismatch']:.1e} | {run['warmup_seconds']:.0f} + {run['grpo_seconds']:.0f} |"
        )
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Rewards of training and of evaluations, and how often the tool is called."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (rewards, calls) = plt.subplots(1, 2, figsize=(9, 3.6), dpi=120)
    for run, colour in zip(runs, plt.rcParams["axes.prop_cycle"].by_key()["color"], strict=False):
        for axes, name in ((rewards, "reward"), (calls, "tool_calls")):
            drawn = {
                kind: [(point["step"], point[f"{kind}/{name}"]) for point in run["curve"] if f"{kind}/{name}" in point]
                for kind in ("rollout", "eval")
            }
            axes.plot(*zip(*drawn["rollout"], strict=True), color=colour, linewidth=0.8, alpha=0.5)
            axes.plot(*zip(*drawn["eval"], strict=True), color=colour, marker="o", label=f"seed {run['seed']}")
    rewards.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    rewards.set(xlabel="step", ylabel="right answers (dots: held out)", ylim=(0, 1.02))
    calls.set(xlabel="step", ylabel="calls of an episode")
    rewards.legend(loc="lower right", fontsize=8)
    for axes in (rewards, calls):
        axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], help="dotted settings on top, for a trial")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = run_seed(seed, Path(folder), options.set, example="calculator", accuracy="eval/reward", curve=CURVE)
        runs.append(found)
        record = {
            "what": "held-out rewards of the calculator example, 128 prompts x 4 episodes at temperature 1",
            **environment(1),
            "versions": {name: version(name) for name in ("torch", "transformers", "ray")},
            "strategies": STRATEGIES,
            "runs": runs,
        }
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.picture:
        draw(runs, options.picture)
    print(table(record))


if __name__ == "__main__":
    main()
