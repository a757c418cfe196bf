"""Waiting for Ray calls: every wait has a deadline, and the first failure ends it with its root cause."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.ray_failures import explained, require_cluster
from actors.watchdog import Waiting, Watchdog
from slimefsdp.errors import PeerFailed, SlimeError, WorkerDied, WorkerHung

# How long to listen for the root cause after a first failure: peers of a rank that ends often report that sooner than
# Ray. Longer than a failed rank lives on (train_worker.EXIT_AFTER_S), so that peers can say what its end did to them.
GRACE_S = 5.0
SLICE_S = 0.25  # of a wait: in between signals are handled and the watchdog looks


class CallFuture:
    """One call running on several actors.

    Args:
        refs: one per rank, in rank order.
        first_rank: the rank of the first of them.
        watchdog: of the actors, from rank 0 on; ends the wait when one hangs. None: the timeout alone does.
        began: of `time.monotonic`, when the timeout began; None: now.
    """

    def __init__(
        self,
        refs: Sequence[Any],
        *,
        name: str,
        timeout_s: float,
        first_only: bool,
        first_rank: int = 0,
        watchdog: Watchdog | None = None,
        began: float | None = None,
    ) -> None:
        self._refs = list(refs)
        self._first_rank = first_rank
        self._name = name
        self._began = time.monotonic() if began is None else began
        self._timeout_s = timeout_s
        self._first_only = first_only
        self._watchdog = watchdog

    def result(self) -> Any:
        """Rank 0's result, or all results in rank order, as the call defines.

        Raises:
            WorkerHung: not all ranks answered in time. WorkerDied: a process ended. ResourceError: Ray is gone.
            SlimeError: what a rank raised; the root cause where several did, with the others' words in its `others`.
        """
        pending = list(self._refs)
        failures: list[tuple[int, Exception]] = []
        deadline = self._began + self._timeout_s
        while pending:
            left_s = max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=min(SLICE_S, left_s))
            if done:
                failure = self._failure_of(done[0])
                if failure is not None:
                    failures.append(failure)
                    # nothing explains an end but the end itself
                    grace_s = 0.0 if isinstance(failure[1], WorkerDied) else GRACE_S
                    deadline = min(deadline, time.monotonic() + grace_s)
            elif left_s == 0.0:
                break
            elif not failures:
                require_cluster()
                if self._watchdog is not None:
                    self._watchdog.look(self._waiting(pending))
        if failures:
            raise _root_cause(failures)
        if pending:
            raise self._overdue(pending)
        values = ray.get(self._refs, timeout=60)
        return values[0] if self._first_only else values

    def _overdue(self, pending: Sequence[Any]) -> WorkerHung:
        if self._watchdog is not None:
            return self._watchdog.overdue(self._waiting(pending), self._timeout_s)
        return WorkerHung(
            f"{self._name} did not finish within {self._timeout_s:g} s",
            field="cluster.call_timeout_s",
            hint="look at the rank's log, or raise the timeout",
            rank=self._rank_of(pending[0]),
            phase=self._name,
        )

    def _waiting(self, pending: Sequence[Any]) -> Waiting:
        return Waiting(self._name, [self._rank_of(ref) for ref in pending], self._began)

    def _failure_of(self, ref: Any) -> tuple[int, Exception] | None:
        rank = self._rank_of(ref)
        try:
            ray.get(ref, timeout=60)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            return rank, explained(cause, rank, self._name) if isinstance(cause, RayError) else cause
        except RayError as error:
            return rank, explained(error, rank, self._name)
        return None

    def _rank_of(self, ref: Any) -> int:
        return self._first_rank + self._refs.index(ref)


def _root_cause(failures: list[tuple[int, Exception]]) -> Exception:
    """What to report when several ranks failed: a death first, then a typed error, then any other, then a lost peer.

    A typed one gets what the others said besides.
    """

    def order(failure: tuple[int, Exception]) -> tuple[int, int]:
        rank, error = failure
        if isinstance(error, PeerFailed):
            return 3, rank
        return 0 if isinstance(error, WorkerDied) else 1 if isinstance(error, SlimeError) else 2, rank

    cause = min(failures, key=order)[1]
    if isinstance(cause, SlimeError):
        others: dict[str, list[str]] = {}
        for rank, error in failures:
            if error is not cause and _words(error) != _words(cause):
                others.setdefault(_words(error), []).append(str(rank))
        cause.others += tuple(f"rank {', '.join(ranks)}: {words}" for words, ranks in others.items())
    return cause


def _words(error: Exception) -> str:
    """What it says in one line, without the place."""
    said = error.message if isinstance(error, SlimeError) else str(error.args[0] if error.args else "")
    return f"{type(error).__name__}: {said.strip().partition(chr(10))[0]}"
