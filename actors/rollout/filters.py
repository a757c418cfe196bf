"""Filters: which groups of scored responses are worth training on.

A filter is `keep(record, samples) -> bool`. `record` is the prompt's JSONL object, `samples` the group that was sampled
for it, in the order of drawing; False drops the group whole. Like a reward, it is named in the settings as
`module:function`, and it sees the scores as the reward function returned them.

Importing this file costs no torch and no ray, so that the command line can check a filter at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from actors.rollout.prompts import Record, place_of
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.errors import BatchError, SlimeError, short_repr

if TYPE_CHECKING:
    from actors.engines.pool import SampledResponse

FILTERS: dict[str, str] = {"mixed_groups": "drop groups whose rewards are all equal; arXiv 2503.14476"}
"""The filters that need no module in their name, with a line for people."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A response with its reward."""

    sample: SampledResponse  # text, tokens, response_length, log_probs, finished
    scores: dict[str, float]  # what the reward function returned, `reward` included
    reward: float  # what trains: the reward less `overlong_penalty`


Filter = Callable[[Record, Sequence[ScoredSample]], bool]


def load_filter(name: str) -> Filter:
    """The filter of `FILTERS`, or the function `module:function`; what that returns is checked at each call.

    The returned function raises BatchError where this one raises, or returns neither True nor False.

    Raises:
        ConfigError: the module cannot be imported, or it has no such callable.
    """
    if name == "mixed_groups":
        return mixed_groups
    takes = ("record", "samples")
    return _checked(load_function(name, field="rollout.filter", example="my_filters:keep", takes=takes), name)


def mixed_groups(record: Record, samples: Sequence[ScoredSample]) -> bool:
    """Keeps a group whose rewards differ: one that is all right, or all wrong, has no advantage to train on.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).
    """
    return len({scored.scores["reward"] for scored in samples}) > 1


def _checked(function: Callable[..., Any], name: str) -> Filter:
    @functools.wraps(function)
    def keep(record: Record, samples: Sequence[ScoredSample]) -> bool:
        try:
            kept = function(deepcopy(record), samples)  # what it does to the record is nobody else's
        except (SlimeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's function may raise anything
            raise BatchError(
                f"{failure_of(name, error)} for {place_of(record)}",
                field="rollout.filter",
                hint="correct the function",
            ) from error
        if not isinstance(kept, bool | np.bool_):  # of a list or None, the truth would be a guess
            raise BatchError(
                f"{name} returned {short_repr(kept)} for {place_of(record)}",
                field="rollout.filter",
                hint="return True to keep the group, or False",
            )
        return bool(kept)

    return keep
