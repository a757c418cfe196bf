"""The users of a server, the sessions of their clients, and the limits on both."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

_TIMES_FREE = 4  # a user may take this many times the amount that stays free


class NotFound(Exception):
    """A client's request has an unknown id. The answer has status 404, or 410 if the id was valid before."""

    def __init__(self, what: str, *, is_gone: bool = False) -> None:
        super().__init__(what)
        self.is_gone = is_gone


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """Limits that keep a client's mistakes from using up the whole server.

    These are no settings: the values are far above the needs of the public clients, and far below a host's resources.
    Memory for versions of weights, which depends on the model, is the setting `service.max_version_bytes`.
    """

    sessions: int = 64  # sessions at the same time
    runs: int = 32  # training runs of all clients at the same time
    waiting: int = 4096  # requests without an answer; one user may have at most four fifths
    waiting_bytes: int = 2**30  # bytes of requests without an answer, and again of bodies that are being received
    body_bytes: int = 64 * 2**20  # bytes of one request's body, compressed and decompressed
    receive_s: float = 60.0  # seconds to receive a request's head, and again to receive its body
    result_bytes: int = 2**30  # bytes of kept answers; the oldest are removed first
    result_kept_s: float = 600.0  # seconds for which an answer is kept


LIMITS = ServiceLimits()


@dataclass(frozen=True, slots=True)
class User:
    """A user, who is identified by an API key.

    Args:
        id: a digest of the key; records name it as the owner of the user's objects. It is empty if no key is needed.
        is_operator: whether the key is the first one. The operator may see the state of the service, and owns objects
            that were created without a key.
        is_alone: whether there is no other user. If so, all objects in the run's folder belong to this user.
    """

    id: str
    is_operator: bool
    is_alone: bool

    def owns(self, owner: str) -> bool:
        """Returns whether this user owns the objects whose recorded owner is `owner`."""
        return self.is_alone or owner == self.id or (not owner and self.is_operator)


class Users:
    """All users of a server.

    Args:
        keys: the API keys, the operator's first. Without keys, all clients are one user, who needs no key.
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
        """Returns the user who has this key, or None if no user has it.

        Args:
            key: the value of a request's header, decoded as Latin-1; empty if the request has no such header.
        """
        if not self._by_key:
            return User("", is_operator=True, is_alone=True)
        wanted, owner = _digest(key.encode("latin-1", "replace")), None
        for digest, user in self._by_key:  # no early exit, so that the time reveals nothing about a key
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
    """A limit that users share. Not thread-safe.

    A user may take up to four times the amount that stays free. So a single user may take four fifths of the limit, two
    users four ninths each, and some room is always left for another user.

    Args:
        most: limit on the total of all users, in any unit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()  # id of a user -> amount

    @property
    def taken(self) -> int:
        return self._taken.total()

    def has_room(self, user: str, size: int) -> bool:
        """Returns whether the user may take `size` more."""
        return self._taken[user] + size <= _TIMES_FREE * (self.most - self.taken - size)

    def take(self, user: str, size: int) -> None:
        """Adds to the amount that a user has taken, without a check; a negative size gives room back."""
        self._taken[user] += size
        if not self._taken[user]:
            del self._taken[user]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
