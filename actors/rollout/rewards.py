"""Rewards: the contract of a reward function, how one is found by name, and two that come with the project.

A reward function is `reward(record, response, finished) -> {"reward": float, ...}`. `record` is the prompt's JSONL
object; `response` is the sampled text decoded with `skip_special_tokens=True` and stripped, so that end tokens and
padding never take part in a comparison; `finished` is False where the response was cut before an end token. Every other
key it returns is logged as a metric of that name.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from slimefsdp.errors import BatchError
from slimefsdp.functions import load_function

RewardFunction = Callable[[dict[str, Any], str, bool], dict[str, float]]


def load_reward(name: str) -> RewardFunction:
    """The reward function named `module:function`; what it returns is checked at each call.

    The returned function raises BatchError where the result is not a dictionary of finite numbers with `reward`.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, or it has no such callable.
    """
    function = load_function(name, field="rollout.reward", example="actors.rollout.rewards:exact_match")
    return _checked(function, name)


def _checked(function: Callable[..., Any], name: str) -> RewardFunction:
    @functools.wraps(function)
    def reward(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
        scores = function(record, response, finished)
        if not isinstance(scores, dict) or "reward" not in scores:
            raise BatchError(
                f"{name} returned {scores!r}",
                field="rollout.reward",
                hint="return a dictionary of numbers with the key 'reward'",
            )
        for key, value in scores.items():
            # float() takes numpy and torch scalars too, and would take the text "1"
            if isinstance(value, str) or not hasattr(value, "__float__") or not math.isfinite(value):
                raise BatchError(
                    f"{name} returned {key}={value!r} for the prompt {record.get('prompt')!r}",
                    field="rollout.reward",
                    hint="return finite numbers only",
                )
        return {key: float(value) for key, value in scores.items()}

    return reward


def exact_match(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """Reward 1 for a finished response that is the record's `answer`, else 0.

    Raises:
        BatchError: the record has no `answer`.
    """
    return {"reward": float(finished and response.strip() == _answer(record))}


def sorted_digits(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
    """Reward half for being the record's `answer`, half for the share of positions that are right; 0 if unfinished.

    The share is of the longer of the two texts, so neither padding a response nor cutting it short raises the share.
    `exact` is 1 for a finished response that is the answer, else 0.

    Raises:
        BatchError: the record has no `answer`.
    """
    answer, response = _answer(record), response.strip()
    if not finished:
        return {"reward": 0.0, "exact": 0.0}
    exact = float(response == answer)
    right = sum(digit == wanted for digit, wanted in zip(response, answer, strict=False))
    return {"reward": 0.5 * exact + 0.5 * right / max(len(response), len(answer)), "exact": exact}


def _answer(record: dict[str, Any]) -> str:
    given = record.get("answer")
    answer = "" if given is None else str(given).strip()
    if not answer:
        raise BatchError(
            f"the record of the prompt {record.get('prompt')!r} has no answer",
            field="answer",
            hint="give each record of the prompt file an 'answer'",
        )
    return answer
