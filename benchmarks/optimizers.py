"""What optimisers hold and take on a CPU, and the host time of an update of 400 small parameters.

    python benchmarks/optimizers.py --json benchmarks/results/optimizers.json
    python benchmarks/optimizers.py --table     # prints the tables of benchmarks/results/optimizers.json

An update is the global norm, clipping and the step, of random gradients. CPU time of the process counts, since others
may share the machine; ways take their updates in turn, and medians over rounds count.

Host time is taken on parameters of at most 8 x 8, whose arithmetic is next to nothing: once as it is, once as it was
before steps were taken over local shards (`before`, written out below), and as users of torch do it, with
`clip_grad_norm_` and `step()` over sharded tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.record import write_record
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.estimate.memory import memory_at_rest
from slimefsdp.estimate.setup import MeshShape, setup_of
from slimefsdp.model_spec import ModelSpec
from slimefsdp.optim.optimizer_step import OptimizerStep, gradient_health
from slimefsdp.trainer import Trainer
from tests.support.optimizers import optimizer_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

RECORD = Path(__file__).resolve().parent / "results" / "optimizers.json"
WHAT = "optimiser states and updates of each optimizer, and host time of an update of 400 parameters of at most 8 x 8"
MODEL: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "initializer_range": 0.02,
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw"},
    "adamw, bfloat16": {"name": "adamw", "state_dtype": "bfloat16"},
    "adamw, 8bit": {"name": "adamw", "state_dtype": "8bit"},
    "muon": {"name": "muon"},
    "sgd": {"name": "sgd"},
}
PARAMETERS = 400
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--table", action="store_true", help="print the tables of the record and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(tables(json.loads(RECORD.read_text())["results"]))
        return
    pool = RankPool()
    with tempfile.TemporaryDirectory() as scratch:
        folder = save_tiny_model(Path(scratch) / "model", **MODEL)
        rows = []
        for ranks in (1, 2):
            rows += [row | {"ranks": ranks} for row in rows_of(pool.run(ranks, updates, folder, args.rounds))]
    (host,) = pool.run(1, host_times, 3 * args.rounds)
    pool.close()
    results = {"optimizers": rows, "host": host}
    print(tables(results))
    write_record(args.json, WHAT, 1, results)


# ---------------------------------------------------------------------- each optimiser


def settings(folder: Path, optim: dict[str, Any]) -> RunConfig:
    tree = {
        "model": {"path": str(folder)},
        "mesh": {"dp": "auto", "device": "cpu"},
        "precision": {"compute_dtype": "float32"},
        "optim": {"lr": 1e-4, "total_updates": 1000, **optim},
    }
    return config_from_dict(tree).with_ranks(dist.get_world_size() if dist.is_initialized() else 1)


def updates(rank: int, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """Of one rank and each optimiser: bytes that are held and that `plan` expects, and CPU seconds of each update."""
    trainers = {name: Trainer(settings(folder, how), device=torch.device("cpu")) for name, how in OPTIMIZERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds + 1):
        for name, trainer in trainers.items():
            for _, parameter in trainer.policy.trained_weights():
                parameter.grad = torch.randn_like(parameter)
            dist.barrier()
            start = time.process_time()
            trainer.updater.step(trainer.mesh.group)
            seconds[name].append(time.process_time() - start)
    spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
    return [
        {
            "optimizer": name,
            "parameters": sum(p.numel() for _, p in trainer.policy.trained_weights()),
            "bytes": trainer.memory().optimizer,
            "planned_bytes": memory_at_rest(
                setup_of(trainer.config, spec, MeshShape(dp=dist.get_world_size()), on_cpu=True)
            ).optimizer,
            "cpu_s": seconds[name][1:],
        }
        for name, trainer in trainers.items()
    ]


def rows_of(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row an optimiser: medians of CPU seconds that all ranks together take; bytes of all ranks."""
    return [
        {
            "optimizer": of_ranks[0]["optimizer"],
            "parameters": of_ranks[0]["parameters"],
            "bytes": sum(one["bytes"] for one in of_ranks),
            "planned_bytes": sum(one["planned_bytes"] for one in of_ranks),
            "cpu_s": statistics.median(map(sum, zip(*(one["cpu_s"] for one in of_ranks), strict=True))),
        }
        for of_ranks in zip(*found, strict=True)
    ]


