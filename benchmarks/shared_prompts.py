"""Train steps with what samples have in common computed once, against the same steps without, in CPU time.

PYTHONPATH=. python benchmarks/shared_prompts.py --out benchmarks/results/shared_prompts.json

One process and one thread. Each round takes one step with each setting of `batch.share_prefixes`, so that whatever else
the machine does falls on both; a step's CPU seconds are those of the process in user mode, since page faults of large
buffers are the kernel's. Both trainers start from the same weights and see the same batches, so their losses are equal
but for rounding.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import transformers

from benchmarks.record import write_record
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer

VOCAB = 512
SIZES: dict[str, dict[str, int]] = {
    "hidden 128": {
        "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32
    },
    "hidden 512": {
        "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 64,
    },
}  # fmt: skip
Sample = tuple[list[int], int]  # tokens, and how many of them are the prompt


def group(rng: np.random.Generator, prompt: int, responses: int, length: int) -> list[Sample]:
    shared = rng.integers(0, VOCAB, prompt).tolist()
    return [(shared + rng.integers(0, VOCAB, length).tolist(), prompt) for _ in range(responses)]


def conversation(rng: np.random.Generator, turns: int = 10) -> list[Sample]:
    """Every turn adds 64 tokens to what all later ones begin with, and 128 that none of them sees."""
    samples, history = [], rng.integers(0, VOCAB, 256).tolist()
    for _ in range(turns):
        samples.append((history + rng.integers(0, VOCAB, 128).tolist(), len(history)))
        history = history + rng.integers(0, VOCAB, 64).tolist()
    return samples


def unrelated(rng: np.random.Generator) -> list[Sample]:
    return [sample for length in rng.integers(40, 400, 16).tolist() for sample in group(rng, length // 4, 1, length)]


WORKLOADS: dict[str, Callable[[np.random.Generator], list[Sample]]] = {
    "prompt 1024 + 16 x 128": lambda rng: group(rng, 1024, 16, 128),
    "prompt 256 + 8 x 256": lambda rng: group(rng, 256, 8, 256),
    "10-turn conversation": conversation,
    "4 x (prompt 32 + 8 x 64)": lambda rng: [sample for _ in range(4) for sample in group(rng, 32, 8, 64)],
    "nothing in common": unrelated,
}


def batch_of(samples: list[Sample], rng: np.random.Generator) -> RolloutBatch:
    return RolloutBatch.from_samples(
        [
            {
                "tokens": tokens,
                "response_length": len(tokens) - prompt,
                "reward": float(rng.random()),
                "group_id": index // 2,
            }
            for index, (tokens, prompt) in enumerate(samples)
        ]
    )


def trainer(folder: Path, share: str) -> Trainer:
    config = config_from_dict(
        {
            "model": {"path": str(folder)},
            "mesh": {"device": "cpu"},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": 4096, "share_prefixes": share},
            "optim": {"lr": 1e-5, "total_updates": 1000},
        }
    )
    return Trainer(config, device=torch.device("cpu"))


def user_seconds(step: Callable[[], Any]) -> tuple[float, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    result = step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime - before, result


def compared(folder: Path, make: Callable[[np.random.Generator], list[Sample]], rounds: int) -> dict[str, Any]:
    """One workload with a model: medians of its steps, shared and not, and how far their losses lie apart."""
    trainers = {share: trainer(folder, share) for share in ("auto", "never")}
    seconds: dict[str, list[float]] = {share: [] for share in trainers}
    apart: list[float] = []
    computed = tokens = 0.0
    for number in range(rounds + 1):
        rng = np.random.default_rng(number)
        batch = batch_of(make(rng), rng)
        losses: dict[str, float] = {}
        for share, one in sorted(trainers.items(), reverse=bool(number % 2)):
            took, metrics = user_seconds(lambda one=one, batch=batch: one.train_step(batch))
            losses[share] = metrics["loss"]
            if number > 0:  # the first step pays for what is built once
                seconds[share].append(took)
            if share == "auto":
                tokens, computed = float(batch.lengths.sum()), batch.lengths.sum() * (1 - metrics["shared_tokens"])
        apart.append(abs(losses["auto"] - losses["never"]))
    shared, unshared = (statistics.median(seconds[share]) for share in ("auto", "never"))
    return {
        "tokens": int(tokens),
        "computed_tokens": round(computed),
        "token_ratio": round(tokens / computed, 2),
        "unshared_user_s": round(unshared, 4),
        "shared_user_s": round(shared, 4),
        "speedup": round(statistics.median(a / b for a, b in zip(seconds["never"], seconds["auto"], strict=True)), 3),
        "largest_loss_difference": float(f"{max(apart):.1e}"),
    }


def main() -> None:
    """Prints a table, and writes the record where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="steps that are timed, of each kind")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--out", type=Path, help="write the record as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            config = transformers.Qwen3Config(
                vocab_size=VOCAB, num_hidden_layers=4, max_position_embeddings=8192, tie_word_embeddings=False,
                **SIZES[size],
            )  # fmt: skip
            torch.manual_seed(0)
            transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
            for name in arguments.workloads:
                found = compared(Path(folder), WORKLOADS[name], arguments.rounds)
                rows.append({"model": size, "workload": name, **found})
                print(
                    f"{size}  {name:26} tokens {found['tokens']:6} / {found['token_ratio']:.2f}  user s "
                    f"{found['unshared_user_s']:7.3f} -> {found['shared_user_s']:7.3f}  {found['speedup']:.2f}x  "
                    f"losses within {found['largest_loss_difference']:.0e}",
                    flush=True,
                )
    what = "user CPU seconds of train_step with batch.share_prefixes auto and never, Qwen3 of 4 layers, float32, AdamW"
    write_record(arguments.out, what, 1, rows)
    sys.stdout.flush()
    os._exit(0)  # gloo may abort at interpreter exit; everything is done by now


if __name__ == "__main__":
    main()
