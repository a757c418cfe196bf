"""Defines the interface of environments: an environment returns the prompt of an episode and answers each response.

`rollout.environment` names a subclass of `Environment` as `module:Class`. Importing this module imports neither torch
nor Ray.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Awaitable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from actors.rollout.records import prompt_fault
from slimefsdp.config.callables import load_function
from slimefsdp.errors import ConfigError, SlimeError, short_repr

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]
"""The beginning of an episode: a text, a list of chat messages, token ids, or `{"messages": [...], "tools": [...]}` for
a chat template that writes tools."""
Observation = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""An environment's text after a response: a text (one user message if the tokenizer has a chat template), chat messages
of any role that the template knows, or token ids, which are appended unchanged."""

MOST_CHARACTERS = 1_000_000
"""Limit on the characters of a prompt or an observation; no context is as long."""
OF_EPISODES = {"turns", "ended_by_turns", "ended_by_room"}
"""Scores that every episode of an environment has: the number of responses, and whether a limit ended the episode."""
MOST = 3e38
"""The largest absolute value of a reward or score, as batches have float32 rewards."""
MOST_IN_NAME = 200
"""The most characters of a score's name."""
RESERVED = {
    *("response_length", "response_length_max", "prompt_length", "prompt_length_max", "truncated", "overlong_penalty"),
    *("stage", "rounds", "groups_dropped", "baseline_reward", "reward_failures"),
}
"""Names of other metrics that a run logs for its rollouts, which scores must not have."""
_EXAMPLE = "my_package.environments:MyEnvironment"


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a response."""

    observation: Observation | None = None  # required unless done
    reward: float = 0.0  # an episode's reward is the sum over its steps
    done: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)  # are logged; a score's last value in an episode counts


class Environment:
    """The base class of environments; one object runs one episode, and is constructed with `environment.arguments`.

    The object's answers must depend only on the record, the seed and the responses, since another process repeats the
    episode so far if the object's process is lost. If `reset` or `step` is a coroutine function, many episodes run at
    once.
    """

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Checks `environment.arguments` before a run starts, in the program that starts the run.

        Raises:
            ConfigError: a value is not valid for the class.
        """

    def reset(self, record: Mapping[str, Any], seed: int) -> Prompt | Awaitable[Prompt]:
        """Begins the episode and returns its prompt.

        Args:
            record: a record of data.train or data.heldout, with `prompt` and all of its other keys.
            seed: a number that is the same for all episodes of a group, and in every evaluation of a record.
        """
        prompt: Prompt = record["prompt"]
        return prompt

    def step(self, response: str, finished: bool) -> StepResult | Awaitable[StepResult]:
        """Answers a response of the policy.

        Args:
            response: the text without special tokens, stripped.
            finished: False if the response was cut at rollout.max_new_tokens, or because the episode has no more room.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Frees resources after the last call of an episode; not called if the environment's process is lost."""
        return None


class EnvironmentFault(Exception):
    """An environment returned a value that cannot be used.

    Args:
        text: the reason; the caller appends the record and the turn.
        hint: what the user can do.
    """

    def __init__(self, text: str, hint: str = "correct the environment") -> None:
        super().__init__(text)
        self.hint = hint


def load_environment(name: str, arguments: Mapping[str, Any]) -> type[Environment]:
    """Imports the class `module:Class`.

    Raises:
        ConfigError: the class cannot be imported, is not an environment, or does not take these arguments.
    """
    environment: Any = load_function(name, field="rollout.environment", example=_EXAMPLE, is_class=True)
    if (
        not (isinstance(environment, type) and issubclass(environment, Environment))
        or environment.step is Environment.step
    ):
        raise ConfigError(
            f"{name} is no environment",
            field="rollout.environment",
            hint="name a class that subclasses slimefsdp.Environment, with a step() of its own",
        )
    for method, takes in (("reset", ("record", "seed")), ("step", ("response", "finished"))):
        try:
            inspect.signature(getattr(environment, method)).bind(None, *takes)
        except TypeError as error:
            raise ConfigError(
                f"{method}() of {name} cannot be called with ({', '.join(takes)}): {error}",
                field="rollout.environment",
                hint=f"define it as {method}(self, {', '.join(takes)})",
            ) from error
    try:
        inspect.signature(environment).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.arguments={short_repr(dict(arguments))}, and {name} takes {inspect.signature(environment)}: "
            f"{error}",
            field="environment.arguments",
            hint="give it arguments that it takes",
        ) from error
    try:
        environment.check_arguments(**arguments)
    except SlimeError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{name} refuses environment.arguments={short_repr(dict(arguments))}: {type(error).__name__}: {error}",
            field="environment.arguments",
            hint="correct the arguments",
        ) from error
    return environment


