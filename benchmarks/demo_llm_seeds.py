"""scripts/demo_llm.sh on several seeds, each with its control, recorded: held-out accuracy by family, curves, time.

    python benchmarks/demo_llm_seeds.py --seeds 0 1 2 --output runs/demo_llm --json benchmarks/results/demo_llm.json

The control takes as many steps on the same problems, rewarded for the form of an answer alone. A run whose folder is
there already is read and not repeated, so this goes on where it was. The record is written after each run. Prints
Markdown tables; docs/demo_llm.md shows a part of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "scripts"):
    sys.path.insert(0, str(folder))

from demo_llm_report import report  # noqa: E402

from benchmarks.record import environment  # noqa: E402
from benchmarks.sort_digits_seeds import with_vllm  # noqa: E402

CURVE = (
    *(
        "step",
        "rollout/reward",
        "rollout/mentioned",
        "rollout/answer_only",
        "rollout/truncated",
        "rollout/response_length",
    ),
    *("entropy", "zero_variance_groups", "rollout_mismatch", "rollout_mismatch_max", "grad_norm", "seconds/step"),
)
KINDS = {"solved": (), "well_formed": ("--control",)}


def run_seed(seed: int, reward: str, output: Path, words: Sequence[str]) -> dict[str, Any]:
    """One run, or the one that is there already."""
    command = ["bash", str(ROOT / "scripts/demo_llm.sh"), "--seed", str(seed), "--output", str(output)]
    environ = {**os.environ, "SLIMEFSDP_PYTHON": sys.executable}
    subprocess.run([*command, *KINDS[reward], *words], check=True, stdout=subprocess.DEVNULL, env=environ)
    folder = output / f"seed_{seed}{'_control' if KINDS[reward] else ''}"
    rows = [json.loads(line) for line in (folder / "grpo/metrics.jsonl").read_text().splitlines()]
    curve = [{key: row[key] for key in CURVE if key in row} for row in rows]
    return {"seed": seed, "reward": reward, **report(folder), "curve": curve}


def tables(record: dict[str, Any]) -> str:
    """Returns the accuracy by family and what the runs were like; docs/demo_llm.md shows a part of it."""
    lines = [
        "| seed | reward | held-out family | solved before | solved after | of finished before | of finished after |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in record["runs"]:
        for family, sides in run["families"].items():
            cells = [
                f"{side['solved']:.3f} ({side['interval'][0]:.3f} to {side['interval'][1]:.3f})"
                for side in (sides["before"], sides["after"])
            ]
            cells += [f"{side['solved_of_finished'] or 0:.3f}" for side in (sides["before"], sides["after"])]
            lines.append(f"| {run['seed']} | `{run['reward']}` | `{family}` | {' | '.join(cells)} |")
    lines += [
        "",
        "| seed | reward | log-probs apart, mean | largest | entropy, first and last update | training |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run['seed']} | `{run['reward']}` | {run['rollout_mismatch']:.1e} | {run['rollout_mismatch_max']:.1e} "
        f"| {run['entropy'][0]:.2f}, {run['entropy'][1]:.2f} | {run['training_seconds']:.0f} s |"
        for run in record["runs"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rewards", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("runs/demo_llm"), help="as of scripts/demo_llm.sh")
    parser.add_argument("--model", type=Path, help="as of scripts/demo_llm.sh")
    parser.add_argument("--engine-python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words = ["--engine-python", str(options.engine_python.absolute())]
    if options.model is not None:
        words += ["--model", str(options.model.absolute())]
    versions = {name: version(name) for name in ("torch", "transformers", "ray", "reasoning-gym", "gguf")}
    versions["vllm"] = with_vllm(options.engine_python)[1]
    runs = []
    for seed in options.seeds:
        for reward in options.rewards:
            runs.append(run_seed(seed, reward, options.output.absolute(), words))
            record = {
                "what": "held-out accuracy of SmolLM2-135M-Instruct on tasks of reasoning_gym, before and after GRPO, "
                "sampled at temperature 1; and of a control that is rewarded for form alone",
                **environment(1),
                "command": "python benchmarks/demo_llm_seeds.py --seeds " + " ".join(map(str, options.seeds)),
                "versions": versions,
                "runs": runs,
            }
            if options.json:
                options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(tables(record))


if __name__ == "__main__":
    main()
