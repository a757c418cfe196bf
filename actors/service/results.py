"""Answers that clients fetch when they are there: kept for a while, and handed over as often as they are asked for."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from actors.service.users import Shares
from slimefsdp.errors import BatchError, CheckpointError, ConfigError, ModelError, ResourceError, SlimeError, StateError

Answer = bytes | dict[str, Any]
"""Protobuf, or what becomes JSON."""
_LONGEST = 2000  # characters of an error
# between quotes a path may have spaces
_PATH = re.compile(
    r"""(?<=['"])/[^'"\n]+(?=['"])|(?:file://|(?<![\w/:.~-]))/[^\s'"`,;:()\[\]{}]*[^\s'"`,;:()\[\]{}.]"""
)
_SAVED = re.compile(
    r"(?:adapters|named|sampler_weights)/(session-\w+)\.train\.(\d+)(?:/checkpoints/named/|\.|/(?!checkpoints/))([^/@]+)"
)
_USERS = (BatchError, CheckpointError, ConfigError, ModelError, StateError, ResourceError)


def _forgotten() -> Future[Answer]:
    future: Future[Answer] = Future()
    future.set_result({"error": "the answer was kept long enough", "category": "user"})
    return future


_FORGOTTEN = _forgotten()  # of all: runs and samplers remember thousands of results by their numbers


class Result:
    """One answer, from the moment in which its request was taken.

    Args:
        owner: the id of the user who asked.
        on_end: is called once, when the answer is there.

    `fetched` is set when a client has been given the answer.
    """

    __slots__ = ("_future", "_on_end", "ended", "fetched", "id", "owner")

    def __init__(self, owner: str, on_end: Callable[[Result], None]) -> None:
        self.id = uuid.uuid4().hex
        self.owner = owner
        self.ended: float | None = None  # of time.monotonic
        self.fetched = asyncio.Event()
        self._future: Future[Answer] = Future()
        self._on_end = on_end

    def set(self, answer: Answer) -> None:
        """Hands the answer to all who wait, and to those who ask later; the first one stands."""
        if not self._future.done():
            self.ended = time.monotonic()
            self._future.set_result(answer)
            self._on_end(self)

    def fail(self, error: Exception) -> None:
        """Sets an answer that says what went wrong, and that the request is not to be sent again."""
        self.set(failure(error))

    def forget(self) -> None:
        """Frees the answer; whoever asks for it again is told so."""
        self._future = _FORGOTTEN

    @property
    def is_forgotten(self) -> bool:
        """Whether nobody can have the answer any more."""
        return self._future is _FORGOTTEN

    @property
    def size(self) -> int:
        """Bytes of the answer; 0 while there is none. Of JSON, which is short, what it has at most."""
        answer = self._future.result() if self._future.done() else b""
        return len(answer) if isinstance(answer, bytes) else _LONGEST

    async def wait(self, timeout_s: float) -> Answer | None:
        """The answer; None where it is not there in time."""
        if not self._future.done():
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=timeout_s)
        return self._future.result() if self._future.done() else None


def typed(error: Exception) -> Exception:
    """Returns what an actor raised, out of Ray's own error around it."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SlimeError) else error


def failure(error: Exception) -> dict[str, Any]:
    """Returns what a client is told of an error."""
    return {"error": told(error), "category": "user" if isinstance(error, _USERS) else "server"}


def told(error: Exception, public: str = "") -> str:
    """Returns an error's text for a client, with its hint.

    Paths of the server's disk are left out of it: of what a client saved it has the tinker:// path, of others the last
    name.

    Args:
        public: a path that clients know, which stays.
    """

    def named(found: re.Match[str]) -> str:
        path = found.group()
        if path == public:
            return path
        if (saved := _SAVED.search(path)) is None:
            return path.rpartition("/")[2]
        session, number, name = saved.groups()
        kind = "sampler_weights" if "/sampler_weights/" in path else "weights"
        return f"tinker://{session}:train:{number}/{kind}/{name}"

    if isinstance(error, SlimeError):
        text = f"{error.message} ({error.hint})" if error.hint else error.message
    else:
        text = f"{type(error).__name__}: {error}"
    text = _PATH.sub(named, text)
    # it may name what a client sent, which has any length
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} .."


class Results:
    """All answers by their ids; those that ended some time ago go, and the oldest ones before their time for room.

    Args:
        kept_s: how long one that ended is kept.
        most_bytes: of all that ended.
        most_waiting: that have no answer yet, of all users.
        most_waiting_bytes: of the bodies of their requests, which are held until then.
    """

    def __init__(self, kept_s: float, most_bytes: int, most_waiting: int, most_waiting_bytes: int) -> None:
        self._kept_s, self._most_bytes = kept_s, most_bytes
        self._waiting, self._waiting_bytes = Shares(most_waiting), Shares(most_waiting_bytes)
        self._results: dict[str, Result] = {}
        self._ended: deque[Result] = deque()  # those of them that have ended, the first one first
        self._bytes = 0  # of these
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Results without an answer."""
        return self._waiting.taken

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the bodies of their requests."""
        return self._waiting_bytes.taken

    def new(self, owner: str, size: int = 0, *, is_needed: bool = False) -> Result:
        """A result that the user of this id asks for by its own id from now on.

        Args:
            size: bytes that the request takes; one that is larger than there may be of all is taken alone.
            is_needed: it is taken in any case, since others come to an end behind it alone.

        Raises:
            ResourceError: as many are without an answer as there may be, or as one user may have of them.
        """

        def ended(result: Result) -> None:
            with self._lock:
                self._waiting.give_back(owner, 1)
                self._waiting_bytes.give_back(owner, size)
                self._ended.append(result)
                self._bytes += result.size

        result = Result(owner, ended)
        with self._lock:
            if not is_needed:
                self._check_room(owner, size)
            self._waiting.take(owner, 1)
            self._waiting_bytes.take(owner, size)
            self._results[result.id] = result
        return result

    def _check_room(self, owner: str, size: int) -> None:
        for field, shares, more in (
            ("service.max_waiting", self._waiting, 1),
            ("service.max_waiting_bytes", self._waiting_bytes, size),
        ):
            if shares.taken and not shares.has_room(owner, more):
                what = "requests" if shares is self._waiting else "bytes of requests"
                problem = f"{shares.taken} {what} wait, this one has {more}, and {field}={shares.most}"
                raise ResourceError(problem, field=field, hint="send it again later")

    def get(self, key: str) -> Result | None:
        """Returns a result, or None if it never existed or was forgotten."""
        with self._lock:
            return self._results.get(key)

    def unanswered(self) -> list[Result]:
        """Returns the results that have no answer yet."""
        with self._lock:
            return [one for one in self._results.values() if one.ended is None]

    def forget_old(self) -> None:
        """Forgets old results; it is to be called every few seconds, and looks only at those that it forgets."""
        now = time.monotonic()
        with self._lock:
            while self._ended:
                oldest = self._ended[0]
                assert oldest.ended is not None
                if now - oldest.ended <= self._kept_s and self._bytes <= self._most_bytes:
                    break
                self._ended.popleft()
                self._bytes -= oldest.size
                self._results.pop(oldest.id).forget()