# ---------------------------------------------------------------------- host time


def many_parameters(mesh: DeviceMesh) -> list[tuple[str, nn.Parameter]]:
    shapes = [(8,) if index % 11 == 0 else (8, 8) for index in range(PARAMETERS)]
    return [
        (f"model.layers.{i // 11}.p{i}.weight", nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [Shard(0)])))
        for i, shape in enumerate(shapes)
    ]


def host_times(rank: int, rounds: int) -> dict[str, float]:
    """Median CPU seconds of an update, by how it is taken."""
    mesh, group = init_device_mesh("cpu", (dist.get_world_size(),)), dist.group.WORLD
    assert group is not None
    ways: dict[str, tuple[list[tuple[str, nn.Parameter]], Callable[[], object]]] = {}

    ours = many_parameters(mesh)
    vectors = {name for name, parameter in ours if parameter.ndim == 1}
    optimizer = optimizer_of(ours, "adamw", undecayed=vectors, **ADAMW)
    updater = OptimizerStep(optimizer, ours, lambda update: 1e-3, max_grad_norm=1.0)
    ways["now"] = ours, lambda: updater.step(group)

    earlier = many_parameters(mesh)
    its_optimizer = optimizer_of(earlier, "adamw", undecayed=vectors, **ADAMW)
    ways["before"] = earlier, lambda: before(earlier, its_optimizer, group)

    for how in ("default", "fused"):
        named = many_parameters(mesh)
        groups = [
            {"params": [p for name, p in named if name not in vectors], "weight_decay": 0.1},
            {"params": [p for name, p in named if name in vectors], "weight_decay": 0.0},
        ]
        torchs = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True if how == "fused" else None)

        def as_users_do(named: Any = named, torchs: torch.optim.Optimizer = torchs) -> None:
            norm = nn.utils.clip_grad_norm_([p for _, p in named], 1.0)
            assert isinstance(norm, DTensor) and float(norm.full_tensor()) > 0
            torchs.step()
            torchs.zero_grad(set_to_none=True)

        ways[f"torch, {how}"] = named, as_users_do

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 2):
        for name, (named, update) in ways.items():
            for _, parameter in named:
                parameter.grad = distribute_tensor(torch.randn(parameter.shape), mesh, [Shard(0)])
            start = time.process_time()
            update()
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(taken[2:]) for name, taken in seconds.items()}


def before(named: list[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
    """An update as it was: every shard asked for under autograd, every gradient's mesh asked, torch's own step."""
    parameters = [parameter for _, parameter in named]
    norms = torch._foreach_norm([p.grad.to_local() for p in parameters if p.grad is not None], 2, torch.float64)
    counted = [
        all(
            place == 0 or not isinstance(placement, Replicate)
            for place, placement in zip(p.grad.device_mesh.get_coordinate(), p.grad.placements, strict=True)
        )
        for p in parameters
        if isinstance(p.grad, DTensor)
    ]
    total = torch.stack([norm * is_counted for norm, is_counted in zip(norms, counted, strict=True)]).square()
    dist.all_reduce(total, group=group)
    health = gradient_health([name for name, _ in named], total.tolist(), loss_scale=1.0, update=0)
    factor = min(1.0, 1.0 / health.norm)
    torch._foreach_mul_([p.grad.to_local() for p in parameters if p.grad is not None], factor)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# ---------------------------------------------------------------------- the document


def tables(results: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    alone = {row["optimizer"]: row for row in results["optimizers"] if row["ranks"] == 1}
    two = {row["optimizer"]: row for row in results["optimizers"] if row["ranks"] == 2}
    lines = ["| optimiser | bytes of a parameter | as `plan` counts | update, CPU ms | on 2 ranks, together |"]
    lines.append("|---|---|---|---|---|")
    for name, row in alone.items():
        held, planned = (row[key] / row["parameters"] for key in ("bytes", "planned_bytes"))
        lines.append(
            f"| {name} | {held:.2f} | {planned:.2f} | {1e3 * row['cpu_s']:.0f} | {1e3 * two[name]['cpu_s']:.0f} |"
        )
    host = results["host"]
    lines += ["", f"| an update of {PARAMETERS} parameters | CPU ms | against `now` |", "|---|---|---|"]
    lines += [f"| {name} | {1e3 * taken:.1f} | {taken / host['now']:.1f} |" for name, taken in host.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
