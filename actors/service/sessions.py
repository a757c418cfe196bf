"""Sessions of clients, which last as long as the clients send heartbeats."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.service.results import Result
from actors.service.training_runs import TrainingRun


class NotFound(Exception):
    """An id of a client is unknown; answered with 404, or with 410 if it was valid once."""

    def __init__(self, what: str, *, is_gone: bool = False) -> None:
        super().__init__(what)
        self.is_gone = is_gone


class Made(NamedTuple):
    """A run and the request that made it."""

    by: str  # the name of the request
    run: TrainingRun
    result: Result


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
    made: dict[int, Made] = field(default_factory=dict)  # runs by their numbers in the session
