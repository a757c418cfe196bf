"""Tool use: the policy calls functions and gets their results; its response without a call is the answer.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` in a response, as Qwen and Hermes models write it.
A response may have several calls and other text.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from calculator import calculator
from python_snippets import SnippetLimits, python_tool
from tool_functions import Tool, ToolError, load_tool

from actors.rollout.environment import MOST_CHARACTERS
from actors.rollout.rewards import load_reward, reward_result
from slimefsdp import Environment, Prompt, StepResult
from slimefsdp.errors import ConfigError, short_repr
from slimefsdp.io.user_files import parse_json

BUILT_IN = ("calculator", "python")
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FIELD = "environment.arguments"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of the policy; `fault` says why the call cannot be read."""

    name: str = ""
    arguments: Any = None
    fault: str | None = None


def parse_calls(response: str) -> list[ToolCall]:
    """Returns the calls of a response in their order; the last call may lack its closing tag."""
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

    The environment answers a response with the results of its calls. The result of a failed call is the error's text,
    so that the policy can correct itself. A response that has no call, or that was cut, is the answer; the reward
    function rewards it. The scores of an episode are `tool_calls`, `tool_errors` and those of the reward function.

    Args:
        tools: `calculator`, `python`, or your own functions as `module:function`.
        reward: as in `rollout.reward`.
        described: where tools are described. template means by the chat template; results are messages of the role
            `tool`. prompt means in the record's prompt; results are text in `<tool_response>`.
        max_calls: limit on the calls of a response that are run.
        result_characters: limit on the length of a result; the middle of a longer result is left out.
        python: limits of the tool `python`, as in `SnippetLimits`.
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
        """Checks the arguments by making an object, which is cheap."""
        cls(**arguments)

    async def reset(self, record: Mapping[str, Any], seed: int) -> Prompt:
        """Returns the record's prompt, with the tools if the template describes them."""
        self._record = record
        prompt: Any = record["prompt"]
        if not self._is_in_template:
            return prompt  # type: ignore[no-any-return]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return {"messages": messages, "tools": [tool.schema for tool in self._tools.values()]}

    async def step(self, response: str, finished: bool) -> StepResult:
        """Returns the results of a response's calls, or the reward of the answer."""
        # a response that was cut may contain only a part of a call
        calls = parse_calls(response) if finished else []
        if not calls:
            value = self._reward(self._record, response, finished)
            result = reward_result(await value if inspect.isawaitable(value) else value)
            return replace(result, scores={**result.scores, **self._scores()})
        results = [await self._result(call) for call in calls[: self._max_calls]]
        self._calls += len(results)
        surplus = len(calls) - len(results)
        if surplus:
            results.append(("", f"error: {surplus} more calls were not run, for there may be {self._max_calls}"))
            self._errors += surplus
        return StepResult(self._observation(results), scores=self._scores())

    async def _result(self, call: ToolCall) -> tuple[str, str]:
        """Runs a call; returns the name of the tool and the text for the policy."""
        try:
            if call.fault is not None:
                raise ToolError(call.fault)
            if call.name not in self._tools:
                raise ToolError(f"there is no tool {short_repr(call.name)}; there are {', '.join(self._tools)}")
            text = await self._tools[call.name].call(call.arguments)
        except ToolError as error:
            self._errors += 1
            text = f"error: {error}"
        # JSON can contain half of a surrogate pair, which is not valid text
        text = text.encode(errors="replace").decode()
        return call.name if call.name in self._tools else "", shortened(text, self._result_characters) or "(nothing)"

    def _observation(self, results: Sequence[tuple[str, str]]) -> list[dict[str, str]] | str:
        if not self._is_in_template:
            return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for _, text in results)
        return [{"role": "tool", **({"name": name} if name else {}), "content": text} for name, text in results]

    def _scores(self) -> dict[str, float]:
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}


def shortened(text: str, most: int) -> str:
    """Returns the beginning and the end of a text that is longer than `most` characters."""
    text = text.strip()
    if len(text) <= most:
        return text
    head, tail = text[: -(-most // 2)], text[len(text) - most // 2 :]
    return f"{head}\n... ({len(text) - most} characters left out) ...\n{tail}"


def _tools_of(names: Any, python: Mapping[str, Any] | None) -> dict[str, Tool]:
    """Returns name -> tool; raises ConfigError if the list is empty, an item is no tool, or a name occurs twice."""
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise _refusal(f"tools={short_repr(names)}", f"write a list of {', '.join(BUILT_IN)} or module:function")
    if python is not None and "python" not in names:
        raise _refusal("python has limits, and is not among tools", "add it, or remove them")
    tools: dict[str, Tool] = {}
    for name in names:
        if name == "python":
            tool = Tool.of(python_tool(_limits_of({} if python is None else python)))
        elif name == "calculator":
            tool = _calculator()
        elif ":" in name:
            tool = _loaded(name)
        else:
            raise _refusal(f"{name} is no tool", f"write {', '.join(BUILT_IN)}, or a function as module:function")
        if tool.name in tools:
            raise _refusal(f"two tools are called {tool.name}", "remove one of them, or give it another name")
        tools[tool.name] = tool
    return tools


def _limits_of(limits: Any) -> SnippetLimits:
    names = list(SnippetLimits.__slots__)
    if not isinstance(limits, Mapping) or not limits.keys() <= set(names):
        raise _refusal(f"python={short_repr(limits)}", f"set some of {', '.join(names)}")
    return SnippetLimits(**limits)


# cached per process, since an environment is made for every episode, and all have the same tool
@functools.cache
def _calculator() -> Tool:
    return Tool.of(calculator)


_loaded = functools.cache(load_tool)
# a URL is retried for up to 60 s; rollout.reward_timeout_s limits the answer as a whole
_reward_of = functools.cache(functools.partial(load_reward, timeout_s=60.0, concurrency=32, field=_FIELD))


def _refusal(problem: str, hint: str) -> ConfigError:
    return ConfigError(f"environment.arguments: {problem}", field=_FIELD, hint=hint)
