"""The long-context example from start to end: rewards by stage of its curriculum, and held-out accuracy by length.

    python benchmarks/length_curriculum.py --json benchmarks/results/length_curriculum.json

Makes the data, warms up, trains with the curriculum, and evaluates both models on held-out texts of each length. Prints
the tables of docs/long_context.md.
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
SAMPLES = 4  # to each held-out prompt
MODELS = {"after the warm-up": "runs/long_context_sft/model", "after GRPO": "runs/long_context_grpo/model"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("settings", nargs="*", help="of the GRPO run, on top of the example's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, seconds = Path(name), {}
        call(folder, str(EXAMPLE / "make_needles.py"), "data/long_context")
        for run, settings in (("sft", []), ("grpo", args.settings)):
            start = time.perf_counter()
            call(folder, "-m", "actors.cli", "train", str(EXAMPLE / f"{run}.yaml"), *settings)
            seconds[run] = round(time.perf_counter() - start, 1)
        rows = [json.loads(line) for line in (folder / "runs/long_context_grpo/metrics.jsonl").read_text().splitlines()]
        results = {
            "seconds": seconds,
            "stages": stages([row for row in rows if "rollout/stage" in row]),
            "heldout": {
                when: {str(tokens): evaluated(folder, model, tokens) for tokens in LENGTHS}
                for when, model in MODELS.items()
            },
        }
    print(tables(results))
    what = (
        f"examples/long_context: rewards by stage, and pass@1 of {SAMPLES} samples to each held-out text by its tokens"
    )
    write_record(args.json, what, 1, results)


def call(folder: Path, *command: str) -> str:
    """What it prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *command], check=True, cwd=folder, env=environment, stdout=subprocess.PIPE)
    return done.stdout.decode()


def evaluated(folder: Path, model: str, tokens: int) -> dict[str, float]:
    """pass@1 on held-out texts of one length, with its 95 % interval."""
    settings = [f"data.heldout=data/long_context/heldout_{tokens}.jsonl", f"evaluation.samples_per_prompt={SAMPLES}"]
    config = str(EXAMPLE / "grpo.yaml")
    printed = call(folder, "-m", "actors.cli", "eval", model, "--config", config, "--json", *settings)
    found = json.loads(printed)
    return {name: found[f"eval/{name}"] for name in ("pass@1", "pass@1_low", "pass@1_high")}


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
    lines += ["", f"| held-out texts of | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 1) + "|"]
    for tokens in LENGTHS:
        cells = [results["heldout"][when][str(tokens)] for when in MODELS]
        shown = [f"{one['pass@1']:.3f} ({one['pass@1_low']:.3f} to {one['pass@1_high']:.3f})" for one in cells]
        lines.append(f"| {tokens:,} tokens | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
