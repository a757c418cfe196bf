"""The demo on several seeds (data, warm-up, GRPO), recorded: held-out accuracy before and after, curves, time.

    python benchmarks/sort_digits_seeds.py --seeds 0 1 2 --json benchmarks/results/sort_digits_seeds.json
    python benchmarks/sort_digits_seeds.py --engine-python .venv-vllm/bin/python \\
        --json benchmarks/results/sort_digits_vllm.json

Prints a Markdown table; the README and docs/engines.md summarise it. The record is written after each seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import environment  # noqa: E402

CURVE = ("step", "eval/exact", "eval/reward", "rollout/reward", "entropy", "rollout_mismatch_max")


def run_seed(
    seed: int,
    folder: Path,
    settings: Sequence[str] = (),
    *,
    example: str = "sort_digits",
    accuracy: str = "eval/exact",
    curve: Sequence[str] = CURVE,
) -> dict[str, Any]:
    """One seed from nothing, as scripts/demo.sh does it; figures of the GRPO run, which has these settings besides.

    Args:
        example: whose script and presets these are.
        accuracy: the metric that is told before and after.
        curve: metrics of each step.
    """

    def run(*command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
        return time.perf_counter() - start

    run(str(ROOT / f"scripts/make_{example}.py"), f"data/{example}", "--seed", str(seed))
    warmup_s = run("-m", "actors.cli", "train", str(ROOT / f"configs/{example}_sft.yaml"), f"run.seed={seed}")
    grpo = [str(ROOT / f"configs/{example}_grpo.yaml"), f"run.seed={seed}", *settings]
    grpo_s = run("-m", "actors.cli", "train", *grpo)
    rows = [json.loads(line) for line in (folder / f"runs/{example}_grpo/metrics.jsonl").read_text().splitlines()]
    measured = [row[accuracy] for row in rows if accuracy in row]
    return {
        "seed": seed,
        "before": measured[0],
        "after": measured[-1],
        "largest_rollout_mismatch": max(row.get("rollout_mismatch_max", 0.0) for row in rows),
        "warmup_seconds": round(warmup_s, 1),
        "grpo_seconds": round(grpo_s, 1),
        "load_average": os.getloadavg(),
        "curve": [{key: row[key] for key in curve if key in row} for row in rows],
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


def with_vllm(engine_python: Path) -> tuple[list[str], str]:
    """Settings of a run whose engine is one server of vLLM, and the release of it."""
    settings = ["rollout.engine=vllm", "rollout.engines=1", f"rollout.engine_python={engine_python.absolute()}"]
    code = (
        "import importlib.metadata as m; print([d.version for d in m.distributions() if d.name.startswith('vllm')][0])"
    )
    printed = subprocess.run([engine_python, "-c", code], check=True, capture_output=True, text=True).stdout
    return settings, printed.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--engine-python", type=Path, help="the interpreter of an environment with vLLM")
    parser.add_argument("--set", nargs="*", default=[], help="dotted settings on top, for a trial")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings, versions = options.set, {name: version(name) for name in ("torch", "transformers", "ray")}
    if options.engine_python is not None:
        found, versions["vllm"] = with_vllm(options.engine_python)
        settings = [*found, *settings]
    runs = []
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_seed(seed, Path(folder), settings))
        record = {
            "what": "held-out sampled accuracy of the sort-digits demo, 256 prompts x 8 samples at temperature 1",
            **environment(1),
            "versions": versions,
            "runs": runs,
        }
        if options.json:
            options.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()
