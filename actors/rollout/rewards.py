"""Loads reward functions by name, and defines the three of this project.

A reward function is `reward(record, response, finished) -> {"reward": float, ...}`, plain or async; it may also return
only the reward, as a number. `record` is the prompt's JSONL object. `response` is the sampled text, decoded with
`skip_special_tokens=True` and stripped. `finished` is False if the response was cut before an end token. All other keys
of the returned dictionary are logged as metrics.

If the name is a URL, each response is posted there as `{"record": ..., "response": ..., "finished": ...}`; the server
answers with the return value of a reward function as JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from decimal import Decimal
from typing import Any

from actors.rollout.environment import (
    RESERVED,
    Environment,
    EnvironmentFault,
    Prompt,
    StepResult,
    checked_scores,
    finite_number,
)
from actors.rollout.records import place_of
from slimefsdp.config.callables import load_function
from slimefsdp.errors import BatchError, ConfigError, short_repr

Scores = dict[str, float]

# this project's functions, which read a record's `answer`; at the start of a run, every record must have one
READ_ANSWERS = tuple(f"actors.rollout.rewards:{name}" for name in ("exact_match", "final_number", "sorted_digits"))
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_ASK_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy or starting
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0  # pauses before a request is repeated


def load_reward(
    name: str, *, timeout_s: float = math.inf, concurrency: int = 1, field: str = "rollout.reward"
) -> Callable[..., Any]:
    """Returns the reward function `module:function`, or an async function that calls a URL.

    Args:
        field: the setting that has this name as value, for errors.
        timeout_s: limit in seconds on all requests for one response, if the name is a URL.
        concurrency: number of requests to a URL at once.

    Raises:
        ConfigError: the name is malformed, the module cannot be imported, or it has no function that can be called with
            (record, response, finished).
    """
    if is_url(name):
        return _poster(name, timeout_s, concurrency)
    example, takes = "actors.rollout.rewards:exact_match", ("record", "response", "finished")
    function = load_function(name, field=field, example=example, takes=takes, may_be_async=True)
    _refuse_form_of_verl(function, name, field)
    return function


def reward_environment(name: str, *, timeout_s: float = math.inf, concurrency: int = 1) -> type[Environment]:
    """Returns an environment of one turn, which answers a response with the reward function's return value.

    Args:
        timeout_s, concurrency: as in `load_reward`.

    Raises:
        ConfigError: as in `load_reward`.
    """
    reward = load_reward(name, timeout_s=timeout_s, concurrency=concurrency)

    class Scored(Environment):
        def reset(self, record: Mapping[str, Any], seed: int) -> Prompt:
            self._record = record
            return ""  # not used: the policy gets the record's own prompt

        def step(self, response: str, finished: bool) -> Any:
            return reward(self._record, response, finished)

    class ScoredAsync(Scored):
        async def step(self, response: str, finished: bool) -> Any:
            return await reward(self._record, response, finished)

    is_async = any(map(inspect.iscoroutinefunction, (reward, type(reward).__call__)))
    return ScoredAsync if is_async else Scored


def reward_result(value: Any) -> StepResult:
    """Converts the return value of a reward function to the result that ends an episode.

    Raises:
        EnvironmentFault: the value is neither a finite number nor a dictionary of finite numbers with `reward`.
    """
    if not isinstance(value, dict) and (number := finite_number(value)) is not None:
        return StepResult(None, number, True)
    if not isinstance(value, dict) or "reward" not in value:
        hint = "return the reward as a number, or a dictionary of numbers with the key 'reward'"
        raise EnvironmentFault(short_repr(value), hint)
    scores = checked_scores(dict(value), RESERVED)  # a copy, since the methods of a user's class may raise
    return StepResult(None, scores.pop("reward"), True, scores)


def _refuse_form_of_verl(function: Callable[..., Any], name: str, field: str) -> None:
    """Refuses a function with verl's argument names, since it could be called but would misread its arguments."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # some builtins have no signature
        return
    if {"solution_str", "ground_truth"} & parameters.keys():
        called = name.rpartition(":")[2]
        raise ConfigError(
            f"{name!r} takes ({', '.join(parameters)}), as verl calls a reward, and is called with (record, response, "
            "finished)",
            field=field,
            hint=f"define it as {called}(record, response, finished); the record has the columns of its row, such as "
            "answer",
        )


def is_url(name: str) -> bool:
    """Returns whether the name is a URL, not `module:function`."""
    return name.startswith(("http://", "https://"))


def _poster(url: str, timeout_s: float, concurrency: int) -> Callable[..., Awaitable[Any]]:
    """Returns a reward function that posts to a URL, and retries for up to `timeout_s` while the server is busy."""
    import httpx

    clients: list[httpx.AsyncClient] = []  # one client, constructed at the first request, in the event loop

    async def post(record: Mapping[str, Any], response: str, finished: bool) -> Any:
        if not clients:  # with trust_env=False the client ignores the environment's proxies, and .netrc
            limits = httpx.Limits(max_connections=concurrency)
            clients.append(httpx.AsyncClient(trust_env=False, limits=limits, timeout=None))
        body: Any = {"record": dict(record), "response": response, "finished": finished}
        deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while True:
            is_last = time.monotonic() + pause_s > deadline
            try:
                answer = await clients[0].post(url, json=body)
                if answer.status_code not in _ASK_AGAIN or is_last:
                    return answer.raise_for_status().json()
            except httpx.TransportError:
                if is_last:
                    raise
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # random, to spread the requests of a step
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    return post


def exact_match(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Gives reward 1 to a finished response that equals the record's `answer`, and 0 to any other response.

    Raises:
        BatchError: the record has no `answer`.
    """
    answer = _answer(record)  # read also for an unfinished response, so that a missing answer is always an error
    return {"reward": float(finished and response.strip() == answer)}


def final_number(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Gives reward 1 to a finished response whose last number is the last number of the `answer`, 0 to any other.

    The answer may be, for example, `42`, `1,234.5` or a solution that ends with `#### 42`, as in GSM8K.

    Raises:
        BatchError: the record has no `answer`, or its `answer` has no number.
    """
    wanted = _last_number(_answer(record))
    if wanted is None:
        raise BatchError(
            f"the answer of {place_of(record)} holds no number",
            field="answer",
            hint="give each record an answer with a number, or choose another reward function",
        )
    return {"reward": float(finished and _last_number(response) == wanted)}


def _last_number(text: str) -> Decimal | None:
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def sorted_digits(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Gives a reward of 0.5 for the exact `answer`, and up to 0.5 for the share of right positions; 0 if unfinished.

    The share is relative to the longer of response and answer, so that neither padding nor cutting a response raises
    the share. The score `exact` is 1 for a finished response that equals the answer, otherwise 0.

    Raises:
        BatchError: the record has no `answer`.
    """
    answer, response = _answer(record), response.strip()
    if not finished:
        return {"reward": 0.0, "exact": 0.0}
    exact = float(response == answer)
    right = sum(digit == wanted for digit, wanted in zip(response, answer, strict=False))
    return {"reward": 0.5 * exact + 0.5 * right / max(len(response), len(answer)), "exact": exact}


def _answer(record: Mapping[str, Any]) -> str:
    value = record.get("answer")
    answer = "" if value is None else str(value).strip()
    if not answer:
        raise BatchError(
            f"the record of {place_of(record)} has no answer",
            field="answer",
            hint="give each record of the prompt file an 'answer'",
        )
    return answer
