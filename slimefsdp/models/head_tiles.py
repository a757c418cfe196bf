"""Cuts the head's [rows, vocab] logits into tiles of rows and words, and decides how many tiles are kept.

Words are the entries of the vocabulary. On CUDA a tile has all words, and is large, to save kernel launches and passes
over the weight's gradient. On a CPU a tile fits the cache, which makes elementwise operations several times faster; the
logits of as many tiles as fit in the memory bound are kept from forward to backward. This module does not import torch,
so that `plan` can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceType = Literal["cpu", "cuda"]

# Bound on all buffers for logits together. On CUDA each tile is another pass over the weight's float32 gradient: on an
# H200, 14,336 rows of Qwen3-4B's head take 419 ms in chunks of 128 MiB, and 176 ms in chunks of 1 GiB
# (benchmarks/results/gpu_smoke.json). On a CPU more memory means fewer logits to recompute in backward: with 152,000
# words a step with 512 MiB is a sixth faster than one with 128 MiB (docs/benchmarks.md).
CHUNK_BYTES: dict[DeviceType, int] = {"cpu": 512 * 2**20, "cuda": 2**30}

# Words and bytes of a tile on a CPU; the cache also has to hold the tile's exponentials and weights. With 152,000 words
# such tiles take about two thirds of the time of tiles of all words (benchmarks/head_memory.py).
TILE_WORDS = 1024
TILE_BYTES = 2 * 2**20

Bounds = tuple[tuple[int, int], ...]  # [start, end) of near-equal parts


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """Holds the tiles' ranges of words and rows. Forward takes one range of words after another, each for all rows."""

    words: Bounds
    rows: Bounds
    held: int  # number of tiles, the last ones of forward, whose logits are kept for backward
    elements: int  # of the largest tile

    @classmethod
    def of(cls, rows: int, vocab: int, itemsize: int, device: DeviceType, chunk_bytes: int | None = None) -> HeadTiles:
        """Returns the tiles of a head.

        Args:
            rows: number of rows of logits.
            itemsize: bytes of a logit.
            chunk_bytes: bound on the memory for logits: the kept tiles, and the exponentials of one tile. Nevertheless
                a tile has at least two rows if `rows` > 1. None means CHUNK_BYTES.
        """
        bound = CHUNK_BYTES[device] if chunk_bytes is None else chunk_bytes
        words = _near_equal(vocab, 1 if device == "cuda" else -(-vocab // TILE_WORDS))
        most_words = max(end - start for start, end in words)
        tile_bytes = bound // 2 if device == "cuda" else min(bound // 2, TILE_BYTES)
        parts = row_bounds(rows, tile_bytes // (itemsize * most_words))
        most_rows = max((end - start for start, end in parts), default=1)
        held = bound // (itemsize * most_words * most_rows) - 1
        elements = most_words * most_rows if parts else 0
        return cls(words, parts, max(1, min(held, len(words) * len(parts))), elements)

    @property
    def recomputed_share(self) -> float:
        """Returns the share of tiles whose logits backward computes again."""
        count = len(self.words) * len(self.rows)
        return 1 - self.held / count if count else 0.0


def row_bounds(rows: int, most: int) -> Bounds:
    """Cuts `rows` rows into near-equal parts of at most max(most, 3) rows; returns [start, end) of each.

    No part has a single row unless `rows` is 1: a matrix product rounds a single row differently than the same row
    among others, so the bits would depend on the split.
    """
    return _near_equal(rows, max(1, min(-(-rows // max(most, 1)), rows // 2))) if rows else ()


def _near_equal(total: int, parts: int) -> Bounds:
    return tuple((total * i // parts, total * (i + 1) // parts) for i in range(parts))
