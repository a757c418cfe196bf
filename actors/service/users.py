"""Whose requests these are: each key is a user, what the clients of one user make is no other user's, and none of them
can take all the room that they share."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class User:
    """Whoever has a key.

    Args:
        id: a digest of the key, which what the user makes is marked with; empty where no key is asked for.
        is_operator: the first key's, who also sees what the whole service does, and has what was made without a key.
        is_alone: there is no other user, and all that is in the run's folder is this one's, whichever key made it.
    """

    id: str
    is_operator: bool
    is_alone: bool

    def owns(self, owner: str) -> bool:
        """Whether what was made by the user of this id is this user's."""
        return self.is_alone or owner == self.id or (not owner and self.is_operator)


class Users:
    """The users whose keys the server was started with.

    Args:
        keys: the operator's first; none: nobody is asked for a key, and all clients are one user.
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
        """Whether requests are asked for a key."""
        return bool(self._by_key)

    def of(self, key: str) -> User | None:
        """The user who has this key; None: nobody has.

        Args:
            key: of a request's header, whose bytes are decoded as Latin-1; empty: it had none.
        """
        if not self._by_key:
            return self._nobody
        given, found = _digest(key.encode("latin-1", "replace")), None
        for digest, user in self._by_key:  # all of them, of one length: the time tells nothing about a key
            if hmac.compare_digest(given, digest):
                found = user
        return found


_TIMES_FREE = 4


class Shares:
    """Room that users share. A user may take up to four times what stays free: one alone four fifths, two who both ask
    for more than there is four ninths each. So there is always some left for another one. Not thread-safe.

    Args:
        most: that all may take together, in any unit.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._taken: Counter[str] = Counter()  # by user

    @property
    def taken(self) -> int:
        """What all users have taken."""
        return self._taken.total()

    def has_room(self, user: str, size: int) -> bool:
        """Whether the user of this id may take so much more."""
        return self._taken[user] + size <= _TIMES_FREE * (self.most - self.taken - size)

    def take(self, user: str, size: int) -> None:
        """Counts it, whether there is room or not."""
        self._taken[user] += size

    def give_back(self, user: str, size: int) -> None:
        """Ends what `take` began."""
        self._taken[user] -= size
        if not self._taken[user]:
            del self._taken[user]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
