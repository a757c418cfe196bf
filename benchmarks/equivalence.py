"""Meshes against one plain process: loss, parameters and gradients after three optimiser steps, and bytes per rank.

    python benchmarks/equivalence.py --json benchmarks/results/equivalence.json [--all-meshes]
    python benchmarks/equivalence.py --shared --json benchmarks/results/equivalence_shared.json

The reference is written from the formulas in plain PyTorch (tests/support/plain_step.py): one process, one forward a
sample, no packing, no FSDP. Every row is `Trainer.train_step` on real gloo ranks over the same batch, three updates.
`--shared` has meshes on which ranks share matrices (tp) or experts (ep). The bounds are: float64, 1e-12; float32 under
SGD with momentum, 2 ulp of the parameter + 1e-5 of the largest update. AdamW divides by the size of the gradient: a
parameter whose true gradient is zero (a key bias under softmax) takes full-size steps in the direction of rounding
noise. Such parameters, or elements of them, are found by their float64 gradient and named; of the others the difference
is shown, and in float64 bounded, under `--shared` by 1e-10. In float32 small gradients are half noise, whoever computes
them: there the difference under AdamW is shown only.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.record import write_record
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.training.plan import plan_training
from tests.support.float64 import KeepFloat64
from tests.support.plain_step import PlainStep, make_batch, settings
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

WHAT = (
    "Trainer.train_step, three optimiser steps on gloo ranks, against plain PyTorch and Hugging Face in one process; "
    "differences are the largest over all elements"
)
Tensors = dict[str, torch.Tensor]
STRATEGIES = ("ring", "ulysses", "all_gather")
# a width that no number of ranks divides, so that shards are uneven and the last ones may be empty
ODD = {"vocab_size": 97, "intermediate_size": 55}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], bool]] = {  # kind, changes, strategies, all meshes
    "qwen3": ("qwen3", ODD | {"tie_word_embeddings": False}, STRATEGIES, True),
    "qwen3, tied": ("qwen3", ODD | {"tie_word_embeddings": True}, STRATEGIES, False),
    "qwen2, biases": ("qwen2", ODD | {"tie_word_embeddings": False, "use_sliding_window": False}, STRATEGIES, False),
    "gpt2": ("gpt2", {"vocab_size": 97}, STRATEGIES, False),
    "gemma2, windows and soft-caps": ("gemma2", {"vocab_size": 97}, ("ulysses", "all_gather"), False),
    "qwen3_moe": ("qwen3_moe", {"vocab_size": 97}, STRATEGIES, False),
    "gpt_oss, windows and sinks": ("gpt_oss", {"vocab_size": 97}, ("ulysses", "all_gather"), False),
}
# kind and changes; sizes that two and four tp ranks, or ep ranks, can divide
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "qwen3, tied": ("qwen3", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2, windows": ("qwen2", {}),
    "gemma2, windows and soft-caps": ("gemma2", {}),
    "gemma3, windows": ("gemma3_text", {}),
    "mistral, windows": ("mistral", {}),
    "gpt_oss, windows and sinks": ("gpt_oss", {"num_local_experts": 8}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}),
    "mixtral": ("mixtral", {"num_local_experts": 8}),
}
FEW = ((1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 2), (2, 2, 2))
RUNS = {  # optimiser and dtype of the three runs of a row
    "float64 sgd": ("float64", {"name": "sgd", "lr": 0.05}),
    "float32 sgd": ("float32", {"name": "sgd", "lr": 0.05}),
    "float64 adamw": ("float64", {"name": "adamw", "lr": 0.01}),
    "float32 adamw": ("float32", {"name": "adamw", "lr": 0.01}),
}


@dataclass(frozen=True)
class Mesh:
    """One row's mesh, and how parameters and attention are spread over it."""

    dp_replicate: int
    dp: int
    cp: int
    strategy: str = "-"
    sharding: str = "full"
    tp: int = 1
    ep: int = 1

    def sections(self) -> dict[str, Any]:
        attention = {"strategy": self.strategy} if self.cp > 1 else {}
        axes = {name: getattr(self, name) for name in ("dp_replicate", "dp", "cp", "tp", "ep")}
        return {"mesh": axes, "attention": attention, "fsdp": {"sharding": self.sharding}}

    @property
    def ranks(self) -> int:
        return self.dp_replicate * self.dp * self.cp * self.tp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *SHARED], help="all by default")
    parser.add_argument("--shared", action="store_true", help="meshes with tp and ep ranks")
    parser.add_argument("--max-ranks", type=int, default=8)
    parser.add_argument("--all-meshes", action="store_true", help="for every model, not for the first alone")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    pool = RankPool()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(args.cases or (SHARED if args.shared else CASES)):
            kind, changes, strategies, all_meshes = (*SHARED[name], (), False) if args.shared else CASES[name]
            all_meshes = all_meshes or args.all_meshes
            path = save_tiny_model(Path(folder) / str(number), kind, **changes)
            for data in ("different", "same") if all_meshes and number == 0 else ("different",):
                batch = data_of(path, data)
                references = {run: reference(path, batch, run) for run in RUNS}
                print(f"\n{name}; {data} data on every rank\n{HEADER}", flush=True)
                few = None if all_meshes and data == "different" else FEW
                for mesh in shared_meshes(kind) if args.shared else meshes(strategies, args.max_ranks, few):
                    row = measure(pool, path, batch, mesh, references)
                    results.append({"model": name, "data": data, **asdict(mesh), **row})
                    print(line(mesh, row), flush=True)
                write_record(args.json, WHAT, 1, results)  # after each table: all of them take most of an hour
    pool.close()
    failed = [row for row in results if any(row[run]["within_bound"] is False for run in RUNS)]
    print(f"\n{len(results)} rows, {len(failed)} outside their bound")
    sys.exit(bool(failed))


