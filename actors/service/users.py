"""Separates the users of a server: each key is a user, who owns what their clients make and has a share of the room."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
        self._nobody = User("", is_operator=True, is_alone=True)

    @property
    def have_keys(self) -> bool:
        return bool(self._by_key)

    def of(self, key: str) -> User | None:
        """Returns the user who has this key, or None.

        Args:
            key: the value of a request's header, decoded as Latin-1; empty if there is no such header.
        """
        if not self._by_key:
            return self._nobody
        wanted, owner = _digest(key.encode("latin-1", "replace")), None
        for digest, user in self._by_key:  # compares with all digests, so that the time reveals nothing about a key
            if hmac.compare_digest(wanted, digest):
                owner = user
        return owner


_TIMES_FREE = 4


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
        """Counts what a user takes, whether or not there is room."""
        self._taken[user] += size

    def give_back(self, user: str, size: int) -> None:
        """Returns room that was taken with `take`."""
        self._taken[user] -= size
        if not self._taken[user]:
            del self._taken[user]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
