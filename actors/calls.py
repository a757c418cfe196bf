"""Waiting for Ray calls: every wait has a deadline, and the first failure ends it with its root cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slimefsdp.errors import SlimeError, WorkerDied, WorkerHung

# how long to listen for the root cause after a first failure: peers of a failing rank often report sooner than it does
GRACE_S = 2.0


class CallFuture:
    """One call running on several actors.

    Args:
        refs: one per rank, in rank order.
        first_rank: the rank of the first of them.
    """

    def __init__(
        self, refs: Sequence[Any], *, name: str, timeout_s: float, first_only: bool, first_rank: int = 0
    ) -> None:
        self._refs = list(refs)
        self._first_rank = first_rank
        self._name = name
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._first_only = first_only

    def result(self) -> Any:
        """Rank 0's result, or all results in rank order, as the call defines.

        Raises:
            WorkerHung: not all ranks answered in time. WorkerDied: a process ended.
            SlimeError: what a rank raised; the root cause where several did.
        """
        pending = list(self._refs)
        failures: list[tuple[int, Exception]] = []
        deadline = self._deadline
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            failure = self._failure_of(done[0])
            if failure is not None:
                failures.append(failure)
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures:
            raise _root_cause(failures)
        if pending:
            raise WorkerHung(
                f"{self._name} did not finish within {self._timeout_s:g} s",
                field="cluster.call_timeout_s",
                hint="look at the rank's log, or raise the timeout",
                rank=self._rank_of(pending[0]),
                phase=self._name,
            )
        values = ray.get(self._refs, timeout=60)
        return values[0] if self._first_only else values

    def _failure_of(self, ref: Any) -> tuple[int, Exception] | None:
        rank = self._rank_of(ref)
        try:
            ray.get(ref, timeout=60)
        except RayActorError as error:
            message = f"the process of rank {rank} ended during {self._name}: {str(error).splitlines()[0]}"
            return rank, WorkerDied(message, hint="look at its log for the reason", rank=rank, phase=self._name)
        except RayTaskError as error:
            return rank, error.cause if isinstance(error.cause, Exception) else error
        return None

    def _rank_of(self, ref: Any) -> int:
        return self._first_rank + self._refs.index(ref)


def _root_cause(failures: list[tuple[int, Exception]]) -> Exception:
    """What to report when several ranks failed: a death first, then a typed error, then anything else."""

    def order(failure: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = failure
        kind = 0 if isinstance(error, WorkerDied) else 1 if isinstance(error, SlimeError) else 2
        return kind + 2 * lost_a_peer(error), rank

    return min(failures, key=order)[1]


def lost_a_peer(error: Exception) -> bool:
    """Whether a rank failed only because another one's end of a connection closed, in gloo's words."""
    return "Connection closed by peer" in str(error) or "Connection reset" in str(error)