def meshes(strategies: tuple[str, ...], max_ranks: int, only: tuple[tuple[int, int, int], ...] | None) -> list[Mesh]:
    """Every mesh of 1, 2, 4 and 8 ranks with every strategy that can serve it, then the other sharding levels."""
    found = []
    for ranks in (1, 2, 4, 8):
        axes = [(r, d, ranks // r // d) for r in (1, 2, 4, 8) for d in (1, 2, 4, 8) if r * d <= ranks]
        for r, d, c in axes:
            if only is not None and (r, d, c) not in only:
                continue
            # four attention heads: Ulysses cannot divide them over eight ranks
            found += [Mesh(r, d, c, s) for s in strategies if c <= 4 or s != "ulysses"] if c > 1 else [Mesh(r, d, c)]
    if only is None:
        for sharding in ("keep_parameters", "optimizer", "replicate"):
            found += [Mesh(1, 4, 1, sharding=sharding), Mesh(1, 2, 2, strategies[0], sharding)]
    return [mesh for mesh in found if mesh.ranks <= max_ranks]


def shared_meshes(kind: str) -> list[Mesh]:
    """Meshes with tp ranks, and with ep ranks for a mixture of experts."""
    strategies = (
        ("ring", "all_gather", "ulysses") if kind in ("qwen3", "llama", "mixtral", "qwen3_moe") else ("all_gather",)
    )
    found = [Mesh(1, 1, 1, tp=2), Mesh(1, 1, 1, tp=4), Mesh(1, 2, 1, tp=2), Mesh(2, 2, 1, tp=2)]
    found += [Mesh(1, 1, 2, strategy, tp=2) for strategy in strategies]
    if kind in ("gpt_oss", "qwen3_moe", "mixtral"):
        found += [Mesh(1, 2, 1, ep=2), Mesh(1, 4, 1, ep=4), Mesh(1, 2, 1, tp=2, ep=4), Mesh(2, 2, 1, ep=2)]
    return found


def data_of(path: Path, data: str) -> RolloutBatch:
    """Eight samples: all different, or one repeated so that every rank has the same data."""
    batch = make_batch(path)
    return batch if data == "different" else batch.select(np.array([0, 1] * 4))


def config_of(path: Path, mesh: Mesh, run: str) -> RunConfig:
    dtype, optim = RUNS[run]
    sections = mesh.sections() | {"precision": {"compute_dtype": dtype}, "optim": optim, "loss": {"epochs": 1}}
    return settings(path, **sections, batch={"max_tokens_per_rank": 64})


def reference(path: Path, batch: RolloutBatch, run: str) -> dict[str, Any]:
    """Three updates in one plain process: loss, gradients of the whole batch, weights before and after."""
    config = config_of(path, Mesh(1, 1, 1), run)
    dtype = torch.float64 if run.startswith("float64") else torch.float32
    plan = plan_training(config, batch)
    assert len(plan.updates) == 3
    with KeepFloat64():
        plain = PlainStep(path, config, dtype)
        plain.backward(batch, np.arange(batch.num_samples))
        gradients, start = plain.gradients(), plain.weights()
        plain.optimizer.zero_grad()
        losses = plain.train(batch, plan)
    weights = plain.weights()
    return {
        "loss": float(np.mean(losses)),
        "gradients": gradients,
        "weights": weights,
        "largest_update": largest({name: weights[name] - start[name] for name in weights}),
    }


def train(rank: int, config: RunConfig, batch: RolloutBatch) -> dict[str, Any]:
    """The same on a rank of the mesh."""
    from slimefsdp.trainer import Trainer

    with KeepFloat64():
        trainer = Trainer(config, device=torch.device("cpu"))
        trainer.forward_backward(batch)
        named = trainer.policy.named_weights()
        gradients = {name: p.grad.full_tensor() for name, p in named}  # type: ignore[union-attr]
        gradient_bytes = sum(p.grad.to_local().nbytes for _, p in named)  # type: ignore[union-attr]
        trainer.zero_grad()
        metrics = trainer.train_step(batch)
    buffers = sum(buffer.nbytes for buffer in trainer.policy.buffers())
    return {
        "loss": metrics["loss"],
        "gradients": gradients if rank == 0 else None,
        "weights": {name: p.full_tensor().detach() for name, p in named} if rank == 0 else full(named),
        "bytes": [trainer.memory().parameters - buffers, gradient_bytes, trainer.memory().optimizer],
        "whole_bytes": sum(p.numel() * p.dtype.itemsize for _, p in named),
    }


def full(named: Any) -> None:
    for _, parameter in named:
        parameter.full_tensor()  # collective: all ranks take part, one keeps it


def measure(
    pool: RankPool, path: Path, batch: RolloutBatch, mesh: Mesh, references: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One row: differences from the reference in all three runs, and bytes per rank."""
    row: dict[str, Any] = {}
    zeros = zero_gradients(references["float64 sgd"]["gradients"])
    for run, expected in references.items():
        of_ranks = pool.run(mesh.ranks, train, config_of(path, mesh, run), batch)
        ours = of_ranks[0]
        difference = {name: ours["weights"][name] - expected["weights"][name] for name in expected["weights"]}
        excused = zeros if run.endswith("adamw") else {}
        compared = {
            name: value.masked_fill(excused[name], 0) if excused else value for name, value in difference.items()
        }
        row[run] = {
            "loss": ours["loss"],
            "loss_difference": abs(ours["loss"] - expected["loss"]),
            "parameter_sum": float(sum(value.double().sum() for value in ours["weights"].values())),
            "gradient_difference": largest(
                {name: ours["gradients"][name] - expected["gradients"][name] for name in difference}
            ),
            "parameter_difference": largest(compared),
            "largest_update": expected["largest_update"],
            "within_bound": None
            if run == "float32 adamw"
            else within_bound(compared, expected, limit=limit_of(mesh, run)),
        }
        named = {name: f"{int(mask.sum())} of {mask.numel()}" for name, mask in excused.items() if mask.any()}
        if named:
            row[run]["elements_whose_true_gradient_is_zero"] = named
            row[run]["their_difference"] = largest({name: difference[name][excused[name]] for name in named})
        if run == "float32 adamw":
            whole = ours["whole_bytes"]
            shards = 1 if mesh.sharding == "replicate" else mesh.dp * mesh.cp * mesh.tp
            wanted = [whole / shards, whole / shards, 2 * whole / shards]  # AdamW keeps two moments
            row["bytes_per_rank"] = [found["bytes"] for found in of_ranks]
            row["largest_bytes_over_1/N"] = [max(found["bytes"][i] for found in of_ranks) / wanted[i] for i in range(3)]
    return row


def limit_of(mesh: Mesh, run: str) -> float | None:
    """The largest difference in float64; None in float32, where it depends on the parameter."""
    if run.startswith("float32"):
        return None
    # the smallest gradients of experts are so near to 0 that AdamW enlarges their rounding
    return 1e-10 if run.endswith("adamw") and mesh.tp * mesh.ep > 1 else 1e-12


def within_bound(differences: Tensors, expected: dict[str, Any], *, limit: float | None) -> bool:
    """Whether every single parameter is as close as promised."""
    if limit is not None:
        return largest(differences) <= limit and expected["largest_update"] >= 1e-2
    slack = 1e-5 * expected["largest_update"]
    for name, difference in differences.items():
        magnitude = expected["weights"][name].abs().clamp(min=2.0**-100)
        ulp = torch.finfo(torch.float32).eps * 2.0 ** magnitude.log2().floor()
        if not (difference.abs() <= 2 * ulp + slack).all():
            return False
    return bool(expected["largest_update"] >= 1e-2)


def zero_gradients(gradients: Tensors) -> Tensors:
    """Where the gradient in float64 is rounding noise against the largest one, but not where it is exactly zero.

    An exact zero, such as that of an embedding row that no token has, is a zero for everybody.
    """
    scale = largest(gradients)
    return {name: (g != 0) & (g.abs() < 1e-12 * scale) for name, g in gradients.items()}


def largest(tensors: Tensors) -> float:
    return max(float(value.abs().max()) for value in tensors.values())


HEADER = (
    "                                                                          float64 SGD       float32 SGD  "
    "     AdamW            bytes x N / whole\n"
    "  ranks  repl. x dp x cp  strategy    sharding         loss  parameter sum  gradient  weight  gradient  weight"
    "  float64 float32  weights gradients moments"
)


def line(mesh: Mesh, row: dict[str, Any]) -> str:
    sgd = " ".join(
        f"{row[run]['gradient_difference']:>9.1e} {row[run]['parameter_difference']:>7.1e}"
        for run in ("float64 sgd", "float32 sgd")
    )
    adamw = " ".join(f"{row[run]['parameter_difference']:>7.1e}" for run in ("float64 adamw", "float32 adamw"))
    shares = "     ".join(f"{share:.2f}" for share in row["largest_bytes_over_1/N"])
    axes = f"{mesh.dp_replicate} x {mesh.dp} x {mesh.cp}"
    axes += f" x tp {mesh.tp}" * (mesh.tp > 1) + f" ep {mesh.ep}" * (mesh.ep > 1)
    return (
        f"  {mesh.ranks:>5}  {axes:>15}  {mesh.strategy:<10}  {mesh.sharding:<15}  {row['float64 sgd']['loss']:.6f}"
        f"  {row['float64 sgd']['parameter_sum']:>11.6f} {sgd}  {adamw}     {shares}"
        + "".join(f"  OUTSIDE: {run}" for run in RUNS if row[run]["within_bound"] is False)
    )


if __name__ == "__main__":
    main()
