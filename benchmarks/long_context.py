"""Long prompts that a group shares, with and without shared prefixes, on one and on two context-parallel ranks.

    python benchmarks/long_context.py --json benchmarks/results/long_context.json
    python benchmarks/long_context.py --table   # prints the tables of the record

A batch is one group: a prompt and several responses. The four variants are {shared prompts, `batch.share_prefixes`
always or never} x {cp 1, cp 2}; a pack holds the prompt and all responses of the group, or one whole sample, and under
cp 2 either rank holds half of it.

Gradients of all four are compared in float64 first, for two responses to a prompt of the same length. Then the variants
take one `train_step` in turn in float32, several rounds, in reverse order in every other one, each with a fresh trainer
that a step of short samples has warmed up; losses and gradient norms are compared. A ratio is the median of those
inside the rounds, and its spread their smallest and largest. Ranks are processes of one thread with gloo on one
machine. CPU seconds are user and system: those of the busiest rank say what a step takes where nobody else is on the
cores, those of all ranks what it costs. Peak memory is the largest resident set of a rank during the step over that
before it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write_record
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.comparisons import largest_difference, trainer_gradients
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

RECORD = Path(__file__).resolve().parent / "results" / "long_context.json"
MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "initializer_range": 0.02,
    "max_position_embeddings": 65536,
}  # fmt: skip
BOUND = 1e-12  # of gradients in float64, as of all meshes (docs/benchmarks.md)


@dataclass(frozen=True, slots=True)
class Group:
    """The lengths of a batch."""

    prompt: int
    responses: int
    response: int

    @property
    def computed_tokens(self) -> int:
        """Where the prompt is computed once."""
        return self.prompt + self.responses * self.response

    def batch(self, seed: int) -> RolloutBatch:
        """Random tokens and rewards."""
        rng = np.random.default_rng(seed)
        prompt = rng.integers(3, MODEL["vocab_size"], self.prompt).tolist()
        samples = [
            {
                "tokens": prompt + rng.integers(3, MODEL["vocab_size"], self.response).tolist(),
                "response_length": self.response,
                "reward": float(rng.random()),
                "group_id": 0,
            }
            for _ in range(self.responses)
        ]
        return RolloutBatch.from_samples(samples)


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the four ways to compute a step."""

    shares: bool
    cp: int

    @property
    def name(self) -> str:
        """As tables have it."""
        return f"{'shared' if self.shares else 'not shared'}, cp {self.cp}"

    def config(self, folder: Path, group: Group, dtype: str) -> RunConfig:
        """A pack has room for the group with its prompt once, or else for one sample; both are cut by the ranks."""
        return config_from_dict(
            {
                "model": {"path": str(folder)},
                "mesh": {"device": "cpu", "cp": self.cp},
                "precision": {"compute_dtype": dtype},
                "batch": {
                    "max_tokens_per_rank": -(-group.computed_tokens // self.cp),
                    "share_prefixes": "always" if self.shares else "never",
                },
                "optim": {"lr": 1e-5, "total_updates": 1000},
            }
        )


VARIANTS = [Variant(shares, cp) for cp in (1, 2) for shares in (False, True)]
PAIRS = [  # what is gained, from one variant to another
    ("shared prompts, cp 1", Variant(False, 1), Variant(True, 1)),
    ("shared prompts, cp 2", Variant(False, 2), Variant(True, 2)),
    ("cp 2, not shared", Variant(False, 1), Variant(False, 2)),
    ("cp 2, shared", Variant(True, 1), Variant(True, 2)),
    ("both", Variant(False, 1), Variant(True, 2)),
]


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank measured of a step."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    loss: float
    grad_norm: float
    shared_tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt (default 16384)")
    parser.add_argument("--responses", type=int, default=4, help="of the group (default 4)")
    parser.add_argument("--response", type=int, default=64, help="tokens of a response (default 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--table", action="store_true", help="print the tables of the record and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(RECORD.read_text())["results"]))
        return
    group = Group(args.prompt, args.responses, args.response)
    pool = RankPool()
    with tempfile.TemporaryDirectory() as name:
        folder = save_tiny_model(Path(name) / "model", **MODEL)
        differences = compared(pool, folder, replace(group, responses=2))  # float64 takes its time
        print(f"gradients in float64, largest differences relative to the largest element: {differences}", flush=True)
        rounds = measured(pool, folder, group, args.rounds)
    pool.close()
    results = summary(group, differences, rounds)
    print(table(results))
    what = (
        f"Trainer.train_step of one group: a prompt of {group.prompt} tokens and {group.responses} responses of "
        f"{group.response}; float32, AdamW, gloo ranks of one thread; Qwen3 {MODEL}"
    )
    write_record(args.json, what, 1, results)
    sys.exit(not results["equal"])


def compared(pool: RankPool, folder: Path, group: Group) -> dict[str, float]:
    """How far the gradients of each variant lie from those of the first, over the largest element of those."""
    batch, found = group.batch(0), {}
    for variant in VARIANTS:
        config = variant.config(folder, group, "float64")
        found[variant.name] = pool.run(variant.cp, trainer_gradients, config, batch)[0]
        print(f"gradients of {variant.name}", flush=True)
    first = found.pop(VARIANTS[0].name)
    largest = max(float(gradient.abs().max()) for gradient in first.values())
    return {name: largest_difference(gradients, first) / largest for name, gradients in found.items()}


def measured(pool: RankPool, folder: Path, group: Group, rounds: int) -> list[dict[str, list[Step]]]:
    """Of each round, the steps of each variant's ranks."""
    found = []
    for number in range(rounds):
        steps: dict[str, list[Step]] = {}
        for variant in VARIANTS if number % 2 == 0 else VARIANTS[::-1]:
            config = variant.config(folder, group, "float32")
            steps[variant.name] = pool.run(variant.cp, timed_step, config, group, number + 1)
            wall, cpu, all_cpu, peak = totals(steps[variant.name])
            taken = f"{wall:7.2f} s  {cpu:7.2f} CPU s, {all_cpu:7.2f} of all ranks  {peak / 2**20:6.0f} MiB"
            print(f"round {number + 1}  {variant.name:18} {taken}", flush=True)
        found.append(steps)
    return found


def timed_step(rank: int, config: RunConfig, group: Group, seed: int) -> Step:
    """A step of a fresh trainer; short samples warm it up."""
    trainer, batch = Trainer(config, device=torch.device("cpu")), group.batch(seed)
    trainer.train_step(Group(64, 2, 16).batch(seed))
    before = _resident_bytes_from_here()
    dist.barrier()
    start = time.perf_counter(), _cpu_seconds()
    metrics = trainer.train_step(batch)
    wall, cpu = time.perf_counter() - start[0], _cpu_seconds() - start[1]
    return Step(
        wall, cpu, _status_bytes("VmHWM") - before, metrics["loss"], metrics["grad_norm"], metrics["shared_tokens"]
    )


def _resident_bytes_from_here() -> int:
    """Resets the kernel's record of the largest resident set; what was freed is given back first, or it would hide
    what the step takes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def totals(steps: Sequence[Step]) -> tuple[float, float, float, int]:
    """Seconds of the slowest rank, CPU seconds of the busiest one and of all, peak bytes of the fullest one."""
    wall, cpu, peak = zip(*((step.wall_s, step.cpu_s, step.peak_bytes) for step in steps), strict=True)
    return max(wall), max(cpu), sum(cpu), max(peak)


def summary(group: Group, differences: dict[str, float], rounds: Sequence[dict[str, list[Step]]]) -> dict[str, Any]:
    """Medians, ratios with their spread, and whether all variants computed the same."""
    found = [{name: totals(steps) for name, steps in one.items()} for one in rounds]
    apart = {
        name: max(
            abs(getattr(step, name) - getattr(one[VARIANTS[0].name][0], name))
            for one in rounds
            for steps in one.values()
            for step in steps
        )
        for name in ("loss", "grad_norm")
    }
    norms = [one[VARIANTS[0].name][0].grad_norm for one in rounds]
    variants = {}
    for variant in VARIANTS:
        wall, cpu, all_cpu, peak = zip(*(one[variant.name] for one in found), strict=True)
        variants[variant.name] = {
            "wall_s": statistics.median(wall),
            "cpu_s": statistics.median(cpu),
            "all_cpu_s": statistics.median(all_cpu),
            "peak_mib": statistics.median(peak) / 2**20,
            "shared_tokens": rounds[0][variant.name][0].shared_tokens,
            "rounds": [
                [round(wall_s, 3), round(cpu_s, 3), round(all_cpu_s, 3), round(peak_bytes / 2**20, 1)]
                for wall_s, cpu_s, all_cpu_s, peak_bytes in (one[variant.name] for one in found)
            ],
        }
    return {
        "group": {"prompt": group.prompt, "responses": group.responses, "response": group.response},
        "variants": variants,
        "gains": {
            name: {
                what: spread([one[a.name][place] / one[b.name][place] for one in found])
                for place, what in enumerate(("wall", "cpu", "all_cpu", "peak"))
            }
            for name, a, b in PAIRS
        },
        "float64_gradient_difference": differences,
        "float32_loss_difference": apart["loss"],
        "float32_grad_norm_difference": apart["grad_norm"] / min(norms),
        # the last two as of the train step beside other trainers: rounding of float32
        "equal": max(differences.values()) <= BOUND
        and apart["loss"] <= 1e-6
        and apart["grad_norm"] <= 1e-5 * min(norms),
    }


def spread(ratios: Sequence[float]) -> list[float]:
    """Median, smallest and largest."""
    return [round(value, 3) for value in (statistics.median(ratios), min(ratios), max(ratios))]


def table(results: dict[str, Any]) -> str:
    """What each variant takes, and what is gained from one to another, as Markdown."""
    lines = [
        "| variant | s a step | CPU s, busiest rank | CPU s, all ranks | peak MiB, fullest rank |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {name} | {one['wall_s']:.2f} | {one['cpu_s']:.2f} | {one['all_cpu_s']:.2f} | {one['peak_mib']:,.0f} |"
        for name, one in results["variants"].items()
    ]
    lines += [
        "",
        "| gained by | times as fast | CPU s, busiest rank | CPU s, all ranks | peak memory |",
        "|---" * 5 + "|",
    ]
    lines += [
        f"| {name} | {' | '.join(_ratio(*one[what]) for what in ('wall', 'cpu', 'all_cpu', 'peak'))} |"
        for name, one in results["gains"].items()
    ]
    return "\n".join(lines)


def _ratio(median: float, low: float, high: float) -> str:
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
