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


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries are inside each other on more than so many levels."""
    level = [value]
    for _ in range(levels):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return False
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {reprlib.repr(key)} occurs twice")
        result[key] = value
    return result
