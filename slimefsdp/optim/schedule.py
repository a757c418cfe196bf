"""The learning rate of an update, as a pure function of how many updates were taken."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate(
    update: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_updates: int,
    total_updates: int,
    min_ratio: float,
) -> float:
    """The rate of update number `update`, counted from 0.

    Warm-up rises linearly and reaches `peak` at its last update; the decay then runs from `peak` to `peak * min_ratio`
    at update total_updates - 1, and stays there.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - 1 - warmup_updates))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * shape)
