"""What drawing ahead of training gains: steps of a run with rollout.max_staleness 1 against those of one with 0.

    python benchmarks/ahead.py --json benchmarks/results/ahead.json

One rank and one embedded engine, a thread each. The runs are made by turns, and take as many steps each. With what
generation, training and the update of the engine take in the synchronous run, no loop can be faster than its longest
part: the bound is (generate + train + sync) / max(generate, train + sync), and the result the share of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from actors.cluster.connect import connect, disconnect  # noqa: E402
from actors.loop import train  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import RunConfig, config_from_dict  # noqa: E402
from slimefsdp.monitoring.metrics_log import read_metrics  # noqa: E402

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "layer_types": ["full_attention"] * 6,
}
WARM_UP = 3  # steps


def variety(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """A reward that differs from response to response, so that every group trains."""
    return {"reward": len(set(response)) / 10}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=16, help="responses of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=18, help=f"the first {WARM_UP} are not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder)
        connect(settings(args, folder, 0, "connect"))
        found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
        try:
            for number in range(args.rounds):
                for staleness in (0, 1) if number % 2 == 0 else (1, 0):
                    config = settings(args, folder, staleness, f"run{number}_{staleness}")
                    train(config)
                    found[staleness] += read_metrics(config.run.dir)[WARM_UP:]  # type: ignore[arg-type]
        finally:
            disconnect()

    def median(staleness: int, part: str) -> float:
        return statistics.median(row.get(f"seconds/{part}", 0.0) for row in found[staleness])

    in_turn = {part: median(0, part) for part in ("generate", "reward", "train", "sync", "step")}
    ahead = {part: median(1, part) for part in ("generate", "wait", "train", "sync", "step")}
    trains = in_turn["train"] + in_turn["sync"]
    bound = (in_turn["generate"] + trains) / max(in_turn["generate"], trains)
    gain = in_turn["step"] / ahead["step"]
    staleness = max(row["rollout/staleness_max"] / row["updates"] for row in found[1])
    results = {
        "seconds_in_turn": in_turn,
        "seconds_ahead": ahead,
        "bound": bound,
        "gain": gain,
        "share_of_bound": gain / bound,
        "most_steps_behind": staleness,
    }
    print(json.dumps(results, indent=1))
    print(f"one step ahead: {gain:.2f} times as fast, of {bound:.2f} at most: {gain / bound:.2f} of the bound")
    write_record(args.json, "median seconds of a step, with and without drawing one step ahead of training", 1, results)


def write_model(folder: Path) -> None:
    """The sort-digits example with a larger model, random, whose responses have no end."""
    spec = importlib.util.spec_from_file_location("make_sort_digits", ROOT / "scripts" / "make_sort_digits.py")
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_sort_digits(folder)
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SIZES))


def settings(args: argparse.Namespace, folder: Path, staleness: int, name: str) -> RunConfig:
    tree: dict[str, Any] = {
        "run": {"steps": args.steps, "dir": str(folder / name)},
        "model": {"path": str(folder / "model"), "init": "random"},
        "mesh": {"dp": 1, "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "batch": {"max_tokens_per_rank": 2048},
        "optim": {"lr": 1e-5, "total_updates": args.steps},
        "data": {"train": str(folder / "train.jsonl")},
        "rollout": {
            "prompts_per_step": args.prompts,
            "samples_per_prompt": args.samples,
            "max_new_tokens": args.new_tokens,
            "engines": 1,
            "reward": f"{Path(__file__).stem}:variety",
            "max_staleness": staleness,
        },
    }
    return config_from_dict(tree)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))  # where the reward is found, here and in its workers
    main()
