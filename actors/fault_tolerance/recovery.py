"""Recovery of lost processes: the errors that count as a loss, the limit on replacements, and the report of a recovery.

A report is a line on the terminal and a line in the run's folder. It lists repeated calls with different results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from actors.fault_tolerance.call_log import LoggedCall
from actors.run_dir import RECOVERIES
from slimefsdp.errors import EngineError, PeerFailed, SlimeError, WorkerDied, WorkerHung
from slimefsdp.io.user_files import refuse_unless_plain

Started = TypeVar("Started")
LOST = (WorkerDied, WorkerHung, PeerFailed)
"""Errors after which processes cannot be used any more, but new processes may succeed."""
MAX_WITHOUT_PROGRESS = 3  # limit on restarts without a finished call in between, which do not cure the fault


class Restarts:
    """Counts the restarts of one kind of processes against their budget.

    Args:
        most: limit on all restarts, as in cluster.max_restarts.
        kind: the word for the processes in messages.
    """

    def __init__(self, most: int, kind: str) -> None:
        self._most = most
        self._kind = kind
        self._spent = 0
        self._in_a_row: dict[Any, int] = {}

    def spend(self, error: SlimeError, lost: Any = None) -> None:
        """Takes one restart after a loss; raises the error, with the reason in its hint, if no restart is left.

        Args:
            lost: identifies what was lost, for example an engine's index; restarts in a row are counted for each value.
        """
        self._spent += 1
        in_a_row = self._in_a_row[lost] = self._in_a_row.get(lost, 0) + 1
        if self._spent > self._most:
            reason = f"cluster.max_restarts={self._most} are spent" if self._most else "cluster.max_restarts is 0"
        elif in_a_row > MAX_WITHOUT_PROGRESS:
            reason = f"{MAX_WITHOUT_PROGRESS} restarts in a row changed nothing"
        else:
            print(f"{self._kind} were lost, others start: {error}", file=sys.stderr, flush=True)
            return
        error.hint = f"{error.hint}; {reason}" if error.hint else reason
        raise error

    def start_another(self, error: SlimeError, start: Callable[[], Started], lost: Any = None) -> Started:
        """Calls `start`, which replaces lost processes, until `start` succeeds; returns the value that it returned.

        Args:
            error: the loss.
            lost: as in `spend`.

        Raises:
            SlimeError: the last loss, if no restart is left.
        """
        while True:
            self.spend(error, lost)
            try:
                return start()
            except (*LOST, EngineError) as another:
                error = another

    def progress(self) -> None:
        """Resets the count of restarts in a row, after a call has ended."""
        self._in_a_row.clear()


_COMPARED = ("loss", "grad_norm")  # metrics that a repeated call must reproduce


@dataclass(frozen=True, slots=True)
class Recovery:
    """Describes a replacement of lost ranks; a line of `recoveries.jsonl` in `run.dir`."""

    code: str  # `code` of the error that reported the loss, as in slimefsdp.errors
    rank: int | None
    call: str | None
    message: str
    noticed_at: float  # seconds since the epoch
    seconds: float  # from the loss until the logged calls were repeated
    checkpoint_step: int | None  # step of the loaded checkpoint; None if the models are those of the launch
    calls_repeated: int
    differences: tuple[str, ...]  # metrics of repeated calls that differ from the first time

    def report(self, run_dir: Path | None) -> None:
        """Prints a line about the recovery, and adds it to the file in `run_dir`."""
        where = "the launch" if self.checkpoint_step is None else f"step {self.checkpoint_step}"
        rank = "a rank" if self.rank is None else f"rank {self.rank}"
        print(
            f"recovered: {rank} was lost in {self.call} ({self.message}); from {where}, "
            f"{self.calls_repeated} calls made again, {self.seconds:.1f} s",
            *(f"  not as the first time: {difference}" for difference in self.differences),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        if run_dir is None:
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            refuse_unless_plain(run_dir / RECOVERIES)
            with (run_dir / RECOVERIES).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(self)) + "\n")
        except OSError as error:  # a missing line must not end a healthy job
            print(f"{run_dir / RECOVERIES}: {error.strerror}", file=sys.stderr, flush=True)


def differences_of(call: LoggedCall, value: Any) -> Iterator[str]:
    """Yields a text for each compared metric of a repeated call whose value differs from the first time."""
    if not (isinstance(value, dict) and isinstance(call.value, dict)):
        return
    for name in _COMPARED:
        first, again = call.value.get(name), value.get(name)
        if first != again and (first == first or again == again):  # two NaN count as equal
            yield f"{name} of {call.name} was {first}, is {again}"
