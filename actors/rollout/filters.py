"""Filters decide which groups of scored responses are trained on.

A filter is `keep(record, samples) -> bool`. `record` is the prompt's JSONL object, and `samples` is the group that was
sampled for it, in the order of drawing. False drops the whole group. The settings name a filter as `module:function`,
like a reward. It sees the scores as the reward function returned them.

Importing this module imports neither torch nor Ray, so that the command line can check a filter quickly.
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
"""The built-in filters, which are named without a module, with a description of each."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    sample: SampledResponse
    scores: dict[str, float]  # what the reward function returned, `reward` included
    reward: float  # the reward that is trained on, after `overlong_penalty`


Filter = Callable[[Record, Sequence[ScoredSample]], bool]


def load_filter(name: str) -> Filter:
    """Returns a filter of `FILTERS`, or the function `module:function`.

    The returned filter raises BatchError if the function raises, or returns neither True nor False.

    Raises:
        ConfigError: the module cannot be imported, or it has no such callable.
    """
    if name == "mixed_groups":
        return mixed_groups
    takes = ("record", "samples")
    return _checked(load_function(name, field="rollout.filter", example="my_filters:keep", takes=takes), name)


def mixed_groups(record: Record, samples: Sequence[ScoredSample]) -> bool:
    """Keeps a group whose rewards differ; if all are equal, all advantages are zero and nothing can be learned.

    Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).
    """
    return len({scored.scores["reward"] for scored in samples}) > 1


def _checked(function: Callable[..., Any], name: str) -> Filter:
    @functools.wraps(function)
    def keep(record: Record, samples: Sequence[ScoredSample]) -> bool:
        try:
            kept = function(deepcopy(record), samples)  # a copy, since the function may change the record
        except (SlimeError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the user's function may raise anything
            raise BatchError(
                f"{failure_of(name, error)} for {place_of(record)}",
                field="rollout.filter",
                hint="correct the function",
            ) from error
        if not isinstance(kept, bool | np.bool_):  # the truth value of anything else would be a guess
            raise BatchError(
                f"{name} returned {short_repr(kept)} for {place_of(record)}",
                field="rollout.filter",
                hint="return True to keep the group, or False",
            )
        return bool(kept)

    return keep