def is_async(environment: type[Environment]) -> bool:
    return any(inspect.iscoroutinefunction(getattr(environment, name)) for name in ("reset", "step"))


def is_token_ids(given: Any) -> bool:
    """Returns whether `given` is a non-empty list of token ids, which are integers of at least 0."""
    return (
        isinstance(given, list | tuple) and bool(given) and all(type(number) is int and number >= 0 for number in given)
    )


def checked_prompt(prompt: Any) -> Prompt:
    """Checks that a prompt is valid and returns it.

    Raises:
        EnvironmentFault: the prompt is not valid.
    """
    messages, has_tools = prompt, isinstance(prompt, Mapping)
    if has_tools:
        tools = prompt.get("tools")
        if prompt.keys() != {"messages", "tools"} or not isinstance(tools, list | tuple):
            raise EnvironmentFault(f"a prompt with the keys {sorted(map(str, prompt))}, not messages and tools")
        if not all(isinstance(tool, Mapping) for tool in tools):
            raise EnvironmentFault(f"tools={short_repr(tools)}, not a list of JSON objects")
        messages = prompt["messages"]
    _check_text(messages, "prompt", may_be_text=not has_tools)
    return prompt  # type: ignore[no-any-return]


def checked_result(result: Any) -> StepResult:
    """Checks the value that a step returned; returns it with Python floats as numbers.

    Raises:
        EnvironmentFault: the value cannot be used.
    """
    if not isinstance(result, StepResult):
        raise EnvironmentFault(f"{short_repr(result)}, which is no StepResult")
    if not isinstance(result.done, bool):
        raise EnvironmentFault(f"done={short_repr(result.done)}, neither True nor False")
    if not isinstance(result.scores, Mapping):
        raise EnvironmentFault(f"scores={short_repr(result.scores)}, no dictionary")
    if "reward" in result.scores:
        raise EnvironmentFault("a score with the name reward, which the result has already,")
    scores = checked_scores({"reward": result.reward, **result.scores}, RESERVED | OF_EPISODES)
    if result.observation is None:
        if not result.done:
            raise EnvironmentFault("no observation, though it is not done,", "give observation=, or done=True")
    elif not result.done:
        _check_text(result.observation, "observation", may_be_text=True)
    observation = None if result.done else result.observation  # nothing follows the last step
    return StepResult(observation, scores.pop("reward"), result.done, scores)


def checked_scores(scores: Mapping[Any, Any], reserved: Set[str]) -> dict[str, float]:
    """Returns the scores as Python floats.

    Raises:
        EnvironmentFault: a score is not a finite number, or its name is not a short printable text or is reserved.
    """
    numbers_of: dict[str, float] = {}
    for name, value in scores.items():
        number = finite_number(value)
        fault = ""
        if not (isinstance(name, str) and name.isprintable() and 0 < len(name) <= MOST_IN_NAME):
            fault = f"{short_repr(value)}, under what is no short printable name"
        elif number is None and isinstance(value, numbers.Real):
            fault = f"{short_repr(value)}, which is not finite, or beyond {MOST:g}"
        elif number is None:
            fault = f"{short_repr(value)}, which is a {type(value).__name__} and not a number"
        elif name in reserved:
            fault = f"{short_repr(value)}, and a run logs something else under this name"
        if number is None or fault:
            raise EnvironmentFault(
                f"{short_repr(name)}: {fault},", "return finite numbers only, under short names of their own"
            )
        numbers_of[name] = number
    return numbers_of


def _check_text(value: Any, what: str, *, may_be_text: bool) -> None:
    """Raises an EnvironmentFault unless `value` is a text, a list of chat messages or token ids, and not too long."""
    if is_token_ids(value):
        size = len(value)
    else:
        fault = "is a text beside tools" if isinstance(value, str) and not may_be_text else prompt_fault(value)
        if fault:
            raise EnvironmentFault(f"{'an' if what == 'observation' else 'a'} {what} that {fault}")
        size = len(value) if isinstance(value, str) else sum(len(message.get("content") or "") for message in value)
    if size > MOST_CHARACTERS:
        raise EnvironmentFault(
            f"{'an' if what == 'observation' else 'a'} {what} of {size:,} characters, more than {MOST_CHARACTERS:,}"
        )


def finite_number(value: Any) -> float | None:
    """Returns a number of Python, numpy or torch as a float; None if it is no finite number, or beyond `MOST`."""
    # float() would also accept the text "1", or an array of one number
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = float(value)
    except (Exception, SystemExit):  # integers beyond floats; a user's object may raise anything
        return None
    return number if abs(number) <= MOST else None  # also None for NaN
