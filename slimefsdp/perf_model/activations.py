"""What decoder layers and the head keep from forward to backward, and what their backward needs beside it, in bytes.

Counted operation by operation for layers as transformers writes them: norms in float32, a gated MLP, rotary positions.
Mixtures of experts and layers without a gate are counted alike, which is rough for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slimefsdp.model_spec import Adapters, ModelSpec
from slimefsdp.models.head_tiles import HeadTiles

Recompute = Literal["none", "full", "selective"]


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of one token in one decoder layer, and of what a layer keeps whatever its tokens are."""

    norms: int  # what both norms before the products keep, and those behind them where there are any
    attention: int  # from queries, keys and values to the output
    mlp: int
    adapters: int  # what is kept for A and B
    products: int  # what selective recomputation keeps: results of matrix products, attention's output
    stream: int  # the hidden state between layers
    is_stream_kept: bool  # by the first norm; in half precision it keeps a widened copy instead
    mlp_backward: int  # beside what is kept, where gradients of gate and up are alive together
    attention_backward: int  # gradients of queries, keys and values, beside what attention keeps
    sums: int = 0  # of all tokens: stacks of experts with their adapters added
    sums_backward: int = 0  # of all tokens: a gradient of the largest, beside what is kept

    @property
    def kept(self) -> int:
        """Of a layer that is not recomputed."""
        return self.norms + self.attention + self.mlp + self.adapters

    @classmethod
    def of_model(
        cls, model_spec: ModelSpec, *, compute: int, wide: int, adapters: Adapters | None = None
    ) -> LayerActivations:
        """Of the layers of a model.

        Args:
            compute, wide: bytes of an element of activations, and of what norms and softmaxes widen it to.
            adapters: are trained alone. A frozen norm or product keeps nothing for its weight, and what adapters keep
                and add is that of the mean layer.
        """
        hidden = model_spec.hidden
        queries, keys = model_spec.heads * model_spec.head_dim, model_spec.kv_heads * model_spec.head_dim
        # a norm keeps its widened input, the normed one before its weight, and what the products read
        for_weight = compute if adapters is None else 0
        norms = model_spec.norms_per_layer * hidden * (wide + for_weight) + 2 * hidden * for_weight
        of_rotated = wide + compute + for_weight if model_spec.has_head_norms else compute
        attention = (queries + keys) * of_rotated + (keys + queries) * compute + model_spec.heads * wide
        per_token = model_spec.active_experts
        rows = model_spec.intermediate * compute * per_token
        routed = 3 * hidden * compute * per_token if model_spec.experts > 1 else 0
        product = rows if adapters is None else 0  # that the last matrix reads
        of_adapters = added = sums = sums_backward = 0
        if adapters is not None:
            layers = model_spec.layers
            of_adapters = (adapters.inputs + adapters.inner) * compute // layers
            added = (adapters.outputs + adapters.inner) * compute // layers
            sums, sums_backward = adapters.summed * compute // layers, adapters.largest_sum * compute
        return cls(
            norms=norms,
            attention=attention,
            mlp=model_spec.mlp_matrices * rows + product + routed,
            adapters=of_adapters,
            products=(2 * queries + 2 * keys + 2 * hidden) * compute
            + (model_spec.mlp_matrices - 1) * rows
            + routed
            + added,
            stream=hidden * compute,
            is_stream_kept=compute == wide,
            mlp_backward=2 * rows + hidden * compute,
            attention_backward=(2 * queries + 2 * keys + hidden) * compute,
            sums=sums,
            sums_backward=sums_backward,
        )


@dataclass(frozen=True, slots=True)
class HeadActivations:
    """Bytes of the head on one micro-batch, from the final norm to log-probs."""

    kept: int  # from forward to backward
    forward: int  # logits of the tiles that are held, and exponentials of one
    backward: int  # these logits, gradients of the hidden rows and in float32 of the weight

    @classmethod
    def of_model(
        cls,
        model_spec: ModelSpec,
        *,
        compute: int,
        wide: int,
        tokens: int,
        rows: int,
        entropy_grad: bool = False,
        full_kl: bool = False,
        is_frozen: bool = False,
        on_cpu: bool = False,
    ) -> HeadActivations:
        """Of a policy.

        Args:
            tokens: of the micro-batch on one rank. rows: those whose log-probs are asked for; 0 of a critic.
            entropy_grad, full_kl: whether the loss differentiates entropies, or the KL over the whole vocabulary.
            is_frozen: final norm and head keep nothing for their weights, which have no gradient.
        """
        hidden, vocab = model_spec.hidden, model_spec.vocab
        of_norm = tokens * hidden * (wide if is_frozen else wide + compute)
        if not rows:
            return cls(kept=of_norm, forward=0, backward=0)
        tiles = HeadTiles.of(rows, vocab, wide, "cpu" if on_cpu else "cuda")
        tile = tiles.elements * wide
        # on a CPU products need the words of a half-precision weight widened, and add to gradients of that width
        is_half = compute != wide
        words = max(end - start for start, end in tiles.words)
        widened = words * hidden * wide if is_half and on_cpu else 0
        is_summed = len(tiles.words) > 1 or (is_half and on_cpu)
        # on CUDA products take a tile's gradient in half precision; at the end there is the weight's, in both dtypes
        rounded_tile = tile * compute // wide if is_half and not on_cpu else 0
        rounded_weight = vocab * hidden * compute if is_half else 0
        return cls(
            kept=of_norm + rows * hidden * compute * (2 if full_kl else 1),
            forward=(tiles.held + 1 + full_kl) * tile + widened * (1 + full_kl),
            backward=tile * (tiles.held + (entropy_grad or full_kl) + full_kl)
            + widened * (1 + full_kl)
            + rows * hidden * (wide if is_summed else compute)
            + (rows * hidden * compute if is_summed and is_half else 0)
            + (rounded_tile if is_frozen else vocab * hidden * wide + max(rounded_tile, rounded_weight)),
        )


def recomputed_head_share(model_spec: ModelSpec, *, wide: int, rows: int, on_cpu: bool) -> float:
    """Of the head's projection, what backward computes again: all tiles but those whose logits are kept.

    With a final logit soft-cap none are; dimensions do not tell, and this leaves it out.

    Args:
        wide, rows, on_cpu: as `HeadActivations.of_model`.
    """
    return HeadTiles.of(rows, model_spec.vocab, wide, "cpu" if on_cpu else "cuda").recomputed_share


def is_recomputed(index: int, recompute: Recompute, every: int) -> bool:
    """Whether a layer's activations are computed again in backward: those of the first of every so many."""
    return recompute != "none" and index % every == 0


def kept_between(layer: LayerActivations, layers: int, tokens: int, recompute: Recompute, every: int) -> int:
    """Bytes that the first so many layers keep between their forward and their backward."""
    recomputed = sum(is_recomputed(index, recompute, every) for index in range(layers))
    left = layer.stream + (layer.products if recompute == "selective" else 0)
    return tokens * recomputed * left + (layers - recomputed) * (tokens * layer.kept + layer.sums)
