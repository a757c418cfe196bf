"""slimefsdp's side of the benchmark: a Trainer without Ray, and the whole of `train_step`, planning included."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.peers.measure import serve
from slimefsdp.config import load_config
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.parallel.mesh import start_process_group_from_environment
from slimefsdp.trainer import Trainer

SETTINGS = Path(__file__).with_name("slimefsdp.yaml")


class OwnStep:
    """One `train_step` with the settings of slimefsdp.yaml."""

    def __init__(self, model: Path, batch: Path, device: torch.device, *, overrides: list[str]) -> None:
        config = load_config(SETTINGS, [f"model.path={model}", f"mesh.device={device.type}", *overrides])
        start_process_group_from_environment(device, timeout_s=600)
        self.trainer = Trainer(config, device=device)
        self.batch = RolloutBatch.load(batch)
        self.parameters = sum(parameter.numel() for parameter in self.trainer.policy.parameters())
        self.micro_batches = [config.batch.max_tokens_per_rank]

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One phase, which is one update."""
        metrics = self.trainer.train_step(self.batch)
        return metrics["loss"], metrics["grad_norm"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", action="append", default=[])
    chosen, _ = parser.parse_known_args()
    serve(lambda model, batch, device: OwnStep(model, batch, device, overrides=chosen.set), "transformers")
    sys.stderr.flush()
    os._exit(0)  # gloo may abort while the interpreter ends; every answer is out
