"""Cuts the head's [rows, vocab] logits into tiles of rows and words, and decides how many are held at once.

On CUDA a tile has all words, and is as large as launches and passes over the weight's gradient want it. On a CPU it
stays in the cache, where what is done to logits element by element costs a fraction; the logits of several tiles are
kept from forward to backward, as many as fit into the same bytes. No torch: what memory and time will be is known
without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceType = Literal["cpu", "cuda"]

# Everything of logits' size together. On CUDA each tile is another pass over the weight's float32 gradient: on an H200,
# 14,336 rows of Qwen3-4B's head take 419 ms in chunks of 128 MiB, 176 ms in chunks of 1 GiB
# (benchmarks/results/gpu_smoke.json). On a CPU it is logits that backward need not compute again: with 152,000 words a
# step that holds 512 MiB of them is a sixth faster than one that holds 128 MiB (docs/benchmarks.md).
CHUNK_BYTES: dict[DeviceType, int] = {"cpu": 512 * 2**20, "cuda": 2**30}

# On a CPU: the words of a tile, and its bytes, beside which a cache holds its exponentials and weights. With 152,000
# words such tiles take about two thirds of the time of those that have all words (benchmarks/head_memory.py).
TILE_WORDS = 1024
TILE_BYTES = 2 * 2**20

Bounds = tuple[tuple[int, int], ...]  # [start, end) of near-equal parts


@dataclass(frozen=True, slots=True)
class HeadTiles:
    """The tiles of some rows, in the order of forward: all rows of the first words, then all rows of the next."""

    words: Bounds
    rows: Bounds
    held: int  # tiles whose logits have memory of their own; the last ones of forward are there when backward begins

    @classmethod
    def of(cls, rows: int, vocab: int, itemsize: int, device: DeviceType, chunk_bytes: int | None = None) -> HeadTiles:
        """Returns the tiles of a head.

        Args:
            rows: rows of logits, any number.
            itemsize: bytes of a logit.
            chunk_bytes: bound on what is of logits' size together: held tiles, and the exponentials of one. A tile has
                at least two rows where there are two. None: that of CHUNK_BYTES.
        """
        bound = CHUNK_BYTES[device] if chunk_bytes is None else chunk_bytes
        words = _near_equal(vocab, 1 if device == "cuda" else -(-vocab // TILE_WORDS))
        most_words = max(end - start for start, end in words)
        tile_bytes = bound // 2 if device == "cuda" else min(bound // 2, TILE_BYTES)
        parts = row_bounds(rows, tile_bytes // (itemsize * most_words))
        most_rows = max((end - start for start, end in parts), default=1)
        held = bound // (itemsize * most_words * most_rows) - 1
        return cls(words, parts, max(1, min(held, len(words) * len(parts))))

    @property
    def elements(self) -> int:
        """Elements of the largest tile."""
        words, rows = (max((end - start for start, end in bounds), default=0) for bounds in (self.words, self.rows))
        return words * rows

    @property
    def recomputed_share(self) -> float:
        """The share of tiles whose logits backward computes again."""
        count = len(self.words) * len(self.rows)
        return 1 - self.held / count if count else 0.0


def row_bounds(rows: int, most: int) -> Bounds:
    """Returns [start, end) of near-equal parts of `rows`, of at most max(most, 3) each.

    None has one row unless `rows` is 1: a matrix product with one row takes another path than the same row among
    others, so a lone row would differ in its last bits from what it is under another split.
    """
    return _near_equal(rows, max(1, min(-(-rows // max(most, 1)), rows // 2))) if rows else ()


def _near_equal(total: int, parts: int) -> Bounds:
    return tuple((total * i // parts, total * (i + 1) // parts) for i in range(parts))
