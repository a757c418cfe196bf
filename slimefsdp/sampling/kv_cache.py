"""Stores keys and values for decoding, and computes the attention of one new token per row.

Both classes can be used as the attention of a pack (`slimefsdp.attention.call_plan.PackAttention`): the model calls
them with query, key and value of one layer after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slimefsdp.attention.call_plan import AttentionParams, PackAttention
from slimefsdp.errors import ModelError

KeysValues = tuple[torch.Tensor, torch.Tensor]
_GRAIN = 64  # a cache's capacity is a multiple of this many tokens


class PromptAttention:
    """Computes the attention of packed prompts, and keeps their keys and values.

    Args:
        attend: the attention of the pack.
    """

    def __init__(self, attend: PackAttention) -> None:
        self._attend = attend
        self.layers: list[KeysValues] = []  # [tokens, kv_heads, head_dim] each

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: AttentionParams,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        self.layers.append((k, v))
        return self._attend(q, k, v, scoring, sinks)


class RowCache:
    """Holds keys and values of up to `max_rows` rows, [rows, kv_heads, capacity, head_dim] per layer.

    Used rows come first. Memory grows with the number of rows and with the longest row, and shrinks when at most a
    quarter of the rows is used.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._layers: list[KeysValues] = []
        self._positions: list[int] = []  # number of tokens of each used row, which is the position of its next token
        # state of the step in progress
        self._layer = 0
        self._now = torch.empty(0, dtype=torch.int64)
        self._rows = torch.empty(0, dtype=torch.int64)
        self._hidden: dict[int | None, torch.Tensor] = {}

    @property
    def rows(self) -> int:
        return len(self._positions)

    @property
    def nbytes(self) -> int:
        """Returns the allocated bytes of all layers."""
        return sum(cached.nbytes for layer in self._layers for cached in layer)

    def append(self, prompt: Sequence[KeysValues], rows: int) -> None:
        """Adds rows that all start with the same prompt.

        Args:
            prompt: keys and values of every layer, [tokens, kv_heads, head_dim] each.
        """
        tokens, first = prompt[0][0].shape[0], self.rows
        self._make_room(prompt, first + rows, tokens + 1)
        for layer, prompt_layer in zip(self._layers, prompt, strict=True):
            for cached, new in zip(layer, prompt_layer, strict=True):
                cached[first : first + rows, :, :tokens] = new.transpose(0, 1)
        self._positions += [tokens] * rows

    def remove(self, rows: Sequence[int]) -> list[int]:
        """Removes rows and moves later rows into the gaps; returns the previous index of each remaining row."""
        gone = set(rows)
        kept = self.rows - len(gone)
        holes = sorted(row for row in gone if row < kept)
        movers = [row for row in range(kept, self.rows) if row not in gone]
        sources = list(range(kept))
        if holes:
            width = max(self._positions[row] for row in movers)
            for layer in self._layers:
                for cached in layer:
                    cached[holes, :, :width] = cached[movers, :, :width]
            for hole, mover in zip(holes, movers, strict=True):
                sources[hole] = mover
        self._positions = [self._positions[row] for row in sources]
        if not self._positions:
            self._layers = []
        elif 4 * kept <= self._layers[0][0].shape[0]:
            for index, (keys, values) in enumerate(self._layers):
                self._layers[index] = (keys[: 2 * kept].clone(), values[: 2 * kept].clone())
        return sources

    def begin_step(self) -> torch.Tensor:
        """Reserves memory for one more token in every used row; returns the positions of these tokens, int64 [rows]."""
        device = self._layers[0][0].device
        width = max(self._positions) + 1
        self._make_room(None, self.rows, width)
        self._layer, self._hidden = 0, {}
        self._now = torch.tensor(self._positions, device=device)
        self._rows = torch.arange(self.rows, device=device)
        self._positions = [position + 1 for position in self._positions]
        return self._now

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scoring: AttentionParams,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns the attention of one query per row to all keys of the row, including the new key."""
        keys, values = self._layers[self._layer]
        self._layer += 1
        keys[self._rows, :, self._now] = k
        values[self._rows, :, self._now] = v
        width = max(self._positions)
        keys, values = keys[: self.rows, :, :width], values[: self.rows, :, :width]
        queries = q.unflatten(1, (k.shape[1], -1))  # [rows, kv_heads, group, head_dim]
        hidden = self._hidden_keys(scoring.window, width)
        if scoring.softcap is None and sinks is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=hidden.to(q.dtype), scale=scoring.scale
            )
            return out.flatten(1, 2)
        scores = queries @ keys.transpose(-1, -2)
        wide = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(wide) * scoring.scale
        if scoring.softcap is not None:
            scores = scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
        scores = scores + hidden
        if sinks is not None:  # a sink acts like a key whose value is zero
            sink = sinks.to(wide).unflatten(0, (k.shape[1], -1))[None, :, :, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        probabilities = scores.softmax(-1)[..., :width].to(values.dtype)
        return (probabilities @ values).flatten(1, 2)

    def _hidden_keys(self, window: int | None, width: int) -> torch.Tensor:
        """Returns the mask to add to scores, float32 [rows, 1, 1, width]: -inf at keys that the query must not see."""
        if window not in self._hidden:
            distance = self._now[:, None] - torch.arange(width, device=self._now.device)
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            added = torch.zeros(is_hidden.shape, device=self._now.device).masked_fill_(is_hidden, float("-inf"))
            self._hidden[window] = added[:, None, None]
        return self._hidden[window]

    def _make_room(self, like: Sequence[KeysValues] | None, rows: int, tokens: int) -> None:
        """Allocates memory for this many rows and tokens; keeps existing entries.

        Args:
            like: keys and values of every layer, whose shapes and dtypes are used if there are no rows yet.
        """
        assert rows <= self._max_rows, f"{rows} rows of {self._max_rows}"
        held_rows, _, held_tokens, _ = self._layers[0][0].shape if self._layers else (0, 0, 0, 0)
        if rows <= held_rows and tokens <= held_tokens:
            return
        new_rows = held_rows if rows <= held_rows else min(self._max_rows, max(rows, 2 * held_rows))
        new_tokens = held_tokens
        if tokens > held_tokens:
            new_tokens = -(-max(tokens, held_tokens + held_tokens // 2) // _GRAIN) * _GRAIN
        self._layers = self._layers or list(like or ())
        for index, layer in enumerate(self._layers):  # one by one, so that only one layer at a time exists twice
            # Dim 1 is the heads, both in a prompt's tensors and in the cache. New memory is filled with zeros, because
            # masked values are still multiplied, and uninitialised values may not be finite.
            keys, values = (
                cached.new_zeros(new_rows, cached.shape[1], new_tokens, cached.shape[-1]) for cached in layer
            )
            if held_rows:
                keys[:held_rows, :, :held_tokens], values[:held_rows, :, :held_tokens] = layer
            self._layers[index] = (keys, values)


def require_layers(found: Sequence[KeysValues], expected: int, model: str) -> None:
    """Checks that every layer called the attention; a layer that did not keeps a state other than keys and values.

    Raises:
        ModelError: some layers did not.
    """
    if len(found) != expected:
        raise ModelError(
            f"{len(found)} of {expected} layers of {model} attend to keys and values; the others keep another state, "
            "which cannot be repeated for the samples of a prompt",
            field="model",
            hint="sample this model with a rollout server instead of the embedded engine",
        )
