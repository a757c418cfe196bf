"""Keeps the answers to requests for clients, which may fetch an answer repeatedly until it expires."""

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
"""A protobuf message, or a dictionary that is sent as JSON."""
_LONGEST = 2000  # limit on the characters of an error
# a path between quotes may contain spaces
_PATH = re.compile(
    r"""(?<=['"])/[^'"\n]+(?=['"])|(?:file://|(?<![\w/:.~-]))/[^\s'"`,;:()\[\]{}]*[^\s'"`,;:()\[\]{}.]"""
)
_SAVED = re.compile(
    r"(?:adapters|named|sampler_weights)/(session-\w+)\.train\.(\d+)(?:/checkpoints/named/|\.|/(?!checkpoints/))([^/@]+)"
)
_USERS = (BatchError, CheckpointError, ConfigError, ModelError, StateError, ResourceError)


# one object for all forgotten results, since runs and samplers remember thousands of results
_FORGOTTEN: Future[Answer] = Future()
_FORGOTTEN.set_result({"error": "the answer has expired", "category": "user"})


class Result:
    """Holds the answer to one request; the answer may be pending.

    The event `fetched` is set when a client has got the answer.

    Args:
        owner: the id of the user who sent the request.
        fields: fields that the client gets at once, along with the id of the result.
        on_end: a function that is called once, when the answer is set.
    """

    __slots__ = ("_future", "_on_end", "ended", "fetched", "fields", "id", "owner")

    def __init__(self, owner: str, fields: dict[str, Any], on_end: Callable[[Result], None]) -> None:
        self.id = uuid.uuid4().hex
        self.owner, self.fields = owner, fields
        self.ended: float | None = None  # the time.monotonic() at which the answer was set
        self.fetched = asyncio.Event()
        self._future: Future[Answer] = Future()
        self._on_end = on_end

    def set(self, answer: Answer) -> None:
        """Sets the answer and wakes all waiting tasks; does nothing if an answer is set already."""
        if not self._future.done():
            self.ended = time.monotonic()
            self._future.set_result(answer)
            self._on_end(self)

    def fail(self, error: Exception) -> None:
        """Sets an error as the answer. Clients do not repeat a request whose answer is an error."""
        self.set(failure(error))

    def forget(self) -> None:
        """Frees the answer; a later request for it gets an error."""
        self._future = _FORGOTTEN

    @property
    def is_forgotten(self) -> bool:
        return self._future is _FORGOTTEN

    @property
    def size(self) -> int:
        """Returns the size of the answer in bytes: 0 without an answer, and an upper bound for JSON."""
        answer = self._future.result() if self._future.done() else b""
        return len(answer) if isinstance(answer, bytes) else _LONGEST

    async def wait(self, timeout_s: float) -> Answer | None:
        """Returns the answer, or None if there is none within `timeout_s`."""
        if not self._future.done():
            await asyncio.wait([asyncio.wrap_future(self._future)], timeout=timeout_s)
        return self._future.result() if self._future.done() else None


def typed(error: Exception) -> Exception:
    """Returns the typed error inside of a Ray error; any other error is returned as it is."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, SlimeError) else error


def failure(error: Exception) -> dict[str, Any]:
    """Returns the answer that reports an error to a client."""
    return {"error": error_text(error), "category": "user" if isinstance(error, _USERS) else "server"}


def error_text(error: Exception, public: str = "") -> str:
    """Returns an error's text and hint for a client.

    The text names no folder of the server's disk: the path of a client's save becomes the tinker:// path of the save,
    and any other path becomes its last part.

    Args:
        public: a path that clients know, which stays unchanged.
    """

    def named(match: re.Match[str]) -> str:
        path = match.group()
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
    # the error may quote a text of a client, which can have any length
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} .."


def require_same_kind(field: str, number: int, known: str, kind: str) -> None:
    """Raises a StateError if a request has the number of an earlier request of another kind.

    A request of the same kind may be a client's repetition.

    Args:
        field: the field of the request that has the number.
        known: the kind of the earlier request.
        kind: the kind of this request.
    """
    if known != kind:
        problem = f"{field}={number} is the number of an earlier {known}, and this request is a {kind}"
        raise StateError(problem, field=field, hint="give each request another number")


class Results:
    """Keeps the results of all requests by id. A result expires `kept_s` after its answer was set, or earlier if all
    answers together exceed `most_bytes`.

    Args:
        most_bytes: limit on the bytes of all answers.
        most_waiting: limit on the number of pending results of all users.
        most_waiting_bytes: limit on the bytes of all pending requests' bodies, which stay in memory until the answer.
    """

    def __init__(self, kept_s: float, most_bytes: int, most_waiting: int, most_waiting_bytes: int) -> None:
        self._kept_s, self._most_bytes = kept_s, most_bytes
        self._waiting, self._waiting_bytes = Shares(most_waiting), Shares(most_waiting_bytes)
        self._results: dict[str, Result] = {}
        self._ended: deque[Result] = deque()  # results with an answer, in the order in which the answers were set
        self._bytes = 0  # bytes of all answers
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return self._waiting.taken

    @property
    def waiting_bytes(self) -> int:
        return self._waiting_bytes.taken

    def new(self, owner: str, size: int = 0, *, is_needed: bool = False, **fields: Any) -> Result:
        """Returns a pending result for a request of the user with the id `owner`.

        Args:
            size: bytes of the request. A request larger than the limit is accepted only if no other request waits.
            is_needed: whether the request is always accepted, since other pending requests may wait for it.
            fields: as in `Result`.

        Raises:
            ResourceError: the pending results of all users, or of this user, are at their limit.
        """

        def ended(result: Result) -> None:
            with self._lock:
                self._waiting.take(owner, -1)
                self._waiting_bytes.take(owner, -size)
                self._ended.append(result)
                self._bytes += result.size

        result = Result(owner, fields, ended)
        with self._lock:
            if not is_needed:
                self._check_room(owner, size)
            self._waiting.take(owner, 1)
            self._waiting_bytes.take(owner, size)
            self._results[result.id] = result
        return result

    def _check_room(self, owner: str, size: int) -> None:
        for what, shares, more in (("requests", self._waiting, 1), ("bytes of requests", self._waiting_bytes, size)):
            if shares.taken and not shares.has_room(owner, more):
                problem = f"{shares.taken} {what} wait, this one has {more}, and at most {shares.most} may wait"
                raise ResourceError(problem, hint="send it again later")

    def get(self, key: str) -> Result | None:
        """Returns a result, or None if it never existed or has expired."""
        with self._lock:
            return self._results.get(key)

    def unanswered(self) -> list[Result]:
        with self._lock:
            return [result for result in self._results.values() if result.ended is None]

    def forget_old(self) -> None:
        """Removes expired results; must be called every few seconds."""
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
