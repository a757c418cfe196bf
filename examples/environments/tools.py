"""Tool use: the policy calls functions, is told what they returned, and its response without a call is its answer.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in a response, as Qwen and Hermes models write it;
there may be text around it, and several of them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from calculator import calculator
from python_snippets import SnippetLimits, python_tool
from tool_functions import Tool, ToolError, load_tool

from actors.rollout.environment import MOST_CHARACTERS
from actors.rollout.rewards import load_reward
from slimefsdp import Environment, Prompt, StepResult
from slimefsdp.errors import ConfigError, short_repr
from slimefsdp.io.user_files import parse_json

BUILT_IN = ("calculator", "python")
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FIELD = "environment.arguments"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What the policy asks for; `fault` says why it cannot be read."""

    name: str = ""
    arguments: Any = None
    fault: str | None = None


def parse_calls(response: str) -> list[ToolCall]:
    """The calls of a response, in their order; the last may lack its closing mark."""
    return [_parsed(text) for text in _CALL.findall(response)]


def _parsed(text: str) -> ToolCall:
    try:
        call = parse_json(text.strip())
    except ValueError as error:
        return ToolCall(fault=f"the call is not JSON: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(fault='the call is not of the form {"name": ..., "arguments": {...}}')
    return ToolCall(call["name"], call.get("arguments", {}))


class ToolUse(Environment):
    """An episode in which the policy may call tools before it answers.

    A response with calls is answered by their results, one after another; what a call did wrong is its result, so that
    the policy can correct itself. A response without a call, or one that was cut, is the answer: the reward function
    gives the episode's reward. Its scores are those of that function, `tool_calls` and `tool_errors`.

    Args:
        tools: `calculator`, `python`, or functions of your own as `module:function`.
        reward: as `rollout.reward`.
        described: template, the chat template writes what the tools are, and results are messages of the role `tool`;
            prompt, the prompt says all that the policy is to know, and results are text in `<tool_response>`.
        max_calls: of one response that are run.
        result_characters: of one result that the policy is told; the middle is left out.
        python: limits of the tool `python`, as `SnippetLimits`.
    """

    def __init__(
        self,
        tools: Sequence[str],
        reward: str = "actors.rollout.rewards:exact_match",
        described: Literal["template", "prompt"] = "template",
        max_calls: int = 4,
        result_characters: int = 4000,
        python: Mapping[str, Any] | None = None,
    ) -> None:
        if described not in ("template", "prompt"):
            raise _refusal(f"described={short_repr(described)}", "set it to template or prompt")
        for name, value in (("max_calls", max_calls), ("result_characters", result_characters)):
            if type(value) is not int or value < 1:
                raise _refusal(f"{name}={short_repr(value)}", "set it to a whole number above 0")
        if not isinstance(reward, str):
            raise _refusal(f"reward={short_repr(reward)}", "name a function as module:function, or a URL")
        if max_calls * result_characters > MOST_CHARACTERS:
            raise _refusal(
                f"max_calls x result_characters={max_calls * result_characters:,} is more than an observation may have",
                f"lower one of them: there may be {MOST_CHARACTERS:,} characters",
            )
        self._tools = _tools_of(tools, python)
        self._reward: Any = _reward_of(reward)
        self._is_in_template = described == "template"
        self._max_calls, self._result_characters = max_calls, result_characters
        self._calls = self._errors = 0

    @classmethod
    def check_arguments(cls, **arguments: Any) -> None:
        """As `Environment`: an object is an episode, and costs nothing."""
        cls(**arguments)

    async def reset(self, record: Mapping[str, Any], seed: int) -> Prompt:
        """The record's prompt, with the tools where the template writes them."""
        self._record = record
        prompt: Any = record["prompt"]
        if not self._is_in_template:
            return prompt  # type: ignore[no-any-return]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, "tools": [tool.schema for tool in self._tools.values()]}

    async def step(self, response: str, finished: bool) -> StepResult:
        """The results of a response's calls, or what its answer is worth."""
        # of one that was cut, the call may be a part of what was meant
        calls = parse_calls(response) if finished else []
        if not calls:
            scores = self._reward(self._record, response, finished)
            scores = dict(await scores if inspect.isawaitable(scores) else scores)
            return StepResult(None, scores.pop("reward"), True, {**scores, **self._scores()})
        results = [await self._result(call) for call in calls[: self._max_calls]]
        self._calls += len(results)
        surplus = len(calls) - len(results)
        if surplus:
            results.append(("", f"error: {surplus} more calls were not run, for there may be {self._max_calls}"))
            self._errors += surplus
        return StepResult(self._observation(results), scores=self._scores())

    async def _result(self, call: ToolCall) -> tuple[str, str]:
        """Name of the tool and what the policy is told."""
        try:
            if call.fault is not None:
                raise ToolError(call.fault)
            if call.name not in self._tools:
                raise ToolError(f"there is no tool {short_repr(call.name)}; there are {', '.join(self._tools)}")
            said = await self._tools[call.name].call(call.arguments)
        except ToolError as error:
            self._errors += 1
            said = f"error: {error}"
        # half of a surrogate pair, which JSON can name, is no text
        said = said.encode(errors="replace").decode()
        return call.name if call.name in self._tools else "", shortened(said, self._result_characters) or "(nothing)"

    def _observation(self, results: Sequence[tuple[str, str]]) -> list[dict[str, str]] | str:
        if not self._is_in_template:
            return "\n".join(f"<tool_response>\n{said}\n</tool_response>" for _, said in results)
        return [{"role": "tool", **({"name": name} if name else {}), "content": said} for name, said in results]

    def _scores(self) -> dict[str, float]:
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}


