"""Merges the metrics of a step's updates, and measures throughput.

Throughput is measured in prompt and response tokens per second, in model FLOPs per second, and as the ratio of model
FLOPs per second to the devices' peak (MFU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp.batching.plan import Plan
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.mesh import Mesh
from slimefsdp.estimate.flops import training_flops
from slimefsdp.estimate.hardware import peak_tflops
from slimefsdp.model_spec import ModelSpec
from slimefsdp.models.decoder import DecoderModel, PolicyModel
from slimefsdp.models.lora import adapted_matrices


def mean_over_updates(updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns a step's metrics: the means of its updates' metrics, or maxima for names that end in `_max`."""
    merged: dict[str, list[float]] = {}
    for metrics in updates:
        for name, value in metrics.items():
            merged.setdefault(name, []).append(value)
    return {
        name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in merged.items()
    }


@dataclass(frozen=True, slots=True)
class Throughput:
    """Computes tokens and FLOPs per second of a group's steps.

    The FLOPs are those of one forward and backward pass over the samples of the updates, with shared prefixes once.
    Recomputed activations, and log-probs computed before the updates, take time but are not counted.
    """

    ranks: int
    model_spec: ModelSpec | None  # None if the sizes are not known
    trained_share: float = 1.0  # trained weights / all weights
    adapter_parameters: int = 0  # parameters of adapters, which `trained_share` leaves out
    has_vocabulary_head: bool = True
    peak_tflops: float | None = None  # of one rank's device; None if it is not known

    def metrics(self, plan: Plan, batch: RolloutBatch, seconds: float, updates: Sequence[int]) -> dict[str, float]:
        """Returns the metrics of a step that took these updates of its plan in `seconds`."""
        tokens = sum(int(batch.lengths[plan.samples_of(update)].sum()) for update in updates)
        metrics = {
            "train_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_rank": tokens / seconds / self.ranks,
        }
        if self.model_spec is not None:
            flops = sum(self._flops(self.model_spec, plan, batch, update) for update in updates)
            metrics["tflops_per_rank"] = flops / seconds / self.ranks / 1e12
            if self.peak_tflops is not None:
                metrics["mfu"] = metrics["tflops_per_rank"] / self.peak_tflops
        return metrics

    def _flops(self, model_spec: ModelSpec, plan: Plan, batch: RolloutBatch, update: int) -> float:
        samples = plan.samples_of(update)
        depths = np.zeros(batch.num_samples, dtype=np.int64)  # tokens that each sample shares with the sample before
        if plan.shared is not None:
            of_packs, sizes = plan.packs_of(update)
            ordered, shared = plan.shared.among_each(of_packs, sizes.ravel())
            depths[ordered] = shared
        counted = 0
        if self.has_vocabulary_head:
            # the head skips shared response tokens, which another sample of the pack computes
            prompts = batch.lengths - batch.response_lengths
            counted = int(batch.trained_tokens(np.maximum(depths - prompts, 0))[samples].sum())
        return training_flops(
            model_spec,
            batch.lengths[samples] - depths[samples],
            counted_rows=counted,
            depths=depths[samples],
            trained_share=self.trained_share,
            adapter_parameters=self.adapter_parameters,
        ).total


def throughput_for(
    model: DecoderModel,
    model_spec: ModelSpec | None,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    stated_tflops: float | None,
) -> Throughput:
    """Returns the `Throughput` of a model.

    Args:
        model_spec: the model's sizes; None if they are not known.
        stated_tflops: peak rate of a rank's device. None means the vendor's figure, which is known only for half
            precision on some GPUs.
    """
    peak = stated_tflops
    if peak is None and mesh.device.type == "cuda" and compute_dtype.itemsize == 2:
        peak = peak_tflops(torch.cuda.get_device_name(mesh.device))
    weights = [parameter for _, parameter in model.named_weights()]
    adapters = sum(matrix.a.numel() + matrix.b.numel() for matrix in adapted_matrices(model) if not matrix.is_stack)
    trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
    return Throughput(
        ranks=dist.get_world_size(mesh.group),
        model_spec=model_spec,
        trained_share=trained / sum(parameter.numel() for parameter in weights),
        adapter_parameters=adapters,
        has_vocabulary_head=isinstance(model, PolicyModel),
        peak_tflops=peak,
    )
