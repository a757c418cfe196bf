"""Estimates the cost of a sample. Packs, ranks and context-parallel layouts are all balanced by this estimate.

The unit is the forward pass of one token through all weight matrices. Costs add up: tokens a to b of a sequence cost
cost(b) - cost(a), because a token attends to all tokens before it (or to those in its window). The backward pass takes
about the same multiple of every part, so the estimate leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slimefsdp.model_spec import ModelSpec

Strategy = Literal["ring", "ulysses", "all_gather"]
STRATEGIES: tuple[Strategy, ...] = ("ring", "ulysses", "all_gather")

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# FLOPs that a device does while it sends a byte: 400 TFLOP/s in bfloat16 against 400 GB/s inside a node. A byte costs
# more between nodes and less on CPUs. Only the choice of the sequences that a layout cuts depends on this number.
FLOPS_PER_BYTE = 1000.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimates the time of a sample of n tokens: linear * n + quadratic * n^2, with n^2 limited by a sliding window.

    A forward pass through a transformer layer of hidden size h takes about 24 h^2 n FLOPs in its matrices (12 h^2
    weights) and 4 h n^2 in the two attention products, half of which the causal mask saves. So quadratic / linear is
    1 / (12 h). The default is h = 2048, a model of 1 to 2 billion parameters, with 8 KV heads of 128.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 2048)
    windowed: float = 0.0  # like `quadratic`, for the layers in which a token attends to at most `window` tokens
    window: int = 0
    comm: float = 0.054  # cost of sending a token's K and V, and receiving their gradients, for each further cp rank
    splits_heads: bool = False  # cp ranks share attention evenly, whichever owns the tokens (Ulysses)

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the cost of samples of these lengths, float64 in the shape of `lengths`."""
        tokens = lengths.astype(np.float64)
        work = tokens * (self.linear + self.quadratic * tokens)
        if self.windowed:
            span = np.minimum(tokens, self.window)
            work += self.windowed * span * (2 * tokens - span)  # twice the number of pairs, like n^2 above
        return work

    def cost_after_split(self, lengths: np.ndarray, *, cp: int, is_cut: np.ndarray) -> np.ndarray:
        """Returns the estimated time of samples on `cp` ranks that share their work evenly, float64.

        Args:
            lengths: tokens of each sample or prefix.
            is_cut: bool in the shape of `lengths`, True where the keys and values of a sample are sent between ranks.
        """
        sent = np.where(is_cut, self.comm * (cp - 1), 0.0) * lengths
        return (self.cost(lengths) + sent) / cp

    def of_owner(self) -> CostModel:
        """Returns a cost model of the work that only the rank that owns a token does."""
        return CostModel(linear=self.linear, quadratic=0.0, comm=0.0) if self.splits_heads else self

    @classmethod
    def of_model(
        cls,
        model_spec: ModelSpec,
        *,
        strategy: Strategy = "ring",
        bytes_per_element: int = 2,
        flops_per_byte: float = FLOPS_PER_BYTE,
        attention_slowdown: float = 1.0,
    ) -> CostModel:
        """Returns the cost model of a transformer, with the head and all other matrices that a token passes through.

        Args:
            strategy: how cp ranks exchange keys and values.
            bytes_per_element: bytes of an element of the keys and values sent between ranks. An element of their
                gradients takes 4 bytes, or 8 with float64.
            flops_per_byte: FLOPs that a device does in the time in which it sends a byte to another cp rank.
            attention_slowdown: FLOPs that a device does in matrix products in the time of one FLOP in attention.
        """
        per_layer = model_spec.attention_parameters + model_spec.active_experts * model_spec.expert_parameters
        per_token = 2.0 * (model_spec.layers * per_layer + model_spec.embedding_parameters)  # FLOPs forward
        per_pair = 2.0 * model_spec.heads * model_spec.head_dim / per_token * attention_slowdown  # 4 FLOPs a pair
        keys_and_values = 2 * model_spec.kv_heads * model_spec.head_dim * model_spec.layers
        gradient_bytes = max(4, bytes_per_element)
        # ring sends keys and values again in backward, all_gather keeps them. Backward costs two forward passes, so the
        # bytes that a step sends are divided by the FLOPs of three forward passes
        sent = {
            "ring": 2 * bytes_per_element + gradient_bytes,
            "all_gather": bytes_per_element + gradient_bytes,
            "ulysses": 0,  # every token is sent whatever the layout, so this cost decides nothing
        }[strategy]
        return cls(
            quadratic=per_pair * (model_spec.layers - model_spec.windowed_layers),
            windowed=per_pair * model_spec.windowed_layers,
            window=model_spec.window,
            comm=keys_and_values * sent * flops_per_byte / (3 * per_token),
            splits_heads=strategy == "ulysses",
        )


DEFAULT_COST_MODEL = CostModel()
