"""What Ray and the calls to a group cost: train_step of a WorkerGroup against bare Trainers in two plain processes.

    python benchmarks/rpc_overhead.py --json benchmarks/results/rpc_overhead.json

Both have the same settings, the same batch and the same weights. A round is one step of each, in an order that is
swapped from round to round, so that what else the machine does hits both alike; the overhead is the median over rounds
of the ratio inside one, and its 95 % interval is the bootstrap's. The driver's own CPU seconds (checking, planning, the
object store, waiting), those of Ray's other processes, which run beside both, and the ranks' are recorded with it.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import RunConfig, config_from_dict  # noqa: E402
from slimefsdp.data.rollout_batch import RolloutBatch  # noqa: E402
from slimefsdp.distributed.mesh import start_process_group  # noqa: E402
from slimefsdp.results import Health  # noqa: E402
from slimefsdp.trainer import Trainer  # noqa: E402

RANKS = 2
LENGTH, PROMPT = 256, 32
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--rounds", type=int, default=48, help="even, so that both are first equally often")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    if args.rounds < 2 or args.rounds % 2:
        parser.error(f"--rounds={args.rounds} is no even number")
    from actors.workers.worker_group import WorkerGroup

    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        config, batch = settings(Path(folder)), random_batch(args.tokens)
        group = WorkerGroup.launch(config)
        rank_pids = [health.pid for health in group.health() if isinstance(health, Health)]
        ray_pids = [pid for pid in descendants(os.getpid()) if pid not in rank_pids]
        bare = BareRanks(config, batch)
        try:
            rounds: list[dict[str, float]] = []
            for number in range(args.rounds + 1):
                turns = [lambda: grouped_step(group, batch, rank_pids, ray_pids), bare.step]
                first, second = turns if number % 2 else turns[::-1]
                rounds.append(first() | second())
        finally:
            group.shutdown()
            bare.close()
    medians = {name: statistics.median(values[name] for values in rounds[1:]) for name in rounds[0]}  # one warms up
    # what slows the machine meets both steps of a round, so their ratio is steadier than one of medians
    ratios = np.array([one["group_s"] / one["bare_s"] for one in rounds[1:]])
    rank_ratios = np.array([one["group_rank_cpu_s"] / one["bare_rank_cpu_s"] for one in rounds[1:]])
    overhead, interval = float(np.median(ratios)) - 1, [edge - 1 for edge in interval_of_median(ratios)]
    rank_overhead = float(np.median(rank_ratios)) - 1
    print(f"{args.tokens} tokens on {RANKS} ranks, seconds: " + ", ".join(f"{n} {v:.3f}" for n, v in medians.items()))
    print(
        f"overhead: {overhead:.1%} of the wall time (95 % interval {interval[0]:.1%} to {interval[1]:.1%}), "
        f"{rank_overhead:.1%} of a rank's CPU time"
    )
    results = {
        "tokens": args.tokens,
        "ranks": RANKS,
        "overhead": overhead,
        "overhead_95": interval,
        "rank_cpu_overhead": rank_overhead,
        "medians": medians,
        "rounds": [{name: round(value, 4) for name, value in values.items()} for values in rounds[1:]],
    }
    write_record(args.json, "train_step of a WorkerGroup against bare Trainers, " + str(MODEL), 1, results)


def interval_of_median(values: np.ndarray) -> list[float]:
    """Where the median lies with 95 % confidence, by resampling."""
    drawn = np.random.default_rng(0).choice(values, (10_000, len(values)))
    return [float(edge) for edge in np.quantile(np.median(drawn, axis=1), [0.025, 0.975])]


def grouped_step(group: Any, batch: RolloutBatch, rank_pids: list[int], ray_pids: list[int]) -> dict[str, float]:
    """One step through Ray: wall seconds, CPU seconds of the driver, of the busiest rank and of Ray's own processes."""
    ranks, ray = [cpu_seconds(pid) for pid in rank_pids], of_those_alive(ray_pids)
    driver, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    group.train_step(batch)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "group_s": wall,
        "driver_cpu_s": after.ru_utime - driver.ru_utime + after.ru_stime - driver.ru_stime,
        "group_rank_cpu_s": max(cpu_seconds(pid) - before for pid, before in zip(rank_pids, ranks, strict=True)),
        "ray_cpu_s": sum(seconds - ray[pid] for pid, seconds in of_those_alive(list(ray)).items()),
    }


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def of_those_alive(pids: list[int]) -> dict[int, float]:
    """`cpu_seconds` by process, without those that have ended: Ray ends workers that it no longer needs."""
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            found[pid] = cpu_seconds(pid)
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that they started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


class BareRanks:
    """A Trainer in each of two processes, without Ray; they hold the batch and wait for the word to take a step."""

    def __init__(self, config: RunConfig, batch: RolloutBatch) -> None:
        context = mp.get_context("spawn")
        listener = socket.create_server(("127.0.0.1", 0))  # of rank 0
        port = listener.getsockname()[1]
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            store = listener if rank == 0 else None
            process = context.Process(target=serve, args=(rank, config, batch, port, store, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        listener.close()
        for pipe in self._pipes:
            pipe.recv()

    def step(self) -> dict[str, float]:
        """One step: wall seconds until both ranks have answered, and the busiest rank's CPU seconds."""
        before, start = [cpu_seconds(process.pid) for process in self._processes], time.perf_counter()
        for pipe in self._pipes:
            pipe.send(True)
        for pipe in self._pipes:
            pipe.recv()
        wall, ranks = time.perf_counter() - start, [cpu_seconds(process.pid) for process in self._processes]
        return {"bare_s": wall, "bare_rank_cpu_s": max(b - a for a, b in zip(before, ranks, strict=True))}

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join(timeout=30)


def serve(rank: int, config: RunConfig, batch: RolloutBatch, port: int, store: socket.socket | None, pipe: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    start_process_group(
        device, rank=rank, world_size=RANKS, address="127.0.0.1", port=port, timeout_s=600, listener=store
    )
    trainer = Trainer(config, device=device)
    pipe.send("ready")
    while pipe.recv():
        trainer.train_step(batch)
        pipe.send("done")
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit after sub-groups were used


def settings(folder: Path) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(folder)},
            "mesh": {"dp": RANKS, "device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": 8192},
            "optim": {"lr": 1e-5, "total_updates": 1000},
        }
    )


def random_batch(tokens: int) -> RolloutBatch:
    rng = np.random.default_rng(0)
    samples = [
        {
            "tokens": rng.integers(0, MODEL["vocab_size"], LENGTH),
            "response_length": LENGTH - PROMPT,
            "reward": float(rng.random()),
            "group_id": index // 8,
        }
        for index in range(tokens // LENGTH)
    ]
    return RolloutBatch.from_samples(samples)


def save_model(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL)).save_pretrained(folder)


if __name__ == "__main__":
    main()
