"""Hosts the user's code, an environment or a reward function, in this process.

A reward function runs as an environment of one turn: the episode begins with the record's prompt, and the answer to its
only response is the reward. Importing this module imports neither torch nor Ray.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import json
import math
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.rollout.environment import (
    Environment,
    EnvironmentFault,
    Prompt,
    StepResult,
    checked_prompt,
    checked_result,
    is_async,
    load_environment,
)
from actors.rollout.records import place_of
from actors.rollout.rewards import is_url, reward_environment, reward_result
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import failure_of
from slimefsdp.errors import BatchError, ConfigError, SlimeError, short_repr

# After this many seconds of answering calls with plain code, the host returns the answers so far. This time is short,
# so that all processes end a step at about the same time, but long enough for many calls of cheap code.
TURN_S = 0.2
_CLOSE_S = 10.0  # limit on the time of close()

EpisodeKey = tuple[int, int, int]
"""(number of the driver's call of `EpisodeRunner.run`, index of the record in that call, number in the group)."""


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """A request for the prompt of an episode, or for the answer to its last response."""

    key: EpisodeKey
    record: Mapping[str, Any]
    seed: int
    responses: tuple[tuple[str, bool], ...]  # the texts so far, and whether each is finished (not cut)
    digests: tuple[str, ...] = ()  # of the answers so far, to the request for the prompt and all earlier responses
    is_last: bool = False  # whether the episode ends after this answer, whatever the environment returns

    @property
    def turn(self) -> int:
        """Returns n if the call asks for the answer to the nth response, and 0 if the call asks for the prompt."""
        return len(self.responses)


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an environment: the `prompt` at the beginning of an episode, or the `result` of a response."""

    digest: str
    prompt: Prompt | None = None
    result: StepResult | None = None


@dataclass(frozen=True, slots=True)
class UserCode:
    """Holds the settings of a run's environment or reward function.

    Args:
        field: the setting that names the code.
        arguments: keyword arguments of the environment's class.
        workers: number of processes that run the code; with 0, the driver runs the code itself.
        timeout_s: limit on the time of each answer.
        concurrency: limit on the number of calls that one process answers at once if the code is asynchronous.
    """

    field: Literal["rollout.environment", "rollout.reward"]
    name: str
    arguments: Mapping[str, Any]
    workers: int
    timeout_s: float
    concurrency: int

    @classmethod
    def of(cls, config: RunConfig) -> UserCode:
        rollout, environment = config.rollout, config.environment
        if rollout.environment is not None:
            return cls(
                "rollout.environment", rollout.environment, environment.arguments,
                rollout.reward_workers, rollout.reward_timeout_s, rollout.reward_concurrency,
            )  # fmt: skip
        assert rollout.reward is not None
        return cls(
            "rollout.reward", rollout.reward, {},
            rollout.reward_workers, rollout.reward_timeout_s, rollout.reward_concurrency,
        )  # fmt: skip

    @property
    def is_reward(self) -> bool:
        """Returns whether the code is a reward function, which has one turn and keeps no state between responses."""
        return self.field == "rollout.reward"

    @property
    def correct_it(self) -> str:
        return "correct the function" if self.is_reward else "correct the environment"

    def load(self) -> type[Environment]:
        """Imports the code and returns the environment's class; for a reward function, a class that calls it.

        Raises:
            ConfigError: as in `load_environment` and `actors.rollout.rewards.load_reward`.
        """
        if self.is_reward:
            return reward_environment(self.name, timeout_s=self.timeout_s, concurrency=self.concurrency)
        return load_environment(self.name, self.arguments)

    def close_s(self, environment: type[Environment]) -> float:
        """Returns the limit on the time of `close`, which runs before the last answer of an episode is returned."""
        return 0.0 if environment.close is Environment.close else min(self.timeout_s, _CLOSE_S)

    def failure(self, problem: str, call: EpisodeCall, turn: int, hint: str | None = None) -> BatchError:
        """Returns the error for a failed call.

        Args:
            turn: the turn that failed; 0 is the beginning of the episode.
        """
        when = f"in turn {turn}" if turn else "at the beginning"
        where = "for" if self.is_reward else f"{when} of episode {call.key[2]} of"
        return BatchError(f"{problem} {where} {place_of(call.record)}", field=self.field, hint=hint or self.correct_it)

    def overdue(self, call: EpisodeCall, turn: int, what: str = "") -> BatchError:
        """Returns the error of a call that did not return in time; `what` follows the code's name in the text."""
        problem = f"{self.name}{what} did not return within {self.timeout_s:g} s"
        return self.failure(problem, call, turn, f"{self.correct_it}, or raise rollout.reward_timeout_s")


def checked_code(config: RunConfig) -> tuple[UserCode, type[Environment]]:
    """Imports the code that the settings name and checks the settings of its processes.

    Returns:
        The code's settings, and the environment's class.

    Raises:
        ConfigError: as in `UserCode.load`; or the code is async or a URL, which rollout.reward_workers=0 forbids.
    """
    code = UserCode.of(config)
    environment = code.load()
    if is_async(environment) and code.workers == 0:
        raise ConfigError(
            f"rollout.reward_workers=0, and {code.name} is {'a URL' if is_url(code.name) else 'async'}",
            field="rollout.reward_workers",
            hint="set it to 1 or more: the driver waits for one response at a time",
        )
    return code, environment


@dataclass(slots=True)
class _Episode:
    """The state of an episode in the process that runs its environment."""

    environment: Environment
    responses: list[tuple[str, bool]] = field(default_factory=list)  # the responses that the environment has answered


class CodeHost:
    """Runs the user's code in this process.

    All asynchronous code runs in the same event loop, since a module's HTTP clients belong to the loop in which they
    were first used. Plain code runs outside of any loop, so that it may start a loop itself.
    """

    def __init__(self, code: UserCode) -> None:
        self._code = code
        self._class = code.load()
        self._is_async = is_async(self._class)
        self._runner = asyncio.Runner()
        self._episodes: dict[EpisodeKey, _Episode] = {}

    def run(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        """Returns the answers to the first calls; async code answers all, plain code as many as `TURN_S` allows."""
        if self._is_async:
            return self._runner.run(self._all_at_once(calls))
        outcomes: list[Answer | SlimeError] = []
        until = time.monotonic() + TURN_S
        for call in calls:
            outcomes.append(_run_plain(self._outcome(call)))
            if time.monotonic() > until:
                break
        return outcomes

    def forget(self, number: int) -> None:
        """Closes the remaining environments of the driver's call of this number (the first part of `EpisodeKey`)."""
        for key in [key for key in self._episodes if key[0] == number]:
            closing = self._close(key)
            self._runner.run(closing) if self._is_async else _run_plain(closing)

    async def _all_at_once(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        last: dict[EpisodeKey, asyncio.Task[Answer | SlimeError]] = {}
        tasks = []
        for call in calls:  # a response that was drawn again has a second call, which must follow the first
            task = asyncio.create_task(self._outcome(call, after=last.get(call.key)))
            last[call.key] = task
            tasks.append(task)
        return await asyncio.gather(*tasks)

    async def _outcome(self, call: EpisodeCall, after: asyncio.Task[Any] | None = None) -> Answer | SlimeError:
        if after is not None:
            await asyncio.wait([after])
        try:
            answer = await self._answer(call)
        except SlimeError as error:
            await self._close(call.key)
            return error
        if call.is_last or (answer.result is not None and answer.result.done):
            await self._close(call.key)
        return answer

    async def _answer(self, call: EpisodeCall) -> Answer:
        """Returns the answer to the last response, after running all turns that this process has not run.

        Raises:
            BatchError: the code raised, did not return in time or returned an unusable value; or the episode was
                repeated in this process, and an answer differs from the first time.
        """
        episode = self._episodes.get(call.key)
        if episode is None or list(call.responses[:-1]) != episode.responses:
            await self._close(call.key)
            environment = await self._returned(call, 0, self._class, **deepcopy(dict(self._code.arguments)))
            episode = self._episodes[call.key] = _Episode(environment)
            prompt = await self._returned(call, 0, environment.reset, deepcopy(call.record), call.seed)
            if not self._code.is_reward:
                answer = self._checked(call, 0, functools.partial(_answer_of_prompt, prompt))
        for turn in range(len(episode.responses) + 1, call.turn + 1):
            text, finished = call.responses[turn - 1]
            result = await self._returned(call, turn, episode.environment.step, text, finished)
            episode.responses.append((text, finished))
            answer = self._checked(call, turn, functools.partial(_answer_of_result, result, self._code.is_reward))
        return answer

    def _checked(self, call: EpisodeCall, turn: int, convert: Callable[[], Answer]) -> Answer:
        """Returns the result of `convert`; checks that it equals the earlier answer to this turn, if there was one."""
        try:
            answer = convert()
        except EnvironmentFault as fault:
            raise self._code.failure(f"{self._code.name} returned {fault}", call, turn, fault.hint) from None
        if turn < len(call.digests) and answer.digest != call.digests[turn]:
            raise self._code.failure(
                f"{self._code.name}, made again after its process was lost, did not answer as it had before",
                call, turn, "have its answers follow from record, seed and responses alone",
            )  # fmt: skip
        return answer

    async def _returned(
        self, call: EpisodeCall, turn: int, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """Calls a function of the user's code and returns its value.

        Only asynchronous code has a deadline here; the driver ends a process whose plain code takes too long.
        """
        code = self._code
        deadline = _deadline(code.timeout_s) if self._is_async else None
        try:
            async with deadline or nullcontext():
                return await self._awaited(function(*args, **named))
        except BaseException as error:  # the user's code may raise anything
            if deadline is not None and isinstance(error, TimeoutError) and deadline.expired():
                raise code.overdue(call, turn) from None
            if isinstance(error, KeyboardInterrupt) or self._is_cancelled(error):
                raise
            if isinstance(error, SlimeError):
                if code.is_reward:
                    raise
                raise code.failure(f"{code.name}: {error.message}", call, turn, error.hint) from error
            raise code.failure(failure_of(code.name, error), call, turn) from error

    async def _awaited(self, value: Any) -> Any:
        """Returns a value of the user's code, awaited if it is awaitable."""
        if not inspect.isawaitable(value):
            return value
        return await value if self._is_async else self._runner.run(_coroutine_of(value))

    async def _close(self, key: EpisodeKey) -> None:
        """Closes an environment; errors are only printed, since the episode has ended."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        try:
            async with _deadline(self._code.close_s(self._class)) if self._is_async else nullcontext():
                await self._awaited(episode.environment.close())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or self._is_cancelled(error):
                raise
            print(failure_of(self._code.name, error), file=sys.stderr, flush=True)

    def _is_cancelled(self, error: BaseException) -> bool:
        """Returns whether the error cancels the host's own task, and not a task that the user's code awaits."""
        if not (self._is_async and isinstance(error, asyncio.CancelledError)):
            return False
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0


def _run_plain(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that never suspends, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it awaits something")


async def _coroutine_of(awaitable: Any) -> Any:
    return await awaitable


def _deadline(seconds: float) -> asyncio.Timeout:
    return asyncio.timeout(seconds if math.isfinite(seconds) else None)


def _answer_of_prompt(value: Any) -> Answer:
    prompt = checked_prompt(value)
    return Answer(_digest_of(prompt), prompt=prompt)


def _answer_of_result(value: Any, is_reward: bool) -> Answer:
    if is_reward:  # no digest is needed, since a reward is never repeated
        return Answer("", result=reward_result(value))
    result = checked_result(value)
    return Answer(_digest_of([result.observation, result.reward, result.done, dict(result.scores)]), result=result)


def _digest_of(returned: Any) -> str:
    try:
        text = json.dumps(returned, sort_keys=True, default=repr)
    except (TypeError, ValueError) as error:  # keys that are not text, or an object that contains itself
        raise EnvironmentFault(f"{short_repr(returned)}, which is no JSON: {error}") from error
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
