"""Sharding levels on 1, 2, 4 and 8 ranks, and what offload and recomputation cost and save.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json
    python benchmarks/scaling.py --table     # prints the tables of benchmarks/results/scaling.json

Ranks are single-threaded processes with gloo on one machine, so beyond its cores they share them: samples per
CPU-second of all ranks together say what a level costs in work, samples per second what this machine makes of it.
Candidates take their steps in turn, several rounds, and medians count. Communication is that of the profiler's own
table (`profile.updates`), of one further update, averaged over ranks; peak memory that of another, with
`memory` in `profile.details`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.record import write_record
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.config.sections import FsdpSettings
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.monitoring.profiler import Shares, UpdateProfiler, shares_of_trace
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

RECORD = Path(__file__).resolve().parent / "results" / "scaling.json"
LEVELS = [level for level in get_args(FsdpSettings.model_fields["sharding"].annotation) if level != "auto"]
MODEL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
SAMPLES, LENGTH, PACK_TOKENS = 16, 128, 128
TRADE_OFFS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "fsdp.cpu_offload": {"fsdp": {"cpu_offload": True}},
    "activation_checkpointing=full": {"model": {"activation_checkpointing": "full"}},
    "activation_checkpointing=selective": {"model": {"activation_checkpointing": "selective"}},
}
TRADE_OFF_RANKS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings on so many ranks."""

    table: str
    name: str
    ranks: int
    sections: dict[str, dict[str, Any]]

    def config(self, folder: Path) -> RunConfig:
        tree: dict[str, dict[str, Any]] = {
            "model": {"path": str(folder / "model")},
            "mesh": {"device": "cpu", "dp": self.ranks},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": PACK_TOKENS},
            "optim": {"total_updates": 1000},
        }
        for section, values in self.sections.items():
            tree[section] = tree.get(section, {}) | values
        return config_from_dict({"algorithm": "sft", **tree})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--table", action="store_true", help="print the tables of the record and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(RECORD.read_text())["results"]))
        return
    candidates = [
        Candidate("levels", level, ranks, {"fsdp": {"sharding": level}}) for ranks in args.ranks for level in LEVELS
    ]
    one_pack = {"batch": {"max_tokens_per_rank": SAMPLES * LENGTH // TRADE_OFF_RANKS}}  # so that activations show
    candidates += [
        Candidate("trade_offs", name, TRADE_OFF_RANKS, one_pack | parts) for name, parts in TRADE_OFFS.items()
    ]
    pool = RankPool()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tiny_model(folder / "model", **MODEL)
        steps: list[list[list[Step]]] = [[] for _ in candidates]  # [candidate][round][rank]
        profiles = []
        for number in range(args.rounds):
            for candidate, rounds in zip(candidates, steps, strict=True):
                rounds.append(pool.run(candidate.ranks, timed_step, candidate.config(folder)))
                if number == 0:
                    profiles.append(pool.run(candidate.ranks, profiled_steps, candidate.config(folder), folder / "run"))
    pool.close()
    results = [row_of(*found) for found in zip(candidates, steps, profiles, strict=True)]
    print(tables(results))
    what = (
        f"Trainer.train_step (sft) on gloo ranks that share {os.cpu_count()} cores: {SAMPLES} samples of {LENGTH} "
        f"tokens in packs of {PACK_TOKENS} (trade-offs: one pack on each of {TRADE_OFF_RANKS} ranks), float32, AdamW, "
        f"Qwen3 {MODEL}"
    )
    write_record(args.json, what, 1, results)


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank measured of a step."""

    wall_s: float
    cpu_s: float
    parameters: int  # bytes at rest
    gradients: int
    optimizer: int


def recorded_batch() -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(0, MODEL["vocab_size"], LENGTH).tolist(), "response_length": LENGTH // 2}
        for _ in range(SAMPLES)
    ]
    return RolloutBatch.from_samples(samples)


def timed_step(rank: int, config: RunConfig) -> Step:
    """The second step of a fresh trainer; the first one warms up."""
    trainer, batch = Trainer(config, device=torch.device("cpu")), recorded_batch()
    optimizer_step, gradients = trainer.optimizer_step, [0]

    def noting_gradients() -> dict[str, float]:
        gradients[0] = local_bytes(p.grad for p in trainer.policy.parameters() if p.grad is not None)
        return optimizer_step()

    trainer.optimizer_step = noting_gradients  # type: ignore[method-assign]
    trainer.train_step(batch)
    dist.barrier()
    start = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    trainer.train_step(batch)
    wall, cpu = time.perf_counter() - start[0], resource.getrusage(resource.RUSAGE_SELF).ru_utime - start[1]
    moments = [value for state in trainer.updater.optimizer.state.values() for value in state.values()]
    return Step(wall, cpu, local_bytes(trainer.policy.parameters()), gradients[0], local_bytes(moments))


def local_bytes(tensors: Iterable[Any]) -> int:
    """Of this rank's rows; numbers that are no rows of anything, such as AdamW's step, are left out."""
    locals_ = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
    return sum(tensor.nbytes for tensor in locals_ if tensor.ndim)


def profiled_steps(rank: int, config: RunConfig, folder: Path) -> tuple[Shares, int]:
    """This rank's shares of one update, and the most bytes that tensors took in another beyond what was there before.

    Recording allocations takes longer than allocating, so it would change the shares.
    """
    trainer, batch = Trainer(config, device=torch.device("cpu")), recorded_batch()
    trainer.train_step(batch)
    found = []
    for update, with_memory in ((2, False), (3, True)):
        trainer._state.profiler = UpdateProfiler({update}, folder, trainer.mesh, with_memory=with_memory)
        trainer.train_step(batch)
        trace = gzip.decompress((folder / f"update_{update:06d}_rank{rank}.json.gz").read_bytes())
        found.append(shares_of_trace(json.loads(trace)["traceEvents"], f"update {update}"))
    assert found[1].peak_bytes is not None
    return found[0], found[1].peak_bytes


def row_of(candidate: Candidate, rounds: list[list[Step]], profiles: list[tuple[Shares, int]]) -> dict[str, Any]:
    """Medians over rounds; of bytes the fullest rank's."""
    wall = [max(step.wall_s for step in steps) for steps in rounds]
    cpu = [sum(step.cpu_s for step in steps) for steps in rounds]
    last = rounds[-1]
    shares, peaks = zip(*profiles, strict=True)
    return {
        "table": candidate.table,
        "name": candidate.name,
        "ranks": candidate.ranks,
        "samples_per_s": SAMPLES / statistics.median(wall),
        "samples_per_cpu_s": SAMPLES / statistics.median(cpu),
        "parameters_bytes": max(step.parameters for step in last),
        "gradients_bytes": max(step.gradients for step in last),
        "optimizer_bytes": max(step.optimizer for step in last),
        "peak_bytes": max(peaks),
        "shares": {
            name: statistics.mean(getattr(rank, name) / rank.seconds for rank in shares)
            for name in ("compute", "communication", "exposed", "idle")
        },
        "rounds": [[round(x, 4) for x in pair] for pair in zip(wall, cpu, strict=True)],
    }


def tables(results: list[dict[str, Any]]) -> str:
    """Both tables as Markdown."""
    head = "samples/s | samples per CPU-s | parameters MB | gradients MB | optimiser MB | peak MB"
    head += " | communication | exposed"
    lines = [f"| level | ranks | {head} |", "|---" * 10 + "|"]
    lines += [f"| `{row['name']}` | {row['ranks']} | {_cells(row)} |" for row in results if row["table"] == "levels"]
    lines += ["", f"| on {TRADE_OFF_RANKS} ranks | {head} |", "|---" * 9 + "|"]
    lines += [f"| {row['name']} | {_cells(row)} |" for row in results if row["table"] == "trade_offs"]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    sizes = [row[f"{name}_bytes"] / 1e6 for name in ("parameters", "gradients", "optimizer", "peak")]
    shares = [f"{100 * row['shares'][name]:.0f} %" for name in ("communication", "exposed")]
    rates = [f"{row[name]:.1f}" for name in ("samples_per_s", "samples_per_cpu_s")]
    return " | ".join([*rates, *(f"{size:.2f}" for size in sizes), *shares])


if __name__ == "__main__":
    main()
