"""Loads reward functions by name, and defines three of our own.

A reward function is `reward(record, response, finished) -> {"reward": float, ...}`, plain or async; it may also return
only the reward, as a number. `record` is the prompt's JSONL object. `response` is the sampled text, decoded with
`skip_special_tokens=True` and stripped, so that end tokens and padding never take part in a comparison. `finished` is
False if the response was cut before an end token. Every other key that it returns is logged as a metric.

If the name is a URL, each response is posted there as `{"record": ..., "response": ..., "finished": ...}`; the answer
is the value of a reward function as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

from actors.rollout.environment import RESERVED, Environment, Prompt, StepResult, checked_score, finite_number
from actors.rollout.prompts import place_of
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.errors import BatchError, ConfigError, SlimeError, short_repr

Scores = dict[str, float]

# our functions that compare with a record's `answer`; a start checks that every record has one
READ_ANSWERS = tuple(f"actors.rollout.rewards:{name}" for name in ("exact_match", "final_number", "sorted_digits"))
_CORRECT = "correct the function"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_ASK_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy or starting
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0  # before a request is repeated


def failed_reward(problem: str, record: Mapping[str, Any], hint: str) -> BatchError:
    return BatchError(f"{problem} for {place_of(record)}", field="rollout.reward", hint=hint)


def load_reward(
    name: str, *, timeout_s: float = math.inf, concurrency: int = 1, field: str = "rollout.reward"
) -> Callable[..., Any]:
    """Returns the reward function `module:function`, or one that calls a URL; both check each value that they return.

    The returned function is async if the named one is. It raises BatchError, naming the record, if the named function
    raises, or returns neither a finite number nor a dictionary of finite numbers with `reward`.

    Args:
        timeout_s: limit in seconds on all requests for one response, if the name is a URL.
        concurrency: number of requests to a URL at once.
        field: the setting that has the name.

    Raises:
        ConfigError: the name is malformed, the module cannot be imported, or it has no function that can be called with
            (record, response, finished).
    """
    if is_url(name):
        return _checked(_asking(name, timeout_s, concurrency), name)
    example, takes = "actors.rollout.rewards:exact_match", ("record", "response", "finished")
    function = load_function(name, field=field, example=example, takes=takes, may_be_async=True)
    _refuse_form_of_verl(function, name, field)
    return _checked(function, name)


def reward_environment(name: str, *, timeout_s: float = math.inf, concurrency: int = 1) -> type[Environment]:
    """Returns an environment of one turn whose answer is the reward of its response.

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

        def step(self, response: str, finished: bool) -> StepResult | Awaitable[StepResult]:
            return _as_result(reward(self._record, response, finished))

    class ScoredAsync(Scored):
        async def step(self, response: str, finished: bool) -> StepResult:
            return _as_result(await reward(self._record, response, finished))

    return ScoredAsync if inspect.iscoroutinefunction(reward) else Scored


def _as_result(scores: Scores) -> StepResult:
    others = {name: value for name, value in scores.items() if name != "reward"}
    return StepResult(None, scores["reward"], True, others)


def _refuse_form_of_verl(function: Callable[..., Any], name: str, field: str) -> None:
    """Refuses a function with verl's argument names: it could be called, but would misread its arguments."""
    try:
        parameters = inspect.signature(function).parameters
    except (ValueError, TypeError):  # some builtins have none
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


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def failure(error: BaseException, record: Mapping[str, Any]) -> BaseException:
        if isinstance(error, SlimeError | KeyboardInterrupt):
            return error  # KeyboardInterrupt is the operator's, not a failure of the function
        failed = failed_reward(failure_of(name, error), record, _CORRECT)
        failed.__cause__ = error
        return failed

    if _is_async(function):

        @functools.wraps(function)
        async def later(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
            try:
                scores = await function(record, response, finished)
            except BaseException as error:  # the user's function may raise anything
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # the deadline of the call has passed
                raise failure(error, record)  # noqa: B904 (the cause is set there)
            return _checked_scores(scores, name, record)

        return later

    @functools.wraps(function)
    def reward(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
        try:
            scores = function(record, response, finished)
        except BaseException as error:  # the user's function may raise anything
            raise failure(error, record)  # noqa: B904 (the cause is set there)
        return _checked_scores(scores, name, record)

    return reward


def _is_async(function: Callable[..., Any]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _checked_scores(scores: Any, name: str, record: Mapping[str, Any]) -> Scores:
    if not isinstance(scores, dict) and (number := finite_number(scores)) is not None:
        return {"reward": number}
    if not isinstance(scores, dict) or "reward" not in scores:
        hint = "return the reward as a number, or a dictionary of numbers with the key 'reward'"
        raise failed_reward(f"{name} returned {short_repr(scores)}", record, hint)
    numbers: Scores = {}
    for key, value in dict(scores).items():  # a copy, since the methods of a user's class may raise
        number = checked_score(key, value)
        if number is None:
            problem = f"{name} returned {short_repr(key)}: {short_repr(value)}"
            raise failed_reward(problem, record, "return finite numbers only, under short names")
        if key in RESERVED:
            problem = f"{name} returned a score called {key}, and a run logs something of its own under this name"
            raise failed_reward(problem, record, "return it under another name")
        numbers[key] = number
    return numbers


def is_url(name: str) -> bool:
    """Returns whether the name is a URL, which is called over HTTP."""
    return name.startswith(("http://", "https://"))


def _asking(url: str, timeout_s: float, concurrency: int) -> Callable[..., Awaitable[Any]]:
    """Returns a reward function that posts to a URL, and retries for up to `timeout_s` while the server is busy."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    session.trust_env = False  # ignores proxies of the environment, and .netrc
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_connections=1, pool_maxsize=concurrency))
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")

    def post(record: Mapping[str, Any], response: str, finished: bool) -> Any:
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        body: Any = {"record": dict(record), "response": response, "finished": finished}
        while True:
            left_s = max(0.001, deadline - time.monotonic())
            try:
                answer = session.post(url, json=body, timeout=left_s if math.isfinite(left_s) else None)
                is_away = answer.status_code in _ASK_AGAIN
            except (requests.ConnectionError, requests.Timeout):
                if time.monotonic() + pause_s > deadline:
                    raise
                is_away = True
            if not is_away or time.monotonic() + pause_s > deadline:
                answer.raise_for_status()
                return answer.json()
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # spreads the requests of a step
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def ask(record: Mapping[str, Any], response: str, finished: bool) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, post, record, response, finished)

    return ask


def exact_match(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Rewards a finished response that equals the record's `answer` with 1, any other with 0.

    Raises:
        BatchError: the record has no `answer`.
    """
    answer = _answer(record)  # read also for an unfinished response, so that a missing answer is always an error
    return {"reward": float(finished and response.strip() == answer)}


def final_number(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Rewards a finished response whose last number equals the last number of the `answer` with 1, any other with 0.

    It suits answers such as `42`, `1,234.5` or a worked solution that ends with `#### 42`, as in GSM8K.

    Raises:
        BatchError: the record has no `answer`, or one without a number.
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
    """Returns half the reward for an exact `answer`, and half for the share of correct positions; 0 if unfinished.

    The share is of the longer of the two texts, so that neither padding nor cutting a response raises it. The score
    `exact` is 1 for a finished response that equals the answer, else 0.

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
