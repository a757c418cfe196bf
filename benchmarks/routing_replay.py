"""How far a bfloat16 engine and a float32 trainer are apart on a mixture, with and without routing replay.

    python benchmarks/routing_replay.py --json benchmarks/results/routing_replay.json

The engine is the embedded sampler with bfloat16 weights of the trainer, which computes in float32. It samples once, and
the same samples are evaluated twice: with the experts that the trainer's routers choose, and with the engine's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.record import write_record
from slimefsdp.config import config_from_dict
from slimefsdp.data.rollout_batch import RolloutBatch, Sample
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.models.build import load_for_sampling
from slimefsdp.models.hf_folder import read_model_folder
from slimefsdp.sampling.params import SamplingParams
from slimefsdp.sampling.sampler import Sampler
from slimefsdp.trainer import Trainer
from tests.support.tiny_models import save_tiny_model

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_hidden_layers": 8, "moe_intermediate_size": 64, "initializer_range": 0.05,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 64, "layer_types": None},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
}
WHAT = (
    "absolute differences of log-probs between a bfloat16 engine and a float32 trainer, by loss.routing_replay; "
    "kl_k3 is the mean of ratio - 1 - log ratio; changed_experts is the share of (token, layer) pairs whose set of "
    "experts differs without replay"
)


def sampled(path: Path, prompts: int, responses: int) -> RolloutBatch:
    policy = load_for_sampling(read_model_folder(path), torch.bfloat16, CPU)
    sampler = Sampler(policy, records_experts=True)
    rng = np.random.default_rng(0)
    contexts = [rng.integers(3, SIZES["vocab_size"], int(length)).tolist() for length in rng.integers(8, 40, prompts)]
    for index, context in enumerate(contexts):
        sampler.add(context, responses, SamplingParams(max_new_tokens=48, seed=(index,)))
    samples: list[Sample] = []
    while not sampler.is_idle:
        for request, _, drawn in sampler.step():
            sample = Sample([*contexts[request], *drawn.tokens], len(drawn.tokens), rollout_log_probs=drawn.log_probs)
            sample.routed_experts = drawn.routed_experts
            samples.append(sample)
    return RolloutBatch.from_samples(samples)


def measured(path: Path, batch: RolloutBatch) -> dict[str, Any]:
    result: dict[str, Any] = {}
    assert batch.routed_experts is not None and batch.rollout_log_probs is not None
    for replay in ("old_log_probs", "rollout"):  # the first records what the trainer's routers choose
        config = config_from_dict(
            {
                "model": {"path": str(path)},
                "mesh": {"device": "cpu"},
                "precision": {"compute_dtype": "float32"},
                "batch": {"max_tokens_per_rank": 2048},
                "loss": {"routing_replay": replay},
            }
        )
        given = batch if replay == "rollout" else batch.replace(routed_experts=None)
        found = Trainer(config, device=CPU).compute_log_probs(given)
        log_ratio = found.log_probs - batch.rollout_log_probs
        name = "rollout" if replay == "rollout" else "none"
        result[name] = {
            "mean": float(np.abs(log_ratio).mean()),
            "max": float(np.abs(log_ratio).max()),
            "kl_k3": float((np.exp(log_ratio.astype(np.float64)) - 1 - log_ratio).mean()),
        }
        if replay == "old_log_probs":
            assert found.routed_experts is not None
            differs = (np.sort(found.routed_experts) != np.sort(batch.routed_experts)).any(-1)
            result["changed_experts"] = float(differs[batch.routed_experts[:, 0, 0] >= 0].mean())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    start_process_group_from_environment(CPU, timeout_s=60)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, sizes in MIXTURES.items():
            model = save_tiny_model(Path(folder) / kind, kind, **{**SIZES, **sizes})
            batch = sampled(model, prompts=16, responses=4)
            results[kind] = measured(model, batch) | {"response_tokens": batch.num_response_tokens}
            print(kind, results[kind], flush=True)
    write_record(path, WHAT, 1, results)


if __name__ == "__main__":
    main()
