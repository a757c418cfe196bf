"""So many bytes, in words."""

from __future__ import annotations

import math


def byte_text(number: int, *, round_up: bool = False) -> str:
    """So many bytes with one decimal, in the decimal unit that fits; `round_up` where less would not do."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if number >= 1000**power:
            tenths = 10 * number / 1000**power
            return f"{(math.ceil(tenths) if round_up else round(tenths)) / 10:,.1f} {unit}"
    return f"{number} B"
