"""Dynamic loss scaling: float16 gradients below 6e-8 vanish and above 65504 overflow, so the loss is multiplied first.

The scale is a power of two, so that taking it out of float32 gradients again is exact. It is halved after an update
whose gradients were not finite, and doubled after so many in a row that were. Both follow from a norm that all ranks
share, so the scale is the same everywhere without being communicated.
"""

from __future__ import annotations

GROWTH = 2.0
BACKOFF = 0.5
FLOOR = 1.0


class LossScale:
    """What the loss is multiplied by; constant between two calls of `adjust`, so that micro-batches add up.

    Args:
        init: the first scale, a power of two of at least 1.
        growth_interval: finite updates in a row after which the scale doubles.
    """

    def __init__(self, init: float, growth_interval: int) -> None:
        self.scale = float(init)
        self.finite_in_a_row = 0  # since the scale last changed
        self._growth_interval = growth_interval

    @property
    def is_at_floor(self) -> bool:
        """Whether a lower scale cannot help any more: what overflows now is not the scale's doing."""
        return self.scale <= FLOOR

    def adjust(self, *, is_finite: bool) -> None:
        """Follows one update, whose gradients were finite or not."""
        if not is_finite:
            self.scale = max(FLOOR, self.scale * BACKOFF)
            self.finite_in_a_row = 0
            return
        self.finite_in_a_row += 1
        if self.finite_in_a_row == self._growth_interval:
            self.scale *= GROWTH
            self.finite_in_a_row = 0
