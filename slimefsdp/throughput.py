"""How fast a phase was: trained tokens and model FLOPs a second, and the share of the devices' rate that they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slimefsdp.data.dimensions import ModelDimensions
from slimefsdp.data.flops import training_flops
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch


@dataclass(frozen=True, slots=True)
class Throughput:
    """What a group's seconds are measured by.

    Counted is what the updates need: one forward and backward pass over their samples, what these share once. What is
    computed again to save memory, and log-probs computed before the updates, take time and are not counted.
    """

    ranks: int
    dimensions: ModelDimensions | None  # None: they are not known
    trained_share: float = 1.0  # of the weights
    has_vocabulary_head: bool = True
    peak_tflops: float | None = None  # of one rank's device; None: not known

    def metrics(self, plan: Plan, batch: RolloutBatch, seconds: float, updates: Sequence[int]) -> dict[str, float]:
        """Of a phase that took these updates of its plan in `seconds`."""
        tokens = sum(int(batch.lengths[plan.samples_of(update)].sum()) for update in updates)
        metrics = {
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_rank": tokens / seconds / self.ranks,
        }
        if self.dimensions is not None:
            flops = sum(self._flops(self.dimensions, plan, batch, update) for update in updates)
            metrics["tflops_per_rank"] = flops / seconds / self.ranks / 1e12
            if self.peak_tflops is not None:
                metrics["mfu"] = metrics["tflops_per_rank"] / self.peak_tflops
        return metrics

    def _flops(self, dimensions: ModelDimensions, plan: Plan, batch: RolloutBatch, update: int) -> float:
        """Of one update of the plan, by all ranks together."""
        samples = plan.samples_of(update)
        depths = np.zeros(batch.num_samples, dtype=np.int64)  # tokens that a sample of a pack has from the one before
        if plan.shared is not None:
            for pack in (pack for packs in plan.updates[update] for pack in packs if len(pack)):
                ordered, shared = plan.shared.among(pack)
                depths[ordered] = shared
        counted = 0
        if self.has_vocabulary_head:
            in_update = np.zeros(batch.num_samples, dtype=bool)
            in_update[samples] = True
            first = batch.lengths - batch.response_lengths - batch.response_offsets[:-1]
            positions = np.arange(batch.num_response_tokens) + first[batch.sample_ids]
            own = in_update[batch.sample_ids] & (positions >= depths[batch.sample_ids])
            counted = int((batch.mask & own).sum())
        return training_flops(
            dimensions,
            batch.lengths[samples] - depths[samples],
            counted_rows=counted,
            depths=depths[samples],
            trained_share=self.trained_share,
        ).total
