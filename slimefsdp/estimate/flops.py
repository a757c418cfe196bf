"""Floating-point operations of a model, counted from its dimensions: what an update needs, and what is executed here.

A multiply and an add are two operations. Norms, activations and softmaxes are left out: memory bounds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slimefsdp.model_spec import ModelSpec


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
        """Returns one of so many equal parts."""
        return Flops(self.layers / parts, self.attention / parts, self.head / parts)


def forward_flops(
    model_spec: ModelSpec,
    lengths: np.ndarray,
    *,
    counted_rows: int,
    depths: np.ndarray | None = None,
    adapter_parameters: int = 0,
) -> Flops:
    """Returns the operations of one forward pass.

    Args:
        lengths: tokens of every sample, in any shape; or of every node, where samples share prefixes.
        counted_rows: tokens whose log-prob is asked for; the head projects no other. 0 for a critic.
        depths: tokens that precede every node in its samples, in the shape of lengths; None: nothing is shared.
        adapter_parameters: parameters of adapters, on top of the layers' weights.
    """
    starts = np.zeros(lengths.shape) if depths is None else depths.astype(np.float64)
    ends = lengths.astype(np.float64) + starts
    whole = _pairs(ends, None) - _pairs(starts, None)
    windowed = _pairs(ends, model_spec.window) - _pairs(starts, model_spec.window)
    whole_layers = model_spec.layers - model_spec.windowed_layers
    pairs = whole_layers * whole.sum() + model_spec.windowed_layers * windowed.sum()
    router = model_spec.hidden * model_spec.experts if model_spec.experts > 1 else 0
    of_layer = model_spec.attention_parameters + model_spec.active_experts * model_spec.expert_parameters + router
    return Flops(
        layers=2.0 * (model_spec.layers * of_layer + adapter_parameters) * float(lengths.sum()),
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
    """Returns the operations that one forward and backward pass needs, as model FLOPs utilisation (MFU) counts them.

    Nothing is counted twice. The gradients of both factors of a product cost as much again as the product, each.

    Args:
        lengths, counted_rows, depths, adapter_parameters: as for `forward_flops`.
        trained_share: share of the weights that is trained. A frozen weight has no gradient, but what precedes it may.
    """
    forward = forward_flops(model_spec, lengths, counted_rows=counted_rows, depths=depths)
    of_weights, of_adapters = 2 + trained_share, 6.0 * adapter_parameters * float(lengths.sum())
    return Flops(forward.layers * of_weights + of_adapters, forward.attention * 3, forward.head * of_weights)


def executed_flops(needed: Flops, forward: Flops, *, recomputed_layers: float = 0, recomputed_head: float = 0) -> Flops:
    """Returns the operations of a forward and backward pass as it runs here, with all that is computed twice.

    Attention's backward multiplies queries with keys again, and the head's computes the logits that were not kept.

    Args:
        needed: of `training_flops`.
        forward: of `forward_flops` with its adapters.
        recomputed_layers: share of the decoder layers that activation checkpointing computes again, counted whole.
        recomputed_head: share of the head's projection that backward computes again.
    """
    return Flops(
        layers=needed.layers + recomputed_layers * forward.layers,
        attention=needed.attention + (0.5 + recomputed_layers) * forward.attention,
        head=needed.head + recomputed_head * forward.head,
    )


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Returns pairs of a token and one that it attends to, itself included, in the first `lengths` tokens."""
    seen = lengths if window is None else np.minimum(lengths, window)
    return seen * (seen + 1) / 2 + (lengths - seen) * seen
