"""How often lost processes may start again: what counts as a loss, and when another start is of no use."""

from __future__ import annotations

import sys

from slimefsdp.errors import (
    PeerFailed,
    SlimeError,
    WorkerDied,
    WorkerHung,
)

LOST = (WorkerDied, WorkerHung, PeerFailed)
"""Errors after which processes are of no more use, and new ones may succeed."""
MAX_WITHOUT_PROGRESS = 3  # a fault that comes back each time is none that a restart helps against


class Restarts:
    """The restarts of one kind of processes.

    Args:
        most: of all, as in cluster.max_restarts.
        kind: what is lost, in what is printed.
    """

    def __init__(self, most: int, kind: str) -> None:
        self._most = most
        self._kind = kind
        self._spent = 0
        self._in_a_row = 0

    def spend(self, error: SlimeError) -> None:
        """Takes one restart after a loss; raises the error, with why, where there is none left."""
        self._spent += 1
        self._in_a_row += 1
        if self._spent > self._most:
            why = f"cluster.max_restarts={self._most} are spent" if self._most else "cluster.max_restarts is 0"
        elif self._in_a_row > MAX_WITHOUT_PROGRESS:
            why = f"{MAX_WITHOUT_PROGRESS} restarts in a row changed nothing"
        else:
            print(f"{self._kind} were lost, others start: {error}", file=sys.stderr, flush=True)
            return
        error.hint = f"{error.hint}; {why}" if error.hint else why
        raise error

    def progress(self) -> None:
        """A call came to its end."""
        self._in_a_row = 0