def shortened(text: str, most: int) -> str:
    """Beginning and end of a text that is longer than so many characters."""
    text = text.strip()
    if len(text) <= most:
        return text
    head, tail = text[: -(-most // 2)], text[len(text) - most // 2 :]
    return f"{head}\n... ({len(text) - most} characters left out) ...\n{tail}"


def _tools_of(names: Any, python: Mapping[str, Any] | None) -> dict[str, Tool]:
    """By name.

    Raises:
        ConfigError: there are none, one is no tool, or two have one name.
    """
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise _refusal(f"tools={short_repr(names)}", f"write a list of {', '.join(BUILT_IN)} or module:function")
    if python is not None and "python" not in names:
        raise _refusal("python has limits, and is not among tools", "add it, or remove them")
    found: dict[str, Tool] = {}
    for name in names:
        if name == "python":
            tool = Tool.of(python_tool(_limits_of({} if python is None else python)))
        elif name == "calculator":
            tool = _calculator()
        elif ":" in name:
            tool = _loaded(name)
        else:
            raise _refusal(f"{name} is no tool", f"write {', '.join(BUILT_IN)}, or a function as module:function")
        if tool.name in found:
            raise _refusal(f"two tools are called {tool.name}", "remove one of them, or give it another name")
        found[tool.name] = tool
    return found


def _limits_of(given: Any) -> SnippetLimits:
    names = list(SnippetLimits.__slots__)
    if not isinstance(given, Mapping) or not given.keys() <= set(names):
        raise _refusal(f"python={short_repr(given)}", f"set some of {', '.join(names)}")
    return SnippetLimits(**given)


# one object of a class is one episode, and what is looked up here is the same for all of a process
@functools.cache
def _calculator() -> Tool:
    return Tool.of(calculator)


_loaded = functools.cache(load_tool)
# a server that is away is asked again for as long; whoever is asked about an answer has environment.timeout_s besides
_reward_of = functools.cache(functools.partial(load_reward, timeout_s=60.0, concurrency=32, field=_FIELD))


def _refusal(problem: str, hint: str) -> ConfigError:
    return ConfigError(f"environment.arguments: {problem}", field=_FIELD, hint=hint)
