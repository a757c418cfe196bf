"""What a sample is estimated to cost: the one idea of work that packs, ranks and layouts are balanced by.

Units cancel: 1 is the forward pass of one token through all matrices. Work adds up: a run of tokens from a to b of a
sequence costs cost(b) - cost(a), because a token's attention reaches back to the sequence's start (or a window's).
Backward takes the same multiple of everything, near enough, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slimefsdp.model_spec import ModelSpec

Strategy = Literal["ring", "ulysses", "all_gather"]
STRATEGIES: tuple[Strategy, ...] = ("ring", "ulysses", "all_gather")

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

# FLOPs that a device does while it sends a byte: 400 TFLOP/s in bfloat16 against 400 GB/s inside a node. Between nodes
# a byte costs more and on CPUs less; what depends on it is only which sequences of a pack are cut.
FLOPS_PER_BYTE = 1000.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Estimates the time of a sample of n tokens: linear * n + quadratic * n^2, with n^2 limited by a sliding window.

    A forward pass through a transformer layer of hidden size h takes about 24 h^2 n FLOPs in its matrices (12 h^2
    weights) and 4 h n^2 in the two attention products, half of which the causal mask saves: quadratic / linear is
    1 / (12 h). The default is h = 2048, a model of 1 to 2 billion parameters, with 8 KV heads of 128.
    """

    linear: float = 1.0
    quadratic: float = 1 / (12 * 2048)
    windowed: float = 0.0  # as quadratic, of the layers in which a token sees `window` tokens only
    window: int = 0
    comm: float = 0.054  # sending what attention needs of one token (K, V, their gradients) to one more cp rank
    splits_heads: bool = False  # Ulysses: attention is even over the cp ranks, independent of the owners of tokens

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the costs, float64, in the shape of lengths."""
        tokens = lengths.astype(np.float64)
        work = tokens * (self.linear + self.quadratic * tokens)
        if self.windowed:
            seen = np.minimum(tokens, self.window)
            work += self.windowed * seen * (2 * tokens - seen)  # twice the pairs, as n^2 is
        return work

    def cost_after_split(self, lengths: np.ndarray, *, cp: int, is_cut: np.ndarray) -> np.ndarray:
        """Returns the estimated time of samples, or of prefixes, on cp ranks that share their work evenly.

        Args:
            lengths: tokens, from the beginning of each sample.
            is_cut: bool, of each sample whether its tokens travel.

        Returns:
            float64 in the shape of lengths.
        """
        sent = np.where(is_cut, self.comm * (cp - 1), 0.0) * lengths
        return (self.cost(lengths) + sent) / cp

    def of_owner(self) -> CostModel:
        """Returns the part of the work that falls to the rank that owns a token."""
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
        """Returns the costs of a model's tokens: all matrices that a token runs through, the head included.

        Args:
            strategy: how cp ranks exchange keys and values.
            bytes_per_element: of keys and values sent between ranks; their gradients take 4, or 8 with float64.
            flops_per_byte: FLOPs that a device does in the time that it sends a byte to another cp rank.
            attention_slowdown: FLOPs that it does in matrices in the time of one in attention.
        """
        per_layer = model_spec.attention_parameters + model_spec.active_experts * model_spec.expert_parameters
        per_token = 2.0 * (model_spec.layers * per_layer + model_spec.embedding_parameters)  # FLOPs forward
        of_pairs = 2.0 * model_spec.heads * model_spec.head_dim / per_token * attention_slowdown  # 4 FLOPs a pair
        keys_and_values = 2 * model_spec.kv_heads * model_spec.head_dim * model_spec.layers
        gradient_bytes = max(4, bytes_per_element)
        # ring sends keys and values again in backward, all_gather keeps them; a step computes three forwards' worth
        sent = {
            "ring": 2 * bytes_per_element + gradient_bytes,
            "all_gather": bytes_per_element + gradient_bytes,
            "ulysses": 0,  # every token travels, however the pack is laid out
        }[strategy]
        return cls(
            quadratic=of_pairs * (model_spec.layers - model_spec.windowed_layers),
            windowed=of_pairs * model_spec.windowed_layers,
            window=model_spec.window,
            comm=keys_and_values * sent * flops_per_byte / (3 * per_token),
            splits_heads=strategy == "ulysses",
        )


DEFAULT_COST_MODEL = CostModel()
