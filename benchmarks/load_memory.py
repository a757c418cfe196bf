"""Peak host memory of loading a sharded model, per rank, against the rank's shard; both ways to read.

    python benchmarks/load_memory.py --json benchmarks/results/load_memory.json

Each measurement takes fresh processes, with gloo on one machine. A rank imports everything and builds the model once
without weights, then notes its resident set; the peak is that of the loading alone, from the kernel's own mark.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.record import write_record  # noqa: E402

MIB = 2**20
SIZES = {"hidden_size": 768, "intermediate_size": 2304, "vocab_size": 32_000, "num_hidden_layers": 6}
MODEL_SHARE = 0.1  # of the model, that a rank may hold besides its shard and one bucket


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("folder    dp  read        model MiB   shard MiB   peak growth MiB      allowed")
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            save_model(Path(folder), dtype)
            for dp in args.dp:
                for read_by in ("every_rank", "first_rank"):
                    ranks = measure(Path(folder), dp, read_by)
                    results.append({"folder": dtype, "dp": dp, "read": read_by, "ranks": ranks})
                    worst = max(ranks, key=lambda rank: rank["peak_mib"] - rank["allowed_mib"])
                    print(
                        f"{dtype:<9} {dp:>2}  {read_by:<10}  {worst['model_mib']:>9.0f}   {worst['shard_mib']:>9.0f}"
                        f"   {worst['peak_mib']:>15.0f}   {worst['allowed_mib']:>10.0f}",
                        flush=True,
                    )
    write_record(
        args.json,
        "resident set of each rank at its peak while load_policy ran, above that before; allowed is its shard of "
        f"float32 masters, {MODEL_SHARE:.0%} of them all, and one bucket",
        1,
        results,
    )


def save_model(folder: Path, dtype: str, **changes: Any) -> None:
    """A Qwen3 of random weights, written tensor by tensor; with the sizes above, 336 MiB of float32."""
    import torch
    import transformers

    from slimefsdp.checkpoint.export import EXPORT_DTYPES, write_model_folder
    from slimefsdp.io.safetensors_file import TensorSpec
    from slimefsdp.models.build import build_policy
    from slimefsdp.models.hf_folder import read_model_folder

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    transformers.Qwen3Config(**SIZES | heads | {"tie_word_embeddings": False} | changes).save_pretrained(folder / "in")
    source = read_model_folder(folder / "in", with_weights=False)
    stored = EXPORT_DTYPES[dtype]
    named = build_policy(source, torch.float32).named_weights()
    specs = [TensorSpec(name, stored, tuple(parameter.shape)) for name, parameter in named]

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        torch.manual_seed(0)
        for spec in specs:
            yield spec.name, torch.randn(spec.shape).to(stored)

    write_model_folder(folder / "model", specs, tensors(), source)


def measure(folder: Path, dp: int, read_by: str) -> list[dict[str, float]]:
    """Of each rank, in MiB: model, shard, growth of the resident set at its peak, and what is allowed."""
    context = multiprocessing.get_context("spawn")
    listener = socket.create_server(("127.0.0.1", 0))  # of rank 0
    port = listener.getsockname()[1]
    pipes = [context.Pipe(duplex=False) for _ in range(dp)]
    processes = [
        context.Process(target=load_rank, args=(rank, dp, port, store, folder, read_by, pipe[1]), daemon=True)
        for rank, (pipe, store) in enumerate(zip(pipes, [listener] + [None] * (dp - 1), strict=True))
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    listener.close()
    found = [ours.recv() for ours, _ in pipes]
    for process in processes:
        process.join()
    return found


def load_rank(
    rank: int, dp: int, port: int, store: socket.socket | None, folder: Path, read_by: Any, pipe: Any
) -> None:
    """One rank's process: loads the model and sends what it took."""
    import torch

    from slimefsdp.distributed.fsdp import Parallelism
    from slimefsdp.distributed.mesh import build_mesh, local_shard, start_process_group
    from slimefsdp.models.build import build_policy, load_policy
    from slimefsdp.models.hf_folder import read_model_folder
    from slimefsdp.models.load_weights import BUCKET_BYTES

    torch.set_num_threads(1)
    device = torch.device("cpu")
    start_process_group(device, rank=rank, world_size=dp, address="127.0.0.1", port=port, timeout_s=300, listener=store)
    mesh, source = build_mesh(dp, 1, device), read_model_folder(folder / "model")
    model_bytes = sum(p.numel() * 4 for _, p in build_policy(source, torch.float32).named_weights())
    torch.distributed.all_reduce(torch.ones(1), group=mesh.group)  # gloo comes up here
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the mark starts again
    policy = load_policy(source, mesh, Parallelism(torch.float32, torch.float32), read_by=read_by)
    growth = status_bytes("VmHWM") - before
    shard_bytes = sum(local_shard(parameter).nbytes for _, parameter in policy.named_weights())
    allowed = shard_bytes + MODEL_SHARE * model_bytes + BUCKET_BYTES
    sizes = {"model_mib": model_bytes, "shard_mib": shard_bytes, "peak_mib": growth, "allowed_mib": allowed}
    pipe.send({name: round(value / MIB, 1) for name, value in sizes.items()})
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def status_bytes(field: str) -> int:
    """A field of this process's status, e.g. its resident set now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
