"""The sort-digits example under several algorithms, from one warm-up: curves of held-out accuracy, and one picture.

    python benchmarks/sort_digits_algorithms.py --json benchmarks/results/sort_digits_algorithms.json \\
        --picture docs/images/sort_digits_algorithms.png

Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import write_record  # noqa: E402

GRPO, PPO = "configs/sort_digits_grpo.yaml", "configs/sort_digits_ppo.yaml"
WHAT = "held-out sampled accuracy of sort-digits, 256 prompts x 8 samples at temperature 1, every 15 steps"
EVALUATED = "evaluation.interval_steps=15"
COMMON = ("run.steps=150", "optim.total_updates=300", "run.export_dir=null", EVALUATED)  # of all algorithms
ALGORITHMS: dict[str, tuple[str, list[str]]] = {
    "GRPO": (GRPO, []),
    "Dr.GRPO": (
        GRPO,
        ["advantage.estimator=dr_grpo", "loss.reduction=constant", "loss.constant_length=8"],
    ),
    "RLOO": (GRPO, ["advantage.estimator=rloo"]),
    "GSPO": (
        GRPO,
        ["loss.policy=gspo", "loss.reduction=sequence_mean", "loss.clip_low=3e-3", "loss.clip_high=4e-3"],
    ),
    "CISPO": (GRPO, ["loss.policy=cispo", "loss.clip_low=0.99", "loss.clip_high=4"]),
    "REINFORCE++": (GRPO, ["advantage.estimator=reinforce_pp"]),
    "PPO with a critic": (PPO, []),
}
"""Name -> the file it starts from, and the settings that make it another algorithm."""


def run_algorithm(file: str, settings: list[str], seed: int, folder: Path, run_dir: str) -> dict[str, Any]:
    """One run from the warm-up's model in `folder`; its curve."""
    command = [sys.executable, "-m", "actors.cli", "train", str(ROOT / file), f"run.dir={run_dir}", f"run.seed={seed}"]
    start = time.perf_counter()
    subprocess.run([*command, *COMMON, *settings], check=True, cwd=folder, env=environment())
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (folder / run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [{"step": row["step"], "exact": row["eval/exact"]} for row in rows if "eval/exact" in row]
    return {
        "config": file,
        "settings": settings,
        "before": curve[0]["exact"],
        "after": curve[-1]["exact"],
        "seconds": round(seconds, 1),
        "curve": curve,
    }


def environment() -> dict[str, str]:
    """Of the subprocesses."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def warm_up(seed: int, folder: Path) -> None:
    """Data and the supervised model that every algorithm begins with."""
    make = [sys.executable, str(ROOT / "scripts/make_sort_digits.py"), "data/sort_digits", "--seed", str(seed)]
    subprocess.run(make, check=True, cwd=folder, env=environment())
    train = [sys.executable, "-m", "actors.cli", "train", str(ROOT / "configs/sort_digits_sft.yaml")]
    subprocess.run([*train, f"run.seed={seed}"], check=True, cwd=folder, env=environment())


def table(runs: dict[str, Any], *, what: str = "algorithm", settings: str = "settings that differ") -> str:
    """A Markdown table of the runs, under these headings of their names and their settings."""
    lines = [f"| {what} | {settings} | before | after |", "|---|---|---|---|"]
    for name, run in runs.items():
        own = ", ".join(f"`{setting}`" for setting in run["settings"]) or f"none (`{run['config']}`)"
        lines.append(f"| {name} | {own} | {run['before']:.3f} | {run['after']:.3f} |")
    return "\n".join(lines)


def draw(runs: dict[str, Any], path: Path, title: str) -> None:
    """All curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=120)
    for name, run in runs.items():
        steps, exact = zip(*((point["step"], point["exact"]) for point in run["curve"]), strict=True)
        axes.plot(steps, exact, marker="o", markersize=3, linewidth=1.5, label=f"{name} ({run['after']:.2f})")
    axes.axhline(0.8, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="held-out sampled accuracy", ylim=(0, 1), title=title)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)


def compare(
    description: str | None,
    runs: dict[str, tuple[str, list[str]]],
    *,
    what: str = WHAT,
    title: str,
    table_of: Callable[[dict[str, Any]], str] = table,
    finish: Callable[[dict[str, Any], Path], dict[str, Any]] | None = None,
) -> None:
    """The command of a comparison: makes the runs from one warm-up, and their record, picture and table.

    Args:
        runs: as `ALGORITHMS`.
        what: was measured.
        finish: makes more of a run and its folder.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(runs), default=list(runs))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm_up(options.seed, folder)
        for number, run in enumerate(options.only):
            found[run] = run_algorithm(*runs[run], options.seed, folder, f"runs/{number}")
            if finish is not None:
                found[run] = finish(found[run], folder / f"runs/{number}")
    write_record(options.json, what, 1, found)
    if options.picture:
        draw(found, options.picture, title)
    print(table_of(found))


if __name__ == "__main__":
    compare(__doc__, ALGORITHMS, title="sort-digits, one warm-up for all")
