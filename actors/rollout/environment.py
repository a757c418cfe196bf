"""The contract of an environment: an episode begins with a prompt, and each response gets an answer, until it is done.

`rollout.environment` names a class made from `Environment` as `module:Class`. Importing this file costs no torch and no
ray.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.rollout.prompts import prompt_fault
from slimefsdp.config.callables import load_function
from slimefsdp.errors import ConfigError, SlimeError, short_repr

Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int] | Mapping[str, Any]
"""A text, a list of chat messages, token ids, or `{"messages": [...], "tools": [...]}` for a chat template that writes
tools."""
Observation = str | Sequence[Mapping[str, Any]] | Sequence[int]
"""What follows a response: a text, which is one user message where the tokenizer has a chat template; chat messages, of
whatever roles the template knows; or token ids, which follow as they are."""

MOST_CHARACTERS = 1_000_000
"""Of a prompt or an observation; contexts are shorter, and it travels between processes."""
OF_EPISODES = {"reward", "turns", "ended_by_turns", "ended_by_room"}
"""Names of scores that every episode has: its reward, its responses, and whether it was ended for want of more."""
MOST = 3e38
"""The largest reward or score: batches hold them in float32."""
MOST_IN_NAME = 200
"""The most characters of a score's name."""
RESERVED = {
    *("response_length", "response_length_max", "prompt_length", "prompt_length_max", "truncated", "overlong_penalty"),
    *("stage", "rounds", "groups_dropped", "baseline_reward", "reward_failures"),
}
"""Names under which a run logs something else of its rollouts; no score may have one of them."""
_EXAMPLE = "my_package.environments:MyEnvironment"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to a response."""

    observation: Observation | None = None  # needed unless it is done
    reward: float = 0.0  # an episode's reward is the sum over its steps
    done: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)  # logged; of a name given twice the last counts


class Environment:
    """One episode. An object is made for each, with `environment.arguments` as keyword arguments.

    What it answers must follow from record, seed and responses alone: where its process is lost, another one repeats
    the episode so far. `reset` and `step` may be coroutine functions, and are then, of many episodes, awaited at once.
    """

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """Called before a run starts, in the program that starts it, with `environment.arguments`.

        Raises:
            ConfigError: a value is none that the class can be made with.
        """

    def reset(self, record: Mapping[str, Any], seed: int) -> Prompt | Awaitable[Prompt]:
        """The beginning of the episode.

        Args:
            record: of data.train or data.heldout, with `prompt` and whatever else it has.
            seed: the same for all episodes of a group, and for each evaluation of a record.
        """
        prompt: Prompt = record["prompt"]
        return prompt

    def step(self, response: str, finished: bool) -> StepResult | Awaitable[StepResult]:
        """The answer to what the policy has said.

        Args:
            response: the text without special tokens, stripped.
            finished: False where it was cut at rollout.max_new_tokens, or where the episode has no room for more.
        """
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """Called once nothing more will be asked; not where its process is lost."""
        return None


class EnvironmentFault(Exception):
    """What an environment returned cannot be used; the text says why, and goes on with where it was.

    Args:
        hint: the way out, where it is known.
    """

    def __init__(self, text: str, hint: str = "correct the environment") -> None:
        super().__init__(text)
        self.hint = hint


def load_environment(name: str, arguments: Mapping[str, Any]) -> type[Environment]:
    """The class `module:Class`.

    Raises:
        ConfigError: it cannot be imported, is no environment, or does not take these arguments.
    """
    found: Any = load_function(name, field="rollout.environment", example=_EXAMPLE, is_class=True)
    if not (isinstance(found, type) and issubclass(found, Environment)) or found.step is Environment.step:
        raise ConfigError(
            f"{name} is no environment",
            field="rollout.environment",
            hint="name a class that subclasses slimefsdp.Environment, with a step() of its own",
        )
    for method, takes in (("reset", ("record", "seed")), ("step", ("response", "finished"))):
        try:
            inspect.signature(getattr(found, method)).bind(None, *takes)
        except TypeError as error:
            raise ConfigError(
                f"{method}() of {name} cannot be called with ({', '.join(takes)}): {error}",
                field="rollout.environment",
                hint=f"define it as {method}(self, {', '.join(takes)})",
            ) from error
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"environment.arguments={short_repr(dict(arguments))}, and {name} takes {inspect.signature(found)}: "
            f"{error}",
            field="environment.arguments",
            hint="give it arguments that it takes",
        ) from error
    try:
        found.check_arguments(**arguments)
    except SlimeError:
        raise
    except Exception as error:  # the user's own code
        raise ConfigError(
            f"{name} refuses environment.arguments={short_repr(dict(arguments))}: {type(error).__name__}: {error}",
            field="environment.arguments",
            hint="correct the arguments",
        ) from error
    return found


def is_async(environment: type[Environment]) -> bool:
    """Whether its episodes are awaited."""
    return any(inspect.iscoroutinefunction(getattr(environment, name)) for name in ("reset", "step"))


def is_token_ids(given: Any) -> bool:
    """Whether it is a list of whole numbers."""
    return isinstance(given, list | tuple) and bool(given) and all(type(one) is int and one >= 0 for one in given)


def checked_prompt(prompt: Any) -> Prompt:
    """
    Raises:
        EnvironmentFault: it is no prompt.
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
    """Checks what a step returned, and converts its numbers to plain ones.

    Raises:
        EnvironmentFault: it cannot be used.
    """
    if not isinstance(result, StepResult):
        raise EnvironmentFault(f"{short_repr(result)}, which is no StepResult")
    if not isinstance(result.done, bool):
        raise EnvironmentFault(f"done={short_repr(result.done)}, neither True nor False")
    if not isinstance(result.scores, Mapping):
        raise EnvironmentFault(f"scores={short_repr(result.scores)}, no dictionary")
    scores = {}
    for name, value in {"reward": result.reward, **result.scores}.items():
        number = checked_score(name, value)
        if number is None:
            raise EnvironmentFault(f"{short_repr(name)}: {_score_fault(name, value)},")
        scores[name] = number
    if taken := sorted((OF_EPISODES | RESERVED) & result.scores.keys()):
        raise EnvironmentFault(f"a score with the name {taken[0]}, under which something else is logged,")
    if result.observation is None:
        if not result.done:
            raise EnvironmentFault("no observation, though it is not done,", "give observation=, or done=True")
    elif not result.done:
        _check_text(result.observation, "observation", may_be_text=True)
    observation = None if result.done else result.observation  # of the last step nothing follows
    return StepResult(observation, scores.pop("reward"), result.done, scores)


