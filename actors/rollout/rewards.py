"""Rewards: the contract of a reward function, how one is found by name, and three that come with the project.

A reward function is `reward(record, response, finished) -> {"reward": float, ...}`, plain or async; it may also return
the reward alone, as a number. `record` is the
prompt's JSONL object; `response` is the sampled text decoded with `skip_special_tokens=True` and stripped, so that end
tokens and padding never take part in a comparison; `finished` is False where the response was cut before an end token.
Every other key it returns is logged as a metric of that name.

A URL in its place is asked by POST with `{"record": ..., "response": ..., "finished": ...}`, and answers with what a
function would return.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Protocol

from actors.rollout.prompts import place_of
from slimefsdp.config.callables import failure_of, load_function
from slimefsdp.errors import BatchError, ConfigError, SlimeError, short_repr

if TYPE_CHECKING:  # finding a reward costs no pydantic
    from slimefsdp.config.rollout import RolloutSettings

Scores = dict[str, float]
Outcome = Scores | SlimeError  # what a reward function returned, or why it did not

MOST = 3e38  # what a batch holds, in float32
MAX_NAME = 200  # characters of what is logged under its name
# those of this file that compare with a record's `answer`, which is looked for before a start
READ_ANSWERS = tuple(f"actors.rollout.rewards:{name}" for name in ("exact_match", "final_number", "sorted_digits"))
_CORRECT = "correct the function"
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_ASK_AGAIN = (408, 425, 429, 500, 502, 503, 504)  # statuses of a server that is busy or starting
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0  # before a request is made again


@dataclass(frozen=True, slots=True)
class Response:
    """What a reward function is given."""

    record: Mapping[str, Any]
    text: str
    finished: bool


class Scoring(Protocol):
    """Responses that are scored as they come."""

    def add(self, response: Response) -> None:
        """Has one more scored; does not wait for it."""
        ...

    def finish(self) -> list[Outcome]:
        """Waits for all; the outcomes in the order in which responses were added."""
        ...


class Rewards(Protocol):
    """Whatever scores responses for a `Collector`."""

    def scoring(self) -> Scoring:
        """For the responses of one call of the engines."""
        ...


class ScoringAtTheEnd:
    """Scores all responses once the last one is there.

    Args:
        score: the outcome of each response, in their order.
    """

    def __init__(self, score: Callable[[Sequence[Response]], list[Outcome]]) -> None:
        self._score = score
        self._responses: list[Response] = []

    def add(self, response: Response) -> None:
        """As `Scoring`."""
        self._responses.append(response)

    def finish(self) -> list[Outcome]:
        """As `Scoring`."""
        return self._score(self._responses)


class RewardScorer:
    """Calls a reward function in this process, and checks what it returns.

    Args:
        name: what `rollout.reward` is.
        timeout_s: for each call of an async function, or for all requests about one response; a plain function cannot
            be ended from inside its process.
        concurrency: requests to a URL under way at once.

    Raises:
        ConfigError: as `load_reward`.
    """

    def __init__(self, name: str, *, timeout_s: float = math.inf, concurrency: int = 1) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._reward = load_reward(name, timeout_s=timeout_s, concurrency=concurrency)
        self.is_async = inspect.iscoroutinefunction(self._reward)
        # one loop for good: clients that a module keeps belong to the loop in which they were first used
        self._runner = asyncio.Runner() if self.is_async else None

    def scoring(self) -> ScoringAtTheEnd:
        """As `Rewards`: this process has nothing to score beside."""
        return ScoringAtTheEnd(self.score)

    def score(self, responses: Sequence[Response], until: float = math.inf) -> list[Outcome]:
        """The outcomes of the first responses: of all, but for a plain function when the time is over.

        Args:
            until: of `time.monotonic`; the response that is scored then is the last.
        """
        if self._runner is not None:
            return self._runner.run(self._all_at_once(responses))
        outcomes: list[Outcome] = []
        for response in responses:
            try:
                # what a function does to its record is nobody else's, in a process of its own as here
                outcomes.append(self._reward(deepcopy(response.record), response.text, response.finished))
            except SlimeError as error:
                outcomes.append(error)
            if time.monotonic() > until:
                break
        return outcomes

    async def _all_at_once(self, responses: Sequence[Response]) -> list[Outcome]:
        return await asyncio.gather(*map(self._one, responses))

    async def _one(self, response: Response) -> Outcome:
        try:
            async with asyncio.timeout(self._timeout_s if math.isfinite(self._timeout_s) else None) as deadline:
                scores: Scores = await self._reward(deepcopy(response.record), response.text, response.finished)
                return scores
        except SlimeError as error:
            return error
        except TimeoutError:
            assert deadline.expired(), "any other is an error of the function, and typed"
            return overdue(self._name, response, self._timeout_s)


def driver_scorer(settings: RolloutSettings) -> RewardScorer:
    """What scores where `rollout.reward_workers` is 0, and shows before a start that others can.

    Raises:
        ConfigError: as `load_reward`; or an async function or a URL is left to the driver.
    """
    assert settings.reward is not None
    scorer = RewardScorer(settings.reward, timeout_s=settings.reward_timeout_s, concurrency=settings.reward_concurrency)
    if scorer.is_async and settings.reward_workers == 0:
        raise ConfigError(
            f"rollout.reward_workers=0, and {settings.reward} is {'a URL' if is_url(settings.reward) else 'async'}",
            field="rollout.reward_workers",
            hint="set it to 1 or more: the driver waits for one response at a time",
        )
    return scorer


def overdue(name: str, response: Response, timeout_s: float) -> BatchError:
    """The outcome of a call that did not return."""
    hint = "correct the function, or raise rollout.reward_timeout_s"
    return failed_reward(f"{name} did not return within {timeout_s:g} s", response.record, hint)


def failed_reward(problem: str, record: Mapping[str, Any], hint: str) -> BatchError:
    """The outcome of a call that failed."""
    return BatchError(f"{problem} for {place_of(record)}", field="rollout.reward", hint=hint)


def load_reward(
    name: str, *, timeout_s: float = math.inf, concurrency: int = 1, field: str = "rollout.reward"
) -> Callable[..., Any]:
    """The reward function named `module:function`, or what asks a URL; what it returns is checked at each call.

    The returned function is async where the named one is. It raises BatchError, naming the record, where that one
    raises, or returns anything but a dictionary of finite numbers with `reward`.

    Args:
        timeout_s, concurrency: as `RewardScorer`; of a URL.
        field: the setting that names it.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, it has no such callable, or that cannot
            be called as a reward is.
    """
    if is_url(name):
        return _checked(_asking(name, timeout_s, concurrency), name)
    example, takes = "actors.rollout.rewards:exact_match", ("record", "response", "finished")
    function = load_function(name, field=field, example=example, takes=takes, may_be_async=True)
    _refuse_form_of_verl(function, name, field)
    return _checked(function, name)


def _refuse_form_of_verl(function: Callable[..., Any], name: str, field: str) -> None:
    """It can be called with three arguments, and would take them for others."""
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
            return error  # the last is of who sits at the terminal
        found = failed_reward(failure_of(name, error), record, _CORRECT)
        found.__cause__ = error
        return found

    if _is_async(function):

        @functools.wraps(function)
        async def later(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
            try:
                scores = await function(record, response, finished)
            except BaseException as error:  # the user's function may raise anything
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise  # of a deadline
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
    if not isinstance(scores, dict) and (number := _finite(scores)) is not None:
        return {"reward": number}
    if not isinstance(scores, dict) or "reward" not in scores:
        hint = "return the reward as a number, or a dictionary of numbers with the key 'reward'"
        raise failed_reward(f"{name} returned {short_repr(scores)}", record, hint)
    numbers: Scores = {}
    for key, value in dict(scores).items():  # a class of the user's own may have methods that raise
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
    """Whether a `rollout.reward` is asked over HTTP."""
    return name.startswith(("http://", "https://"))


def _asking(url: str, timeout_s: float, concurrency: int) -> Callable[..., Awaitable[Any]]:
    """A reward function that asks a URL, again where the server is busy or away, until `timeout_s` is over."""
    import requests
    from requests.adapters import HTTPAdapter

    session = requests.Session()
    session.trust_env = False  # no proxy of the environment between a run and its judge, and no .netrc
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(pool_connections=1, pool_maxsize=concurrency))
    threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward")

    def asked(record: Mapping[str, Any], response: str, finished: bool) -> Any:
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
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # not all of a step's requests at once
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def ask(record: Mapping[str, Any], response: str, finished: bool) -> Any:
        return await asyncio.get_running_loop().run_in_executor(threads, asked, record, response, finished)

    return ask


RESERVED = {
    *("response_length", "response_length_max", "prompt_length", "prompt_length_max", "truncated", "overlong_penalty"),
    *("stage", "rounds", "groups_dropped", "baseline_reward", "reward_failures"),
}
"""Names under which a run logs something else of its rollouts; no score has one of them."""


def checked_score(name: Any, value: Any) -> float | None:
    """The number that is logged under a name; None where it is no finite one, or the name is none or too long."""
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MAX_NAME
    return _finite(value) if is_name else None


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


def exact_match(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Reward 1 for a finished response that is the record's `answer`, else 0.

    Raises:
        BatchError: the record has no `answer`.
    """
    answer = _answer(record)  # of an unfinished response, too: a record without one is a mistake
    return {"reward": float(finished and response.strip() == answer)}


def final_number(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
    """Reward 1 for a finished response whose last number is that of the record's `answer`, else 0.

    For answers such as `42`, `1,234.5` or a worked solution that ends with `#### 42`, as those of GSM8K.

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
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def sorted_digits(record: Mapping[str, Any], response: str, finished: bool) -> Scores:
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


def _answer(record: Mapping[str, Any]) -> str:
    given = record.get("answer")
    answer = "" if given is None else str(given).strip()
    if not answer:
        raise BatchError(
            f"the record of {place_of(record)} has no answer",
            field="answer",
            hint="give each record of the prompt file an 'answer'",
        )
    return answer
