"""One long sequence on several single-threaded ranks against one: how much faster forward and backward become.

    python benchmarks/context_parallel.py --json benchmarks/results/context_parallel.json

Ranks are processes with gloo on one machine. Rounds of all candidates alternate, so that what else the machine does
hits them alike; the ratio is that of the medians. CPU seconds of the busiest rank stand beside: they say how the work
was shared, whatever else the machine was doing.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

from benchmarks.record import write_record  # noqa: E402
from slimefsdp.config import config_from_dict  # noqa: E402
from slimefsdp.data.rollout_batch import RolloutBatch  # noqa: E402
from slimefsdp.distributed.mesh import start_process_group  # noqa: E402

MODEL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": True,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategies", nargs="+", default=["ring", "ulysses", "all_gather"])
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder))
        candidates = [(1, "auto"), *((args.cp, strategy) for strategy in args.strategies)]
        groups = [Group(Path(folder), cp, strategy, args.tokens) for cp, strategy in candidates]
        seconds: list[list[tuple[float, float]]] = [[] for _ in groups]
        for round_number in range(args.rounds + 1):
            for group, times in zip(groups, seconds, strict=True):
                elapsed = group.step()
                if round_number > 0:  # the first round warms up
                    times.append(elapsed)
        for group in groups:
            group.close()
    results: list[dict[str, Any]] = []
    print(f"{args.tokens} tokens, forward and backward\n  ranks  strategy     seconds  speed-up    CPU s  speed-up")
    for (cp, strategy), times in zip(candidates, seconds, strict=True):
        wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
        result = {"ranks": cp, "strategy": strategy, "rounds": [[round(x, 3) for x in pair] for pair in times]}
        first = results[0] if results else {"median_s": wall, "median_cpu_s": cpu}
        result |= {"median_s": wall, "speedup": first["median_s"] / wall}
        result |= {"median_cpu_s": cpu, "cpu_speedup": first["median_cpu_s"] / cpu}
        results.append(result)
        ratios = f"{result['speedup']:>9.2f} {cpu:>8.2f} {result['cpu_speedup']:>9.2f}"
        print(f"  {cp:>5}  {strategy:<11} {wall:>8.2f} {ratios}")
    what = f"Trainer.forward_backward of one sequence of {args.tokens} tokens, float32, {MODEL}"
    write_record(args.json, what, 1, results)


class Group:
    """Ranks that wait for the word to take a step."""

    def __init__(self, folder: Path, cp: int, strategy: str, tokens: int) -> None:
        context = mp.get_context("spawn")
        listener = socket.create_server(("127.0.0.1", 0))  # of rank 0
        port = listener.getsockname()[1]
        self._pipes = []
        self._processes = []
        for rank in range(cp):
            here, there = context.Pipe()
            store = listener if rank == 0 else None
            arguments = (rank, folder, cp, strategy, tokens, port, store, there)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        listener.close()

    def step(self) -> tuple[float, float]:
        """Seconds and CPU seconds of one step, the slowest rank's of each."""
        for pipe in self._pipes:
            pipe.send(True)
        wall, cpu = zip(*(pipe.recv() for pipe in self._pipes), strict=True)
        return max(wall), max(cpu)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join(timeout=30)


def serve(
    rank: int, folder: Path, cp: int, strategy: str, tokens: int, port: int, store: socket.socket | None, pipe: Any
) -> None:
    from slimefsdp.trainer import Trainer

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    start_process_group(cpu, rank=rank, world_size=cp, address="127.0.0.1", port=port, timeout_s=600, listener=store)
    config = config_from_dict(
        {
            "algorithm": "sft",
            "model": {"path": str(folder)},
            "mesh": {"device": "cpu", "cp": cp},
            "attention": {"strategy": strategy},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": tokens},
            "optim": {"total_updates": 1000},
        }
    )
    trainer = Trainer(config, device=cpu)
    ids = np.random.default_rng(0).integers(0, MODEL["vocab_size"], tokens)
    batch = RolloutBatch.from_samples([{"tokens": ids.tolist(), "response_length": tokens - 1}])
    while pipe.recv():
        torch.distributed.barrier()
        start = time.perf_counter(), time.process_time()
        trainer.forward_backward(batch, loss="sft")
        pipe.send((time.perf_counter() - start[0], time.process_time() - start[1]))
        trainer.updater.optimizer.zero_grad(set_to_none=True)
    sys.stdout.flush()
    os._exit(0)


def save_model(folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL)).save_pretrained(folder)


if __name__ == "__main__":
    main()
