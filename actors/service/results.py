"""Answers that clients fetch when they are there: kept for a while, and handed over as often as they are asked for."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from concurrent.futures import Future
from typing import Any

from slimefsdp.errors import BatchError, CheckpointError, ConfigError, ModelError, ResourceError, SlimeError, StateError

Answer = bytes | dict[str, Any]
"""Protobuf, or what becomes JSON."""
_USERS = (BatchError, CheckpointError, ConfigError, ModelError, StateError, ResourceError)


class Result:
    """One answer, from the moment in which its request was taken.

    Args:
        owner: the id of the user who asked.
    """

    def __init__(self, owner: str) -> None:
        self.id = uuid.uuid4().hex
        self.owner = owner
        self.ended: float | None = None  # of time.monotonic
        self._future: Future[Answer] = Future()

    def set(self, answer: Answer) -> None:
        """Hands the answer to all who wait, and to those who ask later; the first one stands."""
        if not self._future.done():
            self.ended = time.monotonic()
            self._future.set_result(answer)

    def fail(self, error: Exception) -> None:
        """As `set`, of an answer that says what went wrong and that it is not to be tried again."""
        self.set(failure(error))

    def forget(self) -> None:
        """Frees the answer; whoever asks for it again is told so."""
        self._future = Future()
        self._future.set_result({"error": "the answer was kept long enough", "category": "user"})

    @property
    def size(self) -> int:
        """Bytes of the answer; 0 while there is none, and of JSON."""
        answer = self._future.result() if self._future.done() else b""
        return len(answer) if isinstance(answer, bytes) else 0

    async def wait(self, timeout_s: float) -> Answer | None:
        """The answer; None where it is not there in time."""
        if not self._future.done():
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=timeout_s)
        return self._future.result() if self._future.done() else None


def typed(error: Exception) -> Exception:
    """What an actor raised, out of Ray's own error around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SlimeError) else error


def failure(error: Exception) -> dict[str, Any]:
    """What a client is told of an error."""
    if isinstance(error, SlimeError):
        hint = f" ({error.hint})" if error.hint else ""
        return {"error": f"{error.message}{hint}", "category": "user" if isinstance(error, _USERS) else "server"}
    return {"error": f"{type(error).__name__}: {error}", "category": "server"}


class Results:
    """All answers by their ids; those that ended some time ago go, and the oldest ones before their time for room.

    Args:
        kept_s: how long one that ended is kept.
        most_bytes: of all that ended.
    """

    def __init__(self, kept_s: float, most_bytes: int) -> None:
        self._kept_s, self._most_bytes = kept_s, most_bytes
        self._results: dict[str, Result] = {}
        self._lock = threading.Lock()

    def new(self, owner: str) -> Result:
        """A result that the user of this id asks for by its own id from now on."""
        result = Result(owner)
        with self._lock:
            self._results[result.id] = result
        return result

    def get(self, key: str) -> Result | None:
        """None where there never was one, or is none any more."""
        with self._lock:
            return self._results.get(key)

    @property
    def waiting(self) -> int:
        """How many have no answer yet."""
        with self._lock:
            return sum(result.ended is None for result in self._results.values())

    def forget_old(self) -> None:
        """To be called now and then."""
        now = time.monotonic()
        with self._lock:
            ended = [one for one in self._results.values() if one.ended is not None]
            left = sum(one.size for one in ended)
            for one in sorted(ended, key=lambda one: one.ended or 0.0):
                if now - (one.ended or now) > self._kept_s or left > self._most_bytes:
                    left -= one.size
                    self._results.pop(one.id).forget()
