"""Counts the floating-point operations of a model: those that an update needs, and those that it executes.

A multiply and an add are two operations. Norms, activations and softmaxes are not counted, as memory bounds their time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slimefsdp.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Flops:
    layers: float  # matrix products with the weights of decoder layers
    attention: float  # queries with keys, probabilities with values
    head: float  # the projection to the vocabulary

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head

    def over(self, parts: float) -> Flops:
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
        lengths: tokens of every sample, in any shape; if samples share prefixes, tokens of every node of the prefix
            tree.
        counted_rows: rows of the head, which are the tokens whose log-probs are computed; 0 for a critic.
        depths: number of tokens that precede each node in its samples, in the shape of `lengths`; None means that
            samples share nothing.
        adapter_parameters: parameters of adapters, in addition to the layers' weights.
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

    Recomputation is not counted. The gradient of each factor of a product costs as much as the product.

    Args:
        lengths, counted_rows, depths, adapter_parameters: see `forward_flops`.
        trained_share: trained weights / all weights. A product with a frozen weight still computes the gradient of its
            input.
    """
    forward = forward_flops(model_spec, lengths, counted_rows=counted_rows, depths=depths)
    of_weights, of_adapters = 2 + trained_share, 6.0 * adapter_parameters * float(lengths.sum())
    return Flops(forward.layers * of_weights + of_adapters, forward.attention * 3, forward.head * of_weights)


def executed_flops(needed: Flops, forward: Flops, *, recomputed_layers: float = 0, recomputed_head: float = 0) -> Flops:
    """Returns the operations that a forward and backward pass executes, including recomputation.

    Attention's backward recomputes the products of queries and keys. The head's backward recomputes logits that are not
    kept.

    Args:
        needed: the result of `training_flops`.
        forward: the result of `forward_flops`, including adapters.
        recomputed_layers: share of the decoder layers that are recomputed as a whole.
        recomputed_head: share of the head's logits that backward recomputes.
    """
    return Flops(
        layers=needed.layers + recomputed_layers * forward.layers,
        attention=needed.attention + (0.5 + recomputed_layers) * forward.attention,
        head=needed.head + recomputed_head * forward.head,
    )


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Returns the number of (query, key) pairs within the first `lengths` tokens of causal sequences."""
    span = lengths if window is None else np.minimum(lengths, window)
    return span * (span + 1) / 2 + (lengths - span) * span
