"""Many sleeps and wake-ups of a Trainer: what they change, what they leave behind, and how fast they are.

    python benchmarks/sleep_wake.py --json benchmarks/results/sleep_wake.json
    torchrun --nproc-per-node 2 benchmarks/sleep_wake.py --size 0.6b    # on CUDA, where there is one

A model of random weights sleeps (parameters, optimiser state, reference) and wakes again and again, with a training
step now and then. Checked: sha256 of everything that slept, the losses to the bit against the same steps without sleep,
0 bytes while asleep, and from the first fifth to the end resident memory, open files and threads. Timed: sleep and
wake-up against plain copies of as many bytes, to and from host memory that exists already (page-locked on CUDA), taken
in between; and one use of the reference under each `reference.offload`, with the bytes that it holds between uses.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.record import write_record
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import choose_device, start_process_group_from_environment
from slimefsdp.trainer import Trainer
from tests.support.process_resources import held_by_the_process

WHAT = (
    "Trainer.sleep() and wake_up() of parameters, optimiser state and reference; bytes of rank 0, medians over cycles; "
    "reference: compute_log_probs(model='ref') of one batch under each reference.offload"
)
SIZES: dict[str, dict[str, Any]] = {  # Qwen3 shapes; small: about 100 MB of fp32 parameters, moments and reference
    "small": {
        "hidden_size": 256, "num_hidden_layers": 5, "intermediate_size": 768, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192,
    },
    "0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
    "4b": {
        "hidden_size": 2560, "num_hidden_layers": 36, "intermediate_size": 9728, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    },
}  # fmt: skip
COMMON = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True,
          "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
MOST_COPIED_BYTES = 4 * 2**30
STEPS, COPIES, USES, SAMPLES = 10, 20, 10, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--digest-every", type=int, default=1, help="cycles between sha256 checks")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args()
    device = choose_device(args.device)
    torch.set_num_threads(1)
    start_process_group_from_environment(device, timeout_s=600)
    folder = Path(tempfile.mkdtemp()) if dist.get_rank() == 0 else Path()
    folders = [folder]
    dist.broadcast_object_list(folders, device=device)
    if dist.get_rank() == 0:
        (folder / "config.json").write_text(json.dumps({**COMMON, **SIZES[args.size]}))
    dist.barrier()
    results = {
        "model": args.size,
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        **cycles(folders[0], device, args.cycles, args.digest_every),
        "reference": {offload: reference_use(folders[0], device, offload) for offload in ("sleep", "fsdp", "none")},
    }
    if dist.get_rank() == 0:
        (folder / "config.json").unlink()
        folder.rmdir()
        print(json.dumps(results, indent=2))
        write_record(args.json, WHAT, 1, results)
    dist.barrier()
    dist.destroy_process_group()


def settings(folder: Path, device: torch.device, **reference: Any) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(folder), "init": "random"},
            # losses are compared to the bit, and without this CUDA's kernels do not repeat to it
            "run": {"deterministic": device.type == "cuda"},
            "mesh": {"dp": "auto", "device": device.type},
            "precision": {"compute_dtype": "bfloat16" if device.type == "cuda" else "float32"},
            "loss": {"kl_coefficient": 0.1},
            "reference": reference,
            "optim": {"lr": 1e-4, "total_updates": 1000},
        }
    )


def make_batch(seed: int) -> RolloutBatch:
    """Two groups of four samples of 32 tokens."""
    rng = np.random.default_rng(seed)
    return RolloutBatch.from_samples(
        [
            {
                "tokens": rng.integers(3, 8000, 32),
                "response_length": 24,
                "reward": float(rng.random()),
                "group_id": i // 4,
            }
            for i in range(8)
        ]
    )


# ---------------------------------------------------------------------- cycles


def cycles(folder: Path, device: torch.device, count: int, digest_every: int) -> dict[str, Any]:
    """All cycles with their checks."""
    plain = Trainer(settings(folder, device), device=device)
    expected = [plain.train_step(make_batch(seed))["loss"].hex() for seed in range(min(STEPS, count))]
    del plain
    trainer = Trainer(settings(folder, device), device=device)
    losses: list[str] = []
    sleeps, wakes, held = [], [], []
    changed = awake_bytes = 0
    trainer.wake_up()
    digest = state_digest(trainer)
    flat, host = plain_buffers(trainer, device)
    copies: list[dict[str, float]] = []
    for cycle in range(count):
        if cycle % max(1, count // SAMPLES) == 0:
            held.append(held_by_the_process())
        sleeps.append(trainer.sleep())
        memory = trainer.memory()
        awake_bytes += memory.parameters + memory.optimizer + memory.reference
        wakes.append(trainer.wake_up())
        if cycle % digest_every == 0:
            changed += state_digest(trainer) != digest
        if cycle % max(1, count // COPIES) == 0:
            copies.append(plain_copies(flat, host, device))
        if cycle % max(1, count // STEPS) == 0 and len(losses) < STEPS:
            losses.append(trainer.train_step(make_batch(len(losses)))["loss"].hex())
            trainer.wake_up()
            digest = state_digest(trainer)
    held.append(held_by_the_process())
    warm, after = held[len(held) // 5], held[-1]
    moved = sleeps[0].device_bytes_before
    rates = {
        "sleep": statistics.median(report.bytes_per_s for report in sleeps),
        "wake_up": statistics.median(report.bytes_per_s for report in wakes),
        **{name: flat.nbytes / statistics.median(taken[name] for taken in copies) for name in copies[0]},
    }
    return {
        "cycles": count,
        "bytes_moved": moved,
        "host_bytes": sleeps[-1].host_bytes,
        "gb_per_s": {name: round(rate / 1e9, 3) for name, rate in rates.items()},
        "seconds": {name: round(moved / rates[name], 4) for name in ("sleep", "wake_up")},
        "device_bytes_of_what_sleeps": awake_bytes,
        "device_allocated_asleep": max(report.device_allocated for report in sleeps),
        "device_reserved_asleep": max(report.device_reserved for report in sleeps),
        "largest_free_block_awake": wakes[-1].largest_free_block,
        "digests_that_changed": changed,
        "losses_as_without_sleep": losses == expected,
        "resident_mb": [round(sample["bytes"] / 1e6) for sample in held],
        "resident_growth_percent": round(100 * (after["bytes"] / warm["bytes"] - 1), 3),
        "files_opened": after["files"] - warm["files"],
        "threads_started": after["threads"] - warm["threads"],
        "first_sleep_seconds": round(sleeps[0].seconds, 4),  # the host memory is taken, and page-locked, here
    }


def state_digest(trainer: Trainer) -> str:
    """sha256 of this rank's parameters, moments and reference."""
    assert trainer.reference is not None
    digest = hashlib.sha256()
    moments = [value for state in trainer.updater.optimizer.state.values() for value in state.values()]
    for tensor in (*trainer.policy.parameters(), *trainer.reference.parameters(), *moments):
        # a copy: memory that numpy has seen could not be freed
        digest.update(local_of(tensor).cpu().clone().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def plain_buffers(trainer: Trainer, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """One tensor on the device and one on the host, as large as what sleeps, but no larger than fits beside it."""
    memory = trainer.memory()
    nbytes = min(memory.parameters + memory.optimizer + memory.reference, MOST_COPIED_BYTES)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return torch.ones(nbytes, dtype=torch.uint8, device=device), host.zero_()


def plain_copies(flat: torch.Tensor, host: torch.Tensor, device: torch.device) -> dict[str, float]:
    """Seconds of a copy each way, and of one into device memory that has to be had first, as for a wake-up."""
    new: list[torch.Tensor] = []
    return {
        "copy to the host": seconds(lambda: host.copy_(flat, non_blocking=True), device),
        "copy back": seconds(lambda: flat.copy_(host, non_blocking=True), device),
        "copy back into new memory": seconds(
            lambda: new.append(torch.empty_like(flat).copy_(host, non_blocking=True)), device
        ),
    }


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    start = time.perf_counter()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# ---------------------------------------------------------------------- the reference between uses


def reference_use(folder: Path, device: torch.device, offload: str) -> dict[str, Any]:
    """Seconds of one use of the reference, and what it holds when it is not used."""
    trainer = Trainer(settings(folder, device, offload=offload), device=device)
    batch = make_batch(0)
    taken = [seconds(lambda: trainer.compute_log_probs(batch, "ref"), device) for _ in range(USES + 2)]
    assert trainer.reference is not None
    shards = [local_of(parameter) for parameter in trainer.reference.parameters()]
    on_host = sum(shard.untyped_storage().nbytes() for shard in shards) if offload == "fsdp" else 0
    memory = trainer.memory()
    actor = statistics.median([seconds(lambda: trainer.compute_log_probs(batch), device) for _ in range(USES)])
    return {
        "seconds_per_use": round(statistics.median(taken[2:]), 4),
        "seconds_of_the_policy_itself": round(actor, 4),
        "device_bytes_between_uses": 0 if offload == "fsdp" else memory.reference,
        "host_bytes_between_uses": on_host + memory.host_buffers,
        "device_allocated": memory.device_allocated,
    }


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo may abort while the interpreter ends; the work is done and flushed
