"""Train steps of adapters on an 8-billion model: tokens a second, and the memory of a sample of 131,072 tokens.

    python benchmarks/gpu/lora.py --json lora.json
    python benchmarks/gpu/lora.py --only long/131072
    python benchmarks/gpu/lora.py --device cpu

Needs torch, transformers and pydantic: no Ray, no download. The model has the shapes of Qwen3-8B, adapters of rank 16
on every linear layer and random weights, which are drawn on the device, since a host takes minutes. A step is one
update of `algorithm: sft` on full samples of random tokens, all of them trained but the first. Each check prints PASS,
FAIL or SKIP with its figures. A check passes if all losses and gradient norms are finite and no update was skipped; a
check of `long/` passes only if the allocator reserved less than 80 GB. `estimated_gb` is what `slimefsdp plan` says of
the same settings.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check, Finding
from benchmarks.gpu.step import draw, matrix_tflops
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.estimate.recommend import memory_of_context
from slimefsdp.estimate.setup import MeshShape, setup_of
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models import build
from slimefsdp.trainer import Trainer

QWEN3_8B = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False,
            "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "attention_bias": False,
            "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096, "num_hidden_layers": 36,
            "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "vocab_size": 151936}  # fmt: skip
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}  # fmt: skip
MOST_BYTES = 80e9


@dataclass(frozen=True)
class Case:
    """One way to train, and the samples of an update."""

    samples: int
    sample_tokens: int
    model: dict[str, Any]  # settings
    steps: int = 3  # the first one compiles and allocates; the median of the others counts
    most_bytes: float = math.inf  # that the allocator may reserve


CASES = {
    "short/stored": Case(4, 4096, {}),
    "short/stored_compiled": Case(4, 4096, {"compile": True}),
    "long/32768": Case(1, 32768, {"activation_checkpointing": "full"}, most_bytes=MOST_BYTES),
    "long/131072": Case(1, 131072, {"activation_checkpointing": "offload"}, steps=2, most_bytes=MOST_BYTES),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the exit status."""
    assert __doc__ is not None
    with tempfile.TemporaryDirectory() as folder:
        return checks.main(__doc__, partial(checks_of, Path(folder)), arguments)


def checks_of(folder: Path, device: torch.device) -> list[Check]:
    """Returns a check for each case; on a CPU the model is tiny and a sample has a 64th of the tokens."""
    start_process_group_from_environment(device, timeout_s=120)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B | (TINY if device.type == "cpu" else {})))
    return [Check(name, partial(taken, folder, device, case)) for name, case in CASES.items()]


def taken(folder: Path, device: torch.device, case: Case) -> Finding:
    """Takes the steps of a case with a new Trainer."""
    on_cpu = device.type == "cpu"
    tokens = case.sample_tokens // 64 if on_cpu else case.sample_tokens
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder), "init": "random", **case.model},
        "mesh": {"dp": "auto", "device": device.type},
        "precision": {"compute_dtype": "float32" if on_cpu else "bfloat16"},
        "optim": {"lr": 1e-5, "total_updates": 100},
        "lora": {"rank": 16},
        "batch": {"max_tokens_per_rank": tokens},
    }
    config = config_from_dict({"algorithm": "sft", **settings})
    with patch.object(build, "draw_weights", lambda model, template, seed: draw(model)):
        trainer = Trainer(config, device=device)
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats(device)
    metrics, seconds = [], []
    for seed in range(case.steps):
        began = time.perf_counter()
        metrics.append(
            trainer.train_step(samples(case.samples, tokens, seed, on_cpu))
        )  # its metrics wait for the device
        seconds.append(time.perf_counter() - began)
    spec = ModelSpec.from_config(json.loads((folder / "config.json").read_text()))
    setup = setup_of(config, spec, MeshShape(), on_cpu=on_cpu)
    estimate = memory_of_context(setup, config.batch.max_tokens_per_rank)
    last = metrics[-1]
    reserved = 0 if on_cpu else torch.cuda.max_memory_reserved(device)
    is_right = reserved <= case.most_bytes and all(
        math.isfinite(step["loss"]) and 0 < step["grad_norm"] < math.inf and not step["skipped_update"]
        for step in metrics
    )
    step_s = float(np.median(seconds[1:]))
    figures = {
        "tokens_per_step": case.samples * tokens,
        "step_s": step_s,
        "tokens_per_s": case.samples * tokens / step_s,
        "first_step_s": seconds[0],
        "tflops": last["tflops_per_rank"],
        "loss": last["loss"],
        "grad_norm": last["grad_norm"],
        "estimated_gb": estimate.total / 1e9,
    }
    if not on_cpu:
        figures |= {
            "allocated_gb": torch.cuda.max_memory_allocated(device) / 1e9,
            "reserved_gb": reserved / 1e9,
            "matrix_tflops": matrix_tflops(device, torch.bfloat16),
        }
    return is_right, figures


def samples(count: int, tokens: int, seed: int, on_cpu: bool) -> RolloutBatch:
    """Returns samples of random tokens of which the first is the prompt."""
    rng = np.random.default_rng(seed)
    vocab = TINY["vocab_size"] if on_cpu else QWEN3_8B["vocab_size"]
    return RolloutBatch.from_samples(
        [{"tokens": rng.integers(3, vocab, tokens), "response_length": tokens - 1} for _ in range(count)]
    )


if __name__ == "__main__":
    status = main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)
