"""slimefsdp's side of the benchmark: a Trainer without Ray, and the whole of `train_step`, planning included."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.peers.measure import serve
from slimefsdp.config import load_config
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import start_process_group_from_environment
from slimefsdp.trainer import Trainer

SETTINGS = Path(__file__).with_name("slimefsdp.yaml")
MICRO_BATCHES = (2048, 4096, 8192)  # batch.max_tokens_per_rank


class OwnStep:
    """One `train_step` with the settings of slimefsdp.yaml."""

    def __init__(self, model: Path, batch: Path, device: torch.device, *, overrides: list[str]) -> None:
        given = [f"model.path={model}", f"mesh.device={device.type}", *overrides]
        start_process_group_from_environment(device, timeout_s=600)
        self.batch = RolloutBatch.load(batch)
        longest = int(self.batch.lengths.max())
        self.micro_batches = sorted({max(size, longest) for size in MICRO_BATCHES})
        self.trainers = {
            size: Trainer(load_config(SETTINGS, [*given, f"batch.max_tokens_per_rank={size}"]), device=device)
            for size in self.micro_batches
        }
        policy = self.trainers[self.micro_batches[0]].policy
        self.parameters = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One train step of one update, in packs of at most so many tokens."""
        metrics = self.trainers[micro_batch].train_step(self.batch)
        return metrics["loss"], metrics["grad_norm"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    chosen, _ = parser.parse_known_args()
    serve(lambda model, batch, device: OwnStep(model, batch, device, overrides=chosen.set), "transformers")
    sys.stderr.flush()
    os._exit(0)  # gloo may abort while the interpreter ends; every answer is out
