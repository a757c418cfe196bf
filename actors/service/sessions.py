"""Clients of the service, for as long as they say that they are there."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.service.results import Result
from actors.service.training_runs import TrainingRun


class NotFound(Exception):
    """Something that a client names is not there; answered as 404, or 410 where it was there once."""

    def __init__(self, what: str, *, is_gone: bool = False) -> None:
        super().__init__(what)
        self.is_gone = is_gone


class Made(NamedTuple):
    """A run that was asked for."""

    by: str  # the call
    run: TrainingRun
    result: Result


@dataclass(slots=True)
class Session:
    """A client, for as long as it says that it is there.

    Args:
        owner: the id of its user.
    """

    id: str
    owner: str
    sdk_version: str
    began: float = field(default_factory=time.time)
    seen: float = field(default_factory=time.monotonic)
    made: dict[int, Made] = field(default_factory=dict)  # runs by their numbers