def _score_fault(name: Any, value: Any) -> str:
    """Why the number of a score cannot be logged."""
    if checked_score("reward", value) is not None:
        return f"{short_repr(value)}, under what is no short printable name"
    if isinstance(value, numbers.Real):
        return f"{short_repr(value)}, which is not finite, or beyond {MOST:g}"
    return f"{short_repr(value)}, which is a {type(value).__name__} and not a number"


def _check_text(given: Any, what: str, *, may_be_text: bool) -> None:
    """
    Raises:
        EnvironmentFault: it is neither a text, nor messages, nor token ids.
    """
    if is_token_ids(given):
        size = len(given)
    else:
        fault = "is a text beside tools" if isinstance(given, str) and not may_be_text else prompt_fault(given)
        if fault:
            raise EnvironmentFault(f"{'an' if what == 'observation' else 'a'} {what} that {fault}")
        size = len(given) if isinstance(given, str) else sum(len(one.get("content") or "") for one in given)
    if size > MOST_CHARACTERS:
        raise EnvironmentFault(
            f"{'an' if what == 'observation' else 'a'} {what} of {size:,} characters, more than {MOST_CHARACTERS:,}"
        )


def checked_score(name: Any, value: Any) -> float | None:
    """Returns the number to log; None where the value is no finite number, or the name is no short printable text."""
    is_name = isinstance(name, str) and name.isprintable() and 0 < len(name) <= MOST_IN_NAME
    return finite_number(value) if is_name else None


def finite_number(value: Any) -> float | None:
    """Returns the value as a float, scalars of numpy and torch too; None where it is no number, or not finite."""
    # float() would take the text "1", and an array of one number
    if isinstance(value, str | bytes | bytearray) or getattr(value, "ndim", 0) != 0:
        return None
    try:
        number = float(value)
    except (Exception, SystemExit):  # a whole number beyond floats; an object may raise anything
        return None
    return number if abs(number) <= MOST else None  # NaN is not
