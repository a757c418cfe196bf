"""Whether the train step of one commit is as fast as that of another: the same batches, a step of each in turn.

    python benchmarks/step_commits.py a1f4bc5 HEAD --json benchmarks/results/step_commits.json

Each commit is checked out and installed as by scripts/compare_commits.py, and has a process of its own with one thread.
Both take the micro-batch size that is fastest for the second one. Every other round is in reverse order, so that what
else the machine does meets both. Tokens per CPU-second of the second commit over those of the first: the median over
rounds of the ratio inside one, with the bootstrap's 95 % interval.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import compare_commits  # noqa: E402

from benchmarks.record import write_record  # noqa: E402
from benchmarks.step.harness import Competitor, Process, seconds_of  # noqa: E402
from benchmarks.step.workloads import WORKLOADS, build_batch, write_model  # noqa: E402

CHOSEN = ("skewed", "uniform", "prompt_heavy", "long")
WARM_UP = 2  # steps of each before the rounds
TOLERANCE = 1e-6  # of loss and gradient norm, relative: sums may be taken in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--workloads", nargs="+", default=CHOSEN, choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="slimefsdp-step-")))
        commits = {side: compare_commits.resolved(getattr(args, side), folder) for side in ("old", "new")}
        checkouts = {
            side: cleanup.enter_context(compare_commits.worktree(commit, folder / side))
            for side, commit in commits.items()
        }
        pythons = {
            side: compare_commits.install(checkout, folder / f"{side}-env") for side, checkout in checkouts.items()
        }
        for name in args.workloads:
            batch = build_batch(WORKLOADS[name], 0)
            data = folder / name
            data.mkdir()
            batch.save(data / "batch.safetensors")
            write_model(data / "model", WORKLOADS[name].vocab, 0)
            results[name] = measured(checkouts, pythons, data, batch.num_tokens, args.rounds)
            print(f"{name}: {results[name]['ratio']:.3f} {results[name]['interval']}", flush=True)
    write_record(args.json, str(__doc__).partition("\n")[0], 1, {"commits": commits, "workloads": results})


def measured(
    checkouts: dict[str, Path], pythons: dict[str, Path], data: Path, tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens per CPU-second of both commits on one workload, and their ratio."""
    files = ["--model", str(data / "model"), "--batch", str(data / "batch.safetensors")]
    systems = {}
    for side, checkout in checkouts.items():
        command = [str(pythons[side]), str(checkout / "benchmarks/step/own.py"), *files, "--device=cpu", "--threads=1"]
        systems[side] = Competitor(
            side, process=Process(command, threads=1, stderr=data / f"{side}.err", checkout=checkout)
        )
    try:
        processes = {side: one.process for side, one in systems.items() if one.process is not None}
        for side, one in systems.items():
            one.warm_up(processes[side])
        size = systems["new"].micro_batch
        for _ in range(WARM_UP):
            steps = {side: process.step(size) for side, process in processes.items()}
        for figure in ("loss", "grad_norm"):
            if not np.isclose(steps["old"][figure], steps["new"][figure], rtol=TOLERANCE, atol=TOLERANCE):
                raise SystemExit(
                    f"{figure}: {steps['old'][figure]} at the old commit, {steps['new'][figure]} at the new"
                )
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(rounds):
            for side in sorted(processes, reverse=bool(number % 2)):
                seconds[side].append(seconds_of(processes[side].step(size)))
    finally:
        for one in systems.values():
            one.close()
    ratios = np.array(seconds["old"]) / np.array(seconds["new"])
    drawn = np.random.default_rng(0).choice(ratios, (10_000, rounds))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {
        "micro_batch": size,
        "tokens_per_cpu_second": {side: round(tokens / statistics.median(took), 1) for side, took in seconds.items()},
        "ratio": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
    }


if __name__ == "__main__":
    main()
