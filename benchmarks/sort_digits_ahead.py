"""How many updates runs ahead of training need to learn what one that draws in turn learns: sort-digits, three seeds.

    python benchmarks/sort_digits_ahead.py --json benchmarks/results/sort_digits_ahead.json

The runs of a seed begin with one warm-up. Held-out accuracy is evaluated every five steps. The threshold is the last
accuracy of the runs in turn, in the mean over seeds, less 0.02; a run has learned at the first evaluation at which the
mean over seeds is not below it. All take the demo's steps, under the same learning rate at each update. The record is
written after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import write_record
from benchmarks.sort_digits_algorithms import GRPO, run_algorithm, warm_up
from slimefsdp.monitoring.metrics_log import read_metrics

LESS = 0.02  # than the last accuracy of the runs in turn
EVALUATED = "evaluation.interval_steps=5"
CORRECTED = ["correction.method=importance", "correction.high=5", "loss.old_log_probs=recompute"]
WATCHED = ("rollout/staleness", "rollout/staleness_max", "rollout_k3", "correction_weight", "correction_dropped")
WHAT = (
    "updates until held-out sampled accuracy of sort-digits, 256 prompts x 8 samples at temperature 1, is that of the "
    f"runs in turn at their end less {LESS}, in the mean over seeds; means over steps of what is watched"
)


def settings_of(name: str) -> list[str]:
    """What a run has that the demo has not."""
    ahead = {
        "in turn": [],
        "one step ahead": ["rollout.max_staleness=1", "rollout.on_update=wait"],
        "asynchronous": ["rollout.max_staleness=2", "rollout.on_update=continue"],
    }
    base, _, how = name.partition(", ")
    corrections = {
        "": CORRECTED if ahead[base] else [],
        "TIS": ["correction.method=tis", "correction.high=2", "loss.old_log_probs=recompute"],
        "rollout log-probs": ["loss.old_log_probs=rollout"],
        "uncorrected": [],
    }
    return [EVALUATED, *ahead[base], *corrections[how]]


def with_statistics(run: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The run with the updates behind each point of its curve, and means over its steps of what is watched."""
    rows = read_metrics(run_dir)
    taken, updates = {0: 0}, 0
    for row in rows:
        updates += int(row.get("updates") or 0)
        taken[int(row["step"])] = updates
    curve = [{**point, "updates": taken[point["step"]]} for point in run["curve"]]
    means = {name: [row[name] for row in rows if row.get(name) is not None] for name in WATCHED}
    found = {name: statistics.mean(values) for name, values in means.items() if values}
    return {**run, "curve": curve, "means": found, "load_average": os.getloadavg()}


def mean_curve(runs: dict[str, Any]) -> list[tuple[float, float]]:
    """Updates and accuracy at each evaluation, in the mean over seeds."""
    points = zip(*(run["curve"] for run in runs.values()), strict=True)
    return [tuple(statistics.mean(one[key] for one in at) for key in ("updates", "exact")) for at in points]  # type: ignore[misc]


def first_reach(curve: list[tuple[float, float]], threshold: float) -> float | None:
    """The updates at the first evaluation that is not below the threshold; None where there is none."""
    return next((updates for updates, exact in curve if exact >= threshold), None)


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """By kind of run: where it ends and how soon it has learned, beside the one in turn."""
    in_turn = runs["in turn"]
    threshold = statistics.mean(run["after"] for run in in_turn.values()) - LESS
    found: dict[str, Any] = {}
    for name, by_seed in runs.items():
        updates = first_reach(mean_curve(by_seed), threshold)
        seeds = {
            seed: first_reach([(one["updates"], one["exact"]) for one in run["curve"]], threshold)
            for seed, run in by_seed.items()
        }
        found[name] = {"updates": updates, "after": mean_curve(by_seed)[-1][1], "updates_of_seeds": seeds}
    needed = found["in turn"]["updates"]
    for one in found.values():
        one["times_in_turn"] = None if one["updates"] is None else one["updates"] / needed
    return {"threshold": threshold, **found}


def table(found: dict[str, Any]) -> str:
    """Returns a Markdown table; docs/rollouts.md summarises it."""
    lines = ["| run | updates | times those in turn | accuracy at the end |", "|---|---|---|---|"]
    for name, one in found.items():
        if name != "threshold":
            reached = "never | " if one["updates"] is None else f"{one['updates']:.0f} | {one['times_in_turn']:.2f}"
            lines.append(f"| {name} | {reached} | {one['after']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--runs", nargs="+", default=["in turn", "one step ahead", "asynchronous"],
        help="also with `, TIS`, `, rollout log-probs` or `, uncorrected` behind the name",
    )  # fmt: skip
    parser.add_argument("--add", action="store_true", help="to the runs of the record that there is")
    parser.add_argument("--set", nargs="*", default=[], help="dotted settings on top of all runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in options.runs:
        settings_of(name)  # before anything runs
    runs: dict[str, Any] = {}
    if options.add:
        runs = json.loads(options.json.read_text())["results"]["runs"]
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            warm_up(seed, folder)
            for number, name in enumerate(options.runs):
                run_dir = f"runs/{number}"
                found = run_algorithm(GRPO, [*settings_of(name), *options.set], seed, folder, run_dir)
                runs.setdefault(name, {})[str(seed)] = with_statistics(found, folder / run_dir)
                is_complete = len({len(one) for one in runs.values()}) == 1 and "in turn" in runs
                found_so_far = summary(runs) if is_complete else None
                write_record(options.json, WHAT, 1, {"summary": found_so_far, "runs": runs})
    print(table(summary(runs)))


if __name__ == "__main__":
    main()
