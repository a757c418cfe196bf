"""Environments outside the driver: processes in which episodes are, each answer with a deadline.

A call says all that was said in an episode so far. The process that has its environment asks it for the next answer;
where that process was lost, another one makes the environment anew and repeats the episode up to there.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.rollout.call_workers import TURN_S, CallWorkers, Worker
from actors.rollout.environment import (
    Environment,
    EnvironmentFault,
    Prompt,
    StepResult,
    check_concurrency,
    checked_prompt,
    checked_result,
    is_async,
    load_environment,
)
from actors.rollout.prompts import place_of
from slimefsdp.config import RunConfig
from slimefsdp.config.callables import failure_of
from slimefsdp.errors import BatchError, SlimeError, portable, short_repr

EpisodeKey = tuple[int, int, int]
"""The call of the driver that the episode is of, its record there, and its number among that record's episodes."""
_CORRECT = "correct the environment"
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """What is asked for: the prompt of an episode, or the answer to the last of its responses."""

    key: EpisodeKey
    record: Mapping[str, Any]
    seed: int
    responses: tuple[tuple[str, bool], ...]  # texts so far, and whether each is finished
    digests: tuple[str, ...]  # of the answers before: one to each response but the last, and the prompt
    is_last: bool = False  # nothing more will be asked

    @property
    def turn(self) -> int:
        """0 is the prompt, n the answer to the nth response."""
        return len(self.responses)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an environment has said: `prompt` at the beginning, `result` later."""

    digest: str
    prompt: Prompt | None = None
    result: StepResult | None = None


@dataclass(slots=True)
class _Episode:
    """An environment as a process has it."""

    environment: Environment
    responses: list[tuple[str, bool]] = field(default_factory=list)  # that it was told


class EnvironmentWorker:
    """One process with the environments of episodes; a Ray actor.

    Args:
        search_path: the driver's sys.path, where the class was found there.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], timeout_s: float, search_path: Sequence[str]) -> None:
        sys.path += [folder for folder in search_path if folder not in sys.path]
        self._host = EnvironmentHost(name, arguments, timeout_s)

    def run(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        """The outcomes of the first calls, one or more, as many as fit into a turn; of coroutines, of all."""
        return self._host.run(calls)

    def forget(self, number: int) -> None:
        """Closes what is left of the episodes of a call of the driver."""
        self._host.forget(number)


class EnvironmentHost:
    """The environments of a process. They are not the actor's own: one with coroutines would be another kind of actor.

    Args:
        name: what `rollout.environment` is.
        timeout_s: for each answer of a coroutine; plain code cannot be ended from inside its process.
    """

    def __init__(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> None:
        self._name, self._arguments, self._timeout_s = name, arguments, timeout_s
        self._class = load_environment(name, arguments)
        # one loop for good: clients that a module keeps belong to the loop in which they were first used
        self._runner = asyncio.Runner()
        self._is_async = is_async(self._class)
        self._episodes: dict[EpisodeKey, _Episode] = {}

    def run(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        """As `EnvironmentWorker`."""
        if self._is_async:
            return self._runner.run(self._all_at_once(calls))
        outcomes: list[Answer | SlimeError] = []
        until = time.monotonic() + TURN_S
        for call in calls:
            outcomes.append(self._runner.run(self._outcome(call)))  # which awaits nothing
            if time.monotonic() > until:
                break
        return outcomes

    def forget(self, number: int) -> None:
        """As `EnvironmentWorker`."""
        for key in [key for key in self._episodes if key[0] == number]:
            self._runner.run(self._close(key))

    async def _all_at_once(self, calls: Sequence[EpisodeCall]) -> list[Answer | SlimeError]:
        before: dict[EpisodeKey, asyncio.Task[Answer | SlimeError]] = {}
        tasks = []
        for call in calls:  # a response that was drawn anew is asked about again: one after the other
            task = asyncio.create_task(self._outcome(call, after=before.get(call.key)))
            before[call.key] = task
            tasks.append(task)
        return await asyncio.gather(*tasks)

    async def _outcome(self, call: EpisodeCall, after: asyncio.Task[Any] | None = None) -> Answer | SlimeError:
        if after is not None:
            await asyncio.wait([after])
        try:
            answer = await self._answer(call)
        except SlimeError as error:
            await self._close(call.key)
            return portable(error)  # type: ignore[return-value]
        if call.is_last or (answer.result is not None and answer.result.done):
            await self._close(call.key)
        return answer

    async def _answer(self, call: EpisodeCall) -> Answer:
        """
        Raises:
            BatchError: the environment raised, did not return in time, returned what cannot be used, or, made anew, did
                not answer as it had before.
        """
        episode = self._episodes.get(call.key)
        if episode is None or list(call.responses[:-1]) != episode.responses:
            await self._close(call.key)
            environment = await self._returned(call, 0, self._class, **deepcopy(self._arguments))
            episode = self._episodes[call.key] = _Episode(environment)
            prompt = await self._returned(call, 0, environment.reset, deepcopy(call.record), call.seed)
            answer = self._checked(call, 0, functools.partial(_prompt_of, prompt))
        for turn in range(len(episode.responses) + 1, call.turn + 1):
            text, finished = call.responses[turn - 1]
            result = await self._returned(call, turn, episode.environment.step, text, finished)
            episode.responses.append((text, finished))
            answer = self._checked(call, turn, functools.partial(_answer_of, result))
        return answer

    def _checked(self, call: EpisodeCall, turn: int, made: Callable[[], Answer]) -> Answer:
        """What an environment returned, if it can be used and is what was returned before, if it was."""
        try:
            answer = made()
        except EnvironmentFault as fault:
            raise failed_episode(f"{self._name} returned {fault}", call, turn, fault.hint) from fault
        if turn < len(call.digests) and answer.digest != call.digests[turn]:
            raise failed_episode(
                f"{self._name}, made anew after its process was lost, did not answer as it had before",
                call, turn, "have its answers follow from record, seed and responses alone",
            )  # fmt: skip
        return answer

    async def _returned(
        self, call: EpisodeCall, turn: int, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """What a function of the environment returned; a coroutine function has so long for it."""
        try:
            async with _deadline(self._timeout_s) as deadline:
                found = function(*args, **named)
                return await found if inspect.isawaitable(found) else found
        except BaseException as error:  # the user's own code may raise anything
            if isinstance(error, TimeoutError) and deadline.expired():
                raise overdue_episode(self._name, call, turn, self._timeout_s) from None
            if isinstance(error, KeyboardInterrupt) or _is_cancelled(error):
                raise
            if isinstance(error, SlimeError):  # of a reward function, say, which knows nothing of turns
                raise failed_episode(f"{self._name}: {error.message}", call, turn, error.hint or _CORRECT) from error
            raise failed_episode(failure_of(self._name, error), call, turn, _CORRECT) from error

    async def _close(self, key: EpisodeKey) -> None:
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        try:
            async with _deadline(_most_s_to_close(self._timeout_s)):
                found = episode.environment.close()
                if inspect.isawaitable(found):
                    await found
        except BaseException as error:  # nothing depends on it
            if isinstance(error, KeyboardInterrupt) or _is_cancelled(error):
                raise
            print(failure_of(self._name, error), file=sys.stderr, flush=True)


class EnvironmentWorkers(CallWorkers[EpisodeCall, Answer]):
    """The processes in which a run's episodes are, replaced where they hang or end.

    Args:
        config: with `rollout.environment`.
    """

    def __init__(self, config: RunConfig) -> None:
        settings = config.environment
        assert config.rollout.environment is not None
        self._arguments = settings.arguments
        # also where workers make it: a name that leads nowhere is an error here, and not in each of them
        environment = load_environment(config.rollout.environment, settings.arguments)
        check_concurrency(config, environment)
        self._kept_by: dict[EpisodeKey, Any] = {}  # the process that has an episode, since it answered last
        super().__init__(
            settings.workers,
            name=config.rollout.environment,
            setting="environment.workers",
            timeout_s=settings.timeout_s,
            launch_timeout_s=config.cluster.launch_timeout_s,
            calls_at_once=settings.concurrency if is_async(environment) else None,
            more_s=_most_s_to_close(settings.timeout_s),
        )

    @classmethod
    def launch(cls, config: RunConfig) -> EnvironmentWorkers:
        """Starts `environment.workers` processes and waits for them.

        Raises:
            ConfigError: the class cannot be imported. ResourceError: a process did not come up.
        """
        workers = cls(config)
        workers.wait_until_up("environment workers")
        return workers

    def forget(self, number: int) -> None:
        """Has the processes close what is left of the episodes of a call of the driver."""
        with self._lock:  # other episodes go on, on another thread
            self._kept_by = {key: actor for key, actor in self._kept_by.items() if key[0] != number}
        with suppress(Exception):  # Ray may be gone, which whoever waits for an answer is told
            for worker in self._workers:
                worker.actor.forget.remote(number)

    def _actor(self, options: dict[str, Any]) -> Any:
        actor: Any = ray.remote(EnvironmentWorker).options(**options)
        return actor.remote(self.name, self._arguments, self._timeout_s, sys.path)

    def _home(self, call: EpisodeCall) -> int:
        _, place, number = call.key
        return (place + number) % len(self._workers)

    def _answered(self, worker: Worker, call: EpisodeCall) -> None:
        self._kept_by[call.key] = worker.actor

    def _most_runs(self, worker: Worker, call: EpisodeCall) -> int:
        """One, or all that repeat the episode: the object is made, its prompt asked for, each turn taken."""
        return 1 if self._kept_by.get(call.key) is worker.actor else call.turn + 2

    def _lost(self, call: EpisodeCall, how: str | None) -> SlimeError:
        if how is None:
            return overdue_episode(f"{self.name}, or its close(),", call, call.turn, self._timeout_s)
        hint = f"{_CORRECT}, or look at the memory of its node"
        return failed_episode(f"{self.name} {how}", call, call.turn, hint)


def _deadline(seconds: float) -> asyncio.Timeout:
    return asyncio.timeout(seconds if math.isfinite(seconds) else None)


def _most_s_to_close(timeout_s: float) -> float:
    """An answer waits for it where the episode is over with it."""
    return min(timeout_s, _CLOSE_S)


def _is_cancelled(error: BaseException) -> bool:
    """Whether the task itself was cancelled, and not something that it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def overdue_episode(name: str, call: EpisodeCall, turn: int, timeout_s: float) -> BatchError:
    """The outcome of a call that did not return."""
    problem = f"{name} did not return within {timeout_s:g} s"
    return failed_episode(problem, call, turn, f"{_CORRECT}, or raise environment.timeout_s")


def failed_episode(problem: str, call: EpisodeCall, turn: int, hint: str) -> BatchError:
    """The outcome of a call that failed.

    Args:
        turn: that failed; 0 is the beginning of the episode.
    """
    when = f"in turn {turn}" if turn else "at the beginning"
    where = f"{when} of episode {call.key[2]} of {place_of(call.record)}"
    return BatchError(f"{problem} {where}", field="rollout.environment", hint=hint)


def _answer_of(result: Any) -> Answer:
    found = checked_result(result)
    return Answer(_digest_of([found.observation, found.reward, found.done, dict(found.scores)]), result=found)


def _prompt_of(given: Any) -> Answer:
    prompt = checked_prompt(given)
    return Answer(_digest_of(prompt), prompt=prompt)


def _digest_of(said: Any) -> str:
    try:
        text = json.dumps(said, sort_keys=True, default=repr)
    except (TypeError, ValueError) as error:  # keys that are no text, or an object that has itself in it
        raise EnvironmentFault(f"{short_repr(said)}, which is no JSON: {error}") from error
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
