"""What slime's FSDP backend did in a step, written from its semantics: packs, full float32 logits, two softmaxes.

Old log-probs are recomputed by a forward pass of their own; log-probs come from a log-softmax over all tokens of a
pack, entropies from a softmax beside it, with a graph though their coefficient is 0. Attention in a
pack is what transformers makes of it without the flash-attn package, a mask over the whole pack; with `--attention
by_sequence` it is given what it did not have, one causal call for each sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

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


def attention_by_sequence(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, *, lengths: Sequence[int], **_: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of a pack, one call a sequence."""
    parts = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        for part in zip(*(x.split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register("by_sequence", attention_by_sequence)


class SlimeSemantics:
    """The step."""

    def __init__(self, model: Path, batch: Path, device: torch.device, *, attention: str) -> None:
        self.by_sequence = attention == "by_sequence"
        implementation = "by_sequence" if self.by_sequence else "sdpa"
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=implementation
        )
        self.model.to(device).train()
        self.parameters = self.model.num_parameters()
        self.samples = read_samples(batch, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        self.micro_batches = pack_sizes(self.samples, 512, 1024, 8192)

    def step(self, micro_batch: int) -> tuple[float, float]:
        """One update in packs of so many tokens."""
        packs = fill_packs(self.samples, micro_batch)
        trained = sum(sample.response_length for sample in self.samples)
        with torch.no_grad():
            old = [self._outputs(samples)[0] for samples in packs]
        total = 0.0
        for samples, before in zip(packs, old, strict=True):
            log_probs, entropy = self._outputs(samples)
            advantages = torch.cat(
                [log_probs.new_full((sample.response_length,), sample.advantage) for sample in samples]
            )
            loss = clipped_loss(log_probs, before, advantages, trained) - 0.0 * entropy.sum() / trained
            loss.backward()
            total += loss.item()
        return total, take_update(self.model, self.optimizer)

    def _outputs(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the response tokens."""
        lengths = [sample.length for sample in samples]
        tokens = torch.cat([sample.tokens for sample in samples])[None]
        positions = torch.cat([torch.arange(length, device=tokens.device) for length in lengths])[None]
        how = {"lengths": lengths} if self.by_sequence else {}
        logits = self.model(input_ids=tokens, position_ids=positions, use_cache=False, **how).logits[0]
        every = torch.log_softmax(logits.float(), dim=-1)
        log_probs = every[:-1].gather(-1, tokens[0, 1:, None]).squeeze(-1)
        entropy = -(torch.softmax(logits.float(), dim=-1) * every).sum(-1)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows = torch.cat(
            [torch.arange(end - 1 - sample.response_length, end - 1) for end, sample in zip(ends, samples, strict=True)]
        ).to(tokens.device)
        return log_probs[rows], entropy[rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--attention", choices=["packed", "by_sequence"], default="packed")
    chosen, _ = parser.parse_known_args()
    serve(partial(SlimeSemantics, attention=chosen.attention), "transformers")
