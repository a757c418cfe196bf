"""Saving and loading a training state, against torch.save and torch.distributed.checkpoint of the same tensors.

    python benchmarks/checkpoint.py --json benchmarks/results/checkpoint.json

Every candidate waits until the disk has its bytes. Ours also hashes every byte, verifies all of them before a load, and
removes the checkpoint before within the time of a save; the others do none of that. Loads come from the page cache:
those of ours and of torch.distributed.checkpoint into the trainer's tensors, torch.load into new ones. Rounds of all
candidates alternate; a time is that of the slowest rank, CPU seconds are summed over the ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import config_from_dict  # noqa: E402
from slimefsdp.distributed.mesh import start_process_group  # noqa: E402

MODEL = {
    "vocab_size": 10240,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
Times = dict[str, tuple[float, float]]  # measure -> seconds, CPU seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    results = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder) / "model")
            rounds, state_bytes = measured(Path(folder), ranks, args.rounds)
        results.append(summary(ranks, state_bytes, rounds))
        print(f"{ranks} ranks, {state_bytes / 1e6:.0f} MB")
        for name, value in results[-1]["median_s"].items():
            cpu = results[-1]["median_cpu_s"][name]
            print(f"  {name:<34} {value:7.3f} s {state_bytes / 1e6 / value:8.0f} MB/s   CPU {cpu:6.3f} s")
        for name, value in results[-1]["ratios"].items():
            print(f"  {name:<60} {value:.2f}")
    what = "Trainer.save and Trainer.load (hashed, verified) beside torch.save and DCP (neither) of the same tensors"
    write_record(args.json, what, 1, results)


def summary(ranks: int, state_bytes: int, rounds: list[Times]) -> dict[str, Any]:
    """Medians, and what they are to each other."""
    wall = {name: statistics.median(times[name][0] for times in rounds) for name in rounds[0]}
    cpu = {name: statistics.median(times[name][1] for times in rounds) for name in rounds[0]}
    ratios = {
        "async save() until it returns / sync save()": wall["async save until it returns"] / wall["save"],
        "what an optimizer_step() right after async save() waits / sync save()": (
            wall["optimizer_step right after async save"] - wall["optimizer_step alone"]
        )
        / wall["save"],
        "CPU seconds, async in all / sync": cpu["async save until it is finished"] / cpu["save"],
        "save() / torch.save": wall["save"] / wall["torch.save"],
        "save() / dcp.save": wall["save"] / wall["dcp.save"],
        "load() / torch.load": wall["load"] / wall["torch.load"],
        "load() / dcp.load": wall["load"] / wall["dcp.load"],
    }
    return {
        "ranks": ranks,
        "state_bytes": state_bytes,
        "median_s": wall,
        "median_cpu_s": cpu,
        "ratios": ratios,
        "rounds": [{name: [round(x, 4) for x in pair] for name, pair in times.items()} for times in rounds],
    }


def measured(folder: Path, ranks: int, rounds: int) -> tuple[list[Times], int]:
    """The times of each round, and the bytes that all ranks hold together."""
    context = mp.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))  # of rank 0
    port = listener.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        store = listener if rank == 0 else None
        arguments = (rank, ranks, folder, port, store, rounds, there)
        processes.append(context.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        pipes.append(here)
    listener.close()
    per_rank = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join(timeout=30)
    merged = [
        {name: (max(t[name][0] for t in times), sum(t[name][1] for t in times)) for name in times[0]}
        for times in zip(*(found for found, _ in per_rank), strict=True)
    ]
    return merged, sum(size for _, size in per_rank)


def serve(rank: int, ranks: int, folder: Path, port: int, store: socket.socket | None, rounds: int, pipe: Any) -> None:
    """One rank: takes part in every round, and sends its times."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cpu = torch.device("cpu")
    start_process_group(cpu, rank=rank, world_size=ranks, address="127.0.0.1", port=port, timeout_s=600, listener=store)
    trainers = {name: make_trainer(folder, ranks, name) for name in ("sync", "async")}
    state = state_of(trainers["sync"])
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}
    found = [one_round(number, rank, folder, trainers, state, local) for number in range(rounds + 1)][1:]
    pipe.send((found, sum(value.nbytes for value in local.values())))
    sys.stdout.flush()
    os._exit(0)


def one_round(number: int, rank: int, folder: Path, trainers: Any, state: Any, local: Any) -> Times:
    """Each candidate once."""
    times: Times = {}
    own_file, shared = folder / f"torch_{rank}.pt", folder / "dcp"

    def timed(name: str, call: Callable[[], object], since: tuple[float, float] | None = None) -> tuple[float, float]:
        if since is None:
            dist.barrier()
        start = since or (time.perf_counter(), time.process_time())
        call()
        times[name] = (time.perf_counter() - start[0], time.process_time() - start[1])
        return start

    def torch_save() -> None:
        with own_file.open("wb") as file:
            torch.save(local, file)
            file.flush()
            os.fsync(file.fileno())

    timed("save", lambda: trainers["sync"].save(number))
    start = timed("async save until it returns", lambda: trainers["async"].save(number))
    timed("async save until it is finished", trainers["async"].finish_save, start)
    # the worst that can follow: an update that has nothing to compute first, and waits for the copy
    trainers["async"].save(number)
    set_gradients(trainers["async"])
    timed("optimizer_step right after async save", trainers["async"].optimizer_step)
    trainers["async"].finish_save()
    set_gradients(trainers["async"])
    timed("optimizer_step alone", trainers["async"].optimizer_step)
    timed("torch.save", torch_save)
    timed("dcp.save", lambda: dcp.save(state, checkpoint_id=shared))
    timed("load", lambda: trainers["sync"].load(number))
    timed("torch.load", lambda: torch.load(own_file, mmap=False, weights_only=True))
    timed("dcp.load", lambda: dcp.load(state, checkpoint_id=shared))
    dist.barrier()
    own_file.unlink()
    if rank == 0:
        shutil.rmtree(shared)
    dist.barrier()
    return times


def set_gradients(trainer: Any) -> None:
    """As a backward pass leaves them."""
    for parameter in trainer.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)


def make_trainer(folder: Path, ranks: int, name: str) -> Any:
    """A trainer whose moments are not zero."""
    from slimefsdp.trainer import Trainer

    config = config_from_dict(
        {
            "model": {"path": str(folder / "model")},
            "run": {"dir": str(folder / name)},
            "mesh": {"device": "cpu", "dp": ranks},
            "precision": {"compute_dtype": "float32"},
            "optim": {"total_updates": 1000},
            "checkpoint": {"keep_last": 1, "async_save": name == "async"},
        }
    )
    trainer = Trainer(config, device=torch.device("cpu"))
    for state in trainer.updater.optimizer.state.values():
        for value in state.values():
            value.uniform_() if value.ndim else None
    return trainer


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, sharded as they are."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in trainer.policy.named_weights():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in trainer.updater.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def save_model(folder: Path) -> None:
    """Random weights as a Hugging Face folder."""
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL)).save_pretrained(folder)


if __name__ == "__main__":
    main()
