"""What a train step of a mixture with 64 experts costs: plain Hugging Face, one rank, two ranks with and without ep.

    python benchmarks/experts.py --json benchmarks/results/experts.json

Plain Hugging Face computes each sample by itself with transformers' eager experts, its default for training on a CPU;
the others are `Trainer.train_step` on packs. All have the same batch, AdamW and float32, and take a step in turn, every
other round in reverse. Seconds are CPU seconds of the process, or of the slower of two ranks; with ranks the kernel's
seconds count too, since gloo copies there.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.record import write_record
from slimefsdp.config import RunConfig, config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.trainer import Trainer
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import save_tiny_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 4, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 96,
    "initializer_range": 0.02, "norm_topk_prob": True,
}  # fmt: skip
MESHES = {"one rank": {}, "two ranks, experts gathered": {"dp": 2}, "two ranks, ep 2": {"dp": 2, "ep": 2}}
WHAT = (
    "CPU seconds of a train step of a mixture of 64 experts, 8 of a token, 4 layers of 256; medians over rounds in "
    "which each takes a step in turn, and median ratios inside a round"
)


def make_batch() -> RolloutBatch:
    rng = np.random.default_rng(0)
    return RolloutBatch.from_samples(
        {
            "tokens": rng.integers(3, SIZES["vocab_size"], length).tolist(),
            "response_length": int(length) - 16,
            "reward": float(rng.random()),
            "group_id": index // 4,
        }
        for index, length in enumerate(rng.integers(48, 208, 32))
    )


def seconds(*, with_kernel: bool) -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + (used.ru_stime if with_kernel else 0.0)


class PlainHuggingFace:
    """Sample after sample through transformers, with the whole table of log-probs."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, batch: RolloutBatch) -> None:
        for sample in batch.to_samples():
            tokens, length = torch.tensor(sample["tokens"]), sample["response_length"]
            logits = self.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            chosen = logits.log_softmax(-1).gather(1, tokens[1:, None])[-length:, 0]
            (-chosen.sum() / batch.num_response_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain_rounds(rank: int, path: Path, rounds: int) -> list[float]:
    batch, plain, found = make_batch(), PlainHuggingFace(path), []
    for _ in range(rounds + 1):
        before = seconds(with_kernel=False)
        plain.step(batch)
        found.append(seconds(with_kernel=False) - before)
    return found[1:]


def rounds_of(rank: int, config: RunConfig, rounds: int) -> list[float]:
    """CPU seconds of each step of this rank, after one that does not count."""
    batch, trainer, found = make_batch(), Trainer(config, device=CPU), []
    for _ in range(rounds + 1):
        before = seconds(with_kernel=config.ranks > 1)
        trainer.train_step(batch)
        found.append(seconds(with_kernel=config.ranks > 1) - before)
    return found[1:]


def settings(path: Path, mesh: dict[str, int]) -> RunConfig:
    return config_from_dict(
        {
            "model": {"path": str(path)},
            "mesh": {"device": "cpu", **mesh},
            "precision": {"compute_dtype": "float32"},
            "batch": {"max_tokens_per_rank": 1024},
            "optim": {"lr": 1e-4, "total_updates": 1000},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    found: dict[str, list[float]] = {}
    pool = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder) / "model", "qwen3_moe", **SIZES)
        for number in range(options.rounds):
            calls = {"plain Hugging Face": lambda: max(pool.run(1, plain_rounds, path, 1))[0]}
            for name, mesh in MESHES.items():
                config = settings(path, mesh)
                calls[name] = lambda config=config: max(pool.run(config.ranks, rounds_of, config, 1))[0]  # type: ignore[misc]
            for name in list(calls)[:: -1 if number % 2 else 1]:
                found.setdefault(name, []).append(calls[name]())
                print(f"{number} {name}: {found[name][-1]:.2f} s", flush=True)
    pool.close()

    def ratio(first: str, second: str) -> float:
        return round(statistics.median(a / b for a, b in zip(found[first], found[second], strict=True)), 3)

    results = {
        "seconds": {name: round(statistics.median(values), 3) for name, values in found.items()},
        "rounds": found,
        "plain Hugging Face over one rank": ratio("plain Hugging Face", "one rank"),
        "experts gathered over ep 2": ratio("two ranks, experts gathered", "two ranks, ep 2"),
    }
    print(results)
    write_record(options.json, WHAT, 1, results)


if __name__ == "__main__":
    main()
