"""The users of a server, the sessions of their clients, and how much both may ask for at once."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_TIMES_FREE = 4


class NotFound(Exception):
    """An id of a client is unknown; answered with 404, or with 410 if it was valid once."""

    def __init__(self, what: str, *, is_gone: bool = False) -> None:
        super().__init__(what)
        self.is_gone = is_gone


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Bounds that keep a client's mistakes from taking the whole server.

    They are no settings: the defaults are far above what the public clients send, and far below what a host has. Memory
    for versions of weights, which follows from the model, is `service.max_version_bytes`.
    """

    sessions: int = 64  # clients at the same time; more are told to wait
    runs: int = 32  # training runs at the same time, of all clients
    waiting: int = 4096  # requests without an answer, of one user at most four fifths
    waiting_bytes: int = 2**30  # of these requests, and as many of bodies that are on their way
    body_bytes: int = 64 * 2**20  # of one request, also when it is decompressed
    receive_s: float = 60.0  # for a request's head, and again for its body, from their first byte to the last
    result_bytes: int = 2**30  # of answers that are kept to be fetched again; the oldest ones go first
    result_kept_s: float = 600.0  # how long an answer is kept


LIMITS = ServiceLimits()


@dataclass(frozen=True, slots=True)
class User:
    """A user: whoever has a certain key.

    Args:
        id: a digest of the key, which marks what the user makes; empty if no key is needed.
        is_operator: whether it is the first key, which may see the state of the service and owns what was made without
            a key.
        is_alone: whether there is no other user; then everything in the run's folder belongs to this one.
    """

    id: str
    is_operator: bool
    is_alone: bool

    def owns(self, owner: str) -> bool:
        """Returns whether this user owns what the user with the id `owner` has made."""
        return self.is_alone or owner == self.id or (not owner and self.is_operator)


class Users:
    """The users whose keys the server was started with.

    Args:
        keys: the operator's key first; none: no key is needed, and all clients are one user.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        is_alone = len(keys) < 2
        self._by_key = [
            (_digest(key.encode()), User(_digest(b"owner of slimefsdp serve: " + key.encode()).hex()[:32], not number,
                                         is_alone))
            for number, key in enumerate(keys)
        ]  # fmt: skip

    @property
    def have_keys(self) -> bool:
        return bool(self._by_key)

    def of(self, key: str) -> User | None:
        """Returns the user who has this key, or None.

        Args:
            key: the value of a request's header, decoded as Latin-1; empty if there is no such header.
        """
        if not self._by_key:
            return User("", is_operator=True, is_alone=True)
        wanted, owner = _digest(key.encode("latin-1", "replace")), None
        for digest, user in self._by_key:  # compares with all digests, so that the time reveals nothing about a key
            if hmac.compare_digest(wanted, digest):
                owner = user
        return owner


@dataclass(slots=True)
class Session:
    """A client's session, which lasts as long as the client sends heartbeats.

    Args:
        owner: the id of the client's user.
    """

    id: str
    owner: str
    sdk_version: str
    began: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)


class Shares:
    """A limit that users share. A user may take up to four times what stays free: four fifths if alone, and four ninths
    each if two ask for more than there is. So some room is always left for another user. Not thread-safe.

    Args:
        most: limit on what all users take together, in any unit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()  # by user

    @property
    def taken(self) -> int:
        return self._taken.total()

    def has_room(self, user: str, size: int) -> bool:
        """Returns whether the user may take this much more."""
        return self._taken[user] + size <= _TIMES_FREE * (self.most - self.taken - size)

    def take(self, user: str, size: int) -> None:
        """Counts what a user takes, whether or not there is room; a negative size gives room back."""
        self._taken[user] += size
        if not self._taken[user]:
            del self._taken[user]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
