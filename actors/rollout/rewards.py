"""Rewards: the contract of a reward function, how one is found by name, and two that come with the project.

A reward function is `reward(record, response, finished) -> {"reward": float, ...}`. `record` is the prompt's JSONL
object; `response` is the sampled text decoded with `skip_special_tokens=True` and stripped, so that end tokens and
padding never take part in a comparison; `finished` is False where the response was cut before an end token. Every other
key it returns is logged as a metric of that name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from actors.rollout.prompts import place_of
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.errors import BatchError, SlimeError, short_repr

RewardFunction = Callable[[dict[str, Any], str, bool], dict[str, float]]

MOST = 3e38  # what a batch holds, in float32
MAX_NAME = 200  # characters of what is logged under its name
# those of this file that compare with a record's `answer`, which is looked for before a start
READ_ANSWERS = tuple(f"actors.rollout.rewards:{name}" for name in ("exact_match", "sorted_digits"))


def load_reward(name: str) -> RewardFunction:
    """The reward function named `module:function`; what it returns is checked at each call.

    The returned function raises BatchError, naming the record, where this one raises, or returns anything but a
    dictionary of finite numbers with `reward`.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, it has no such callable, or that cannot
            be called as a reward is.
    """
    example, takes = "actors.rollout.rewards:exact_match", ("record", "response", "finished")
    return _checked(load_function(name, field="rollout.reward", example=example, takes=takes), name)


def _checked(function: Callable[..., Any], name: str) -> RewardFunction:
    def refused(problem: str, record: dict[str, Any], hint: str) -> BatchError:
        return BatchError(f"{problem} for {place_of(record)}", field="rollout.reward", hint=hint)

    @functools.wraps(function)
    def reward(record: dict[str, Any], response: str, finished: bool) -> dict[str, float]:
        try:
            scores = function(record, response, finished)
        except SlimeError:
            raise
        except KeyboardInterrupt:  # of who sits at the terminal
            raise
        except BaseException as error:  # the user's function may raise anything
            raise refused(failure_of(name, error), record, "correct the function") from error
        if not isinstance(scores, dict) or "reward" not in scores:
            hint = "return a dictionary of numbers with the key 'reward'"
            raise refused(f"{name} returned {short_repr(scores)}", record, hint)
        numbers: dict[str, float] = {}
        for key, value in dict(scores).items():  # a class of the user's own may have methods that raise
            number = _finite(value)
            if number is None or not isinstance(key, str) or not (key.isprintable() and 0 < len(key) <= MAX_NAME):
                problem = f"{name} returned {short_repr(key)}: {short_repr(value)}"
                raise refused(problem, record, "return finite numbers only, under short names")
            numbers[key] = number
        return numbers

    return reward


def _finite(value: Any) -> float | None:
    """The number that a value is, numpy's and torch's scalars too; None where it is none, or not finite."""
    # float() would take the text "1", and an array of one number
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = float(value)
    except (Exception, SystemExit):  # a whole number beyond floats; an object may raise anything
        return None
    return number if abs(number) <= MOST else None  # NaN is not


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
            f"the record of {place_of(record)} has no answer",
            field="answer",
            hint="give each record of the prompt file an 'answer'",
        )
    return answer
