"""Floating-point operations of a model, counted from its dimensions alone: what an update needs, and what ours runs.

A multiply and an add are two. Norms, activations and softmaxes are left out: they are bound by memory, not by this.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from slimefsdp.model_spec import ModelSpec

# TFLOP/s of dense bfloat16 products with float32 sums, as the makers state them; the first name that fits counts
_PEAK_TFLOPS = {
    "A30": 165.0,
    "A40": 149.7,
    "A100": 312.0,
    "A800": 312.0,
    "L4": 121.0,
    "L40S": 362.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.2,
    "H20": 148.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H200": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
}


def peak_tflops(device_name: str) -> float | None:
    """The stated rate of a device by the name that its driver gives it, in half precision; None: not known here."""
    if "Laptop" in device_name:  # the desktop's name, and another chip
        return None
    return next((rate for name, rate in _PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name)), None)


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations by where they are spent."""

    layers: float  # products with the weights of decoder layers
    attention: float  # queries with keys, probabilities with values
    head: float  # the projection to the vocabulary

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head

    def over(self, parts: float) -> Flops:
        """One of so many equal parts."""
        return Flops(self.layers / parts, self.attention / parts, self.head / parts)


def forward_flops(
    model_spec: ModelSpec,
    lengths: np.ndarray,
    *,
    counted_rows: int,
    depths: np.ndarray | None = None,
    adapter_parameters: int = 0,
) -> Flops:
    """Of one forward pass.

    Args:
        lengths: tokens of every sample, in any shape; or of every node, where samples share what they begin with.
        counted_rows: tokens whose log-prob is asked for; the head projects no other. Of a critic 0.
        depths: tokens above every node in its samples, in the shape of lengths; None: nothing is shared.
        adapter_parameters: of adapters beside the layers' weights.
    """
    ends = lengths.astype(np.float64)
    starts = np.zeros_like(ends) if depths is None else depths.astype(np.float64)
    ends = ends + starts
    whole = _pairs(ends, None) - _pairs(starts, None)
    windowed = _pairs(ends, model_spec.window) - _pairs(starts, model_spec.window)
    whole_layers = model_spec.layers - model_spec.windowed_layers
    pairs = whole_layers * whole.sum() + model_spec.windowed_layers * windowed.sum()
    return Flops(
        layers=2.0
        * (model_spec.layers * _active_layer_parameters(model_spec) + adapter_parameters)
        * float(lengths.sum()),
        attention=4.0 * model_spec.heads * model_spec.head_dim * float(pairs),
        head=2.0 * model_spec.embedding_parameters * counted_rows,
    )


def training_flops(
    model_spec: ModelSpec,
    lengths: np.ndarray,
    *,
    counted_rows: int,
    depths: np.ndarray | None = None,
    trained_share: float = 1.0,
    adapter_parameters: int = 0,
) -> Flops:
    """Of one forward and backward pass, as model FLOPs utilisation (MFU) counts them: nothing is computed twice.

    The gradients of both factors of a product cost as much again as the product, each.

    Args:
        lengths, counted_rows, depths: as `forward_flops`.
        trained_share: of the weights; a frozen weight has no gradient, though what is below it may.
        adapter_parameters: of adapters, which are trained, too, and no part of the weights.
    """
    forward = forward_flops(model_spec, lengths, counted_rows=counted_rows, depths=depths)
    of_weights, of_adapters = 2 + trained_share, 6.0 * adapter_parameters * float(lengths.sum())
    return Flops(forward.layers * of_weights + of_adapters, forward.attention * 3, forward.head * of_weights)


def executed_flops(
    model_spec: ModelSpec,
    lengths: np.ndarray,
    *,
    counted_rows: int,
    depths: np.ndarray | None = None,
    trained_share: float = 1.0,
    adapter_parameters: int = 0,
    recomputed_layers: int = 0,
    recomputed_head: float = 0.0,
) -> Flops:
    """Of one forward and backward pass as it runs here, with all that is computed twice to save memory.

    Attention's backward multiplies queries with keys again, and the head's computes the logits that it did not keep.

    Args:
        lengths, counted_rows, depths, trained_share, adapter_parameters: as `training_flops`.
        recomputed_layers: decoder layers that activation checkpointing computes again, counted whole; torch leaves out
            the last product of those whose gradients do not read its result.
        recomputed_head: share of the head's projection that backward computes again
            (`slimefsdp.perf_model.activations.recomputed_head_share`).
    """
    once = forward_flops(
        model_spec, lengths, counted_rows=counted_rows, depths=depths, adapter_parameters=adapter_parameters
    )
    needed = training_flops(
        model_spec,
        lengths,
        counted_rows=counted_rows,
        depths=depths,
        trained_share=trained_share,
        adapter_parameters=adapter_parameters,
    )
    again = recomputed_layers / model_spec.layers
    return Flops(
        layers=needed.layers + again * once.layers,
        attention=needed.attention + (0.5 + again) * once.attention,
        head=needed.head + recomputed_head * once.head,
    )


def _active_layer_parameters(model_spec: ModelSpec) -> int:
    """Weights of a layer that one token meets."""
    router = model_spec.hidden * model_spec.experts if model_spec.experts > 1 else 0
    return model_spec.attention_parameters + model_spec.active_experts * model_spec.expert_parameters + router


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Pairs of a token and one that it attends to, itself included, in the first `lengths` tokens of a sequence."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return seen * (seen + 1) / 2 + (lengths - seen) * seen
