"""Conditions of other processes, waited for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0
"""How long tests wait for what should come: for what never does, and much more than a busy machine takes."""


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while its file is read
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()
