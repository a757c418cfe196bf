"""One call at a time: a call from a second thread is refused at once, since the ranks' collectives would mix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from slimefsdp.errors import StateError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Turn:
    """Whose turn it is on one object; calls may call each other in the thread that has it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: str | None = None

    @contextmanager
    def taken_by(self, call: str) -> Iterator[None]:
        """Holds the turn.

        Raises:
            StateError: a call is running in another thread.
        """
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"{call}() while {self._running or 'another call'}() is running in another thread",
                field=call,
                hint="call it when that one has returned",
            )
        before, self._running = self._running, self._running or call
        try:
            yield
        finally:
            self._running = before
            self._lock.release()


class _Taken(Protocol):
    turn: Turn


Owner = TypeVar("Owner", bound=_Taken)


def exclusive(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Has a method of an object with a `turn` run only while no other thread is in one; raises StateError there."""

    @wraps(method)
    def call(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.turn.taken_by(method.__name__):
            return method(self, *args, **kwargs)

    return call
