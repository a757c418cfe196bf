"""The long-context example from start to end: rewards by stage of its curriculum, and held-out accuracy by length.

    python benchmarks/length_curriculum.py --json benchmarks/results/length_curriculum.json

Makes the data, warms up, and trains with the curriculum; the run evaluates on held-out texts of each length before its
first step and after its last. Prints the tables of docs/long_context.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import write_record  # noqa: E402

EXAMPLE = ROOT / "examples/long_context"
LENGTHS = (256, 1024, 4096, 16384)
RUN = "runs/long_context_grpo"
EVALUATED = ("before", "after")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("settings", nargs="*", help="of the GRPO run, on top of the example's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), dict[str, float]()
        call(folder, str(EXAMPLE / "make_needles.py"), "data/long_context")
        for run, settings in (("sft", []), ("grpo", args.settings)):
            start = time.perf_counter()
            call(folder, "-m", "actors.cli", "train", str(EXAMPLE / f"{run}.yaml"), *settings)
            seconds[run] = round(time.perf_counter() - start, 1)
        rows = read_lines(folder / RUN / "metrics.jsonl")
        evaluations = sorted((folder / RUN / "evaluations").glob("step_*.jsonl"))
        results = {
            "seconds": seconds,
            "stages": stages([row for row in rows if "rollout/stage" in row]),
            "heldout": {when: by_length(read_lines(path)) for when, path in zip(EVALUATED, evaluations, strict=True)},
        }
    print(tables(results))
    what = "examples/long_context: rewards by stage, and exact answers sampled to held-out texts, by their tokens"
    write_record(args.json, what, 1, results)


def call(folder: Path, *command: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], check=True, cwd=folder, env=environment)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_length(responses: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Tokens of a text -> the share of responses that are its digit; each of its characters is a token."""
    rewards: dict[int, list[float]] = {}
    for one in responses:
        rewards.setdefault(len(one["prompt"]), []).append(one["scores"]["reward"])
    return {
        str(tokens): {"responses": len(found), "exact": statistics.mean(found)}
        for tokens, found in sorted(rewards.items())
    }


def stages(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each stage, its steps, the rewards at its two ends, and what a step took."""
    found = []
    for number in sorted({row["rollout/stage"] for row in rows}):
        of_stage = [row for row in rows if row["rollout/stage"] == number]
        ends = min(10, len(of_stage) // 2)
        rewards = [row["rollout/reward"] for row in of_stage]
        found.append(
            {
                "steps": [int(of_stage[0]["step"]), int(of_stage[-1]["step"])],
                "longest_prompt": max(row["rollout/prompt_length_max"] for row in of_stage),
                "averaged_steps": ends,
                "first_reward": statistics.mean(rewards[:ends]),
                "last_reward": statistics.mean(rewards[-ends:]),
                "step_s": statistics.median(row["seconds/step"] for row in of_stage),
                "shared_tokens": statistics.mean(row["shared_tokens"] for row in of_stage),
            }
        )
    return found


def tables(results: dict[str, Any]) -> str:
    """As docs/long_context.md has them."""
    lines = ["| steps | longest prompt | reward, first steps | last steps | s a step |", "|---" * 5 + "|"]
    lines += [
        f"| {one['steps'][0]} to {one['steps'][1]} | {one['longest_prompt']:,.0f} | {one['first_reward']:.3f} | "
        f"{one['last_reward']:.3f} | {one['step_s']:.1f} |"
        for one in results["stages"]
    ]
    before, after = (results["heldout"][when] for when in EVALUATED)
    lines += ["", "| held-out texts of | exact before | exact after |", "|---" * 3 + "|"]
    lines += [
        f"| {int(tokens):,} tokens | {before[tokens]['exact']:.3f} | {after[tokens]['exact']:.3f} |"
        for tokens in before
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
