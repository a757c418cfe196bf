"""Plain loops over a Hugging Face model, as people write them: full logits, log-softmax, the loss, AdamW.

`--layout padded`: samples sorted by length, padded to the longest of their micro-batch. `--layout packed`: samples end
to end with restarting positions, from which transformers makes its own dense mask.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.measure import (
    ADAMW,
    Sample,
    clipped_loss,
    fill_packs,
    pack_sizes,
    read_samples,
    serve,
    take_update,
)


class HuggingFaceLoop:
    """Both layouts."""

    def __init__(self, model: Path, batch: Path, device: torch.device, *, layout: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        self.model.to(device).train()
        self.parameters = self.model.num_parameters()
        self.samples = read_samples(batch, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        self.is_packed = layout == "packed"
        self.micro_batches = [size for size in (4, 8, 16) if size <= len(self.samples)] or [len(self.samples)]
        if self.is_packed:
            self.micro_batches = pack_sizes(self.samples, 512, 1024, 2048)

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One update in micro-batches of so many samples, or packs of so many tokens."""
        trained = sum(sample.response_length for sample in self.samples)
        total = 0.0
        for samples in self._cut(micro_batch):
            log_probs = (self._packed if self.is_packed else self._padded)(samples)
            advantages = torch.cat(
                [log_probs.new_full((sample.response_length,), sample.advantage) for sample in samples]
            )
            loss = clipped_loss(log_probs, log_probs.detach(), advantages, trained)
            loss.backward()
            total += loss.item()
        return total, take_update(self.model, self.optimizer)

    def _cut(self, size: int) -> list[list[Sample]]:
        if self.is_packed:
            return fill_packs(self.samples, size)
        by_length = sorted(self.samples, key=lambda sample: sample.length)
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def _padded(self, samples: Sequence[Sample]) -> torch.Tensor:
        tokens = torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True)
        lengths = torch.tensor([sample.length for sample in samples], device=tokens.device)
        mask = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        is_padded = bool((lengths < tokens.shape[1]).any())
        extra: dict[str, Any] = {"attention_mask": mask.long()} if is_padded else {}
        logits = self.model(input_ids=tokens, use_cache=False, **extra).logits
        every = _log_probs(logits[:, :-1], tokens[:, 1:])
        return torch.cat(
            [
                every[row, sample.length - 1 - sample.response_length : sample.length - 1]
                for row, sample in enumerate(samples)
            ]
        )

    def _packed(self, samples: Sequence[Sample]) -> torch.Tensor:
        tokens = torch.cat([sample.tokens for sample in samples])[None]
        positions = torch.cat([torch.arange(sample.length, device=tokens.device) for sample in samples])[None]
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        every = _log_probs(logits[0, :-1], tokens[0, 1:])
        rows, end = [], 0
        for sample in samples:
            end += sample.length
            rows.append(every[end - 1 - sample.response_length : end - 1])
        return torch.cat(rows)


def _log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=["padded", "packed"], required=True)
    chosen, _ = parser.parse_known_args()
    serve(lambda model, batch, device: HuggingFaceLoop(model, batch, device, layout=chosen.layout), "transformers")
