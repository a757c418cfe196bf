"""JSON that nobody vouches for: a key given twice, and nesting without end, are errors like any other.

Python's own parser takes the last of two equal keys, while other readers of the same file take the first.
"""

from __future__ import annotations

import json
import reprlib
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8.

    Numbers are as Python reads them: whole ones of up to 4,300 digits, and NaN. Who computes with them checks them.

    Raises:
        ValueError: in one line; it is no JSON, names a key twice, or is nested deeper than Python can follow.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {reprlib.repr(key)} occurs twice")
        result[key] = value
    return result
