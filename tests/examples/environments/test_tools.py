"""A policy that calls tools is told their results, or what was wrong with its call, until it answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tools import ToolCall, ToolUse, parse_calls
from transformers import AutoTokenizer

from actors.engines.tokenizer import encode_observation, encode_prompt
from actors.rollout.environment import checked_prompt, checked_result
from slimefsdp import StepResult
from tests.support.tiers import examples

HERE = __name__
RECORD = {"prompt": "What is 6 * 7?", "answer": "42"}
# the parts of Qwen2.5's that are about tools
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def call_of(name: Any, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sums(expression: str) -> str:
    return call_of("calculator", {"expression": expression})


def shout(word: str) -> str:
    """Say it loudly.

    Args:
        word: what to say
    """
    if word == "\ud83d":
        return word
    return word.upper() * (5000 if word == "long" else 1)


async def fails(word: str) -> str:
    """Fail.

    Args:
        word: any
    """
    raise OSError(f"no {word}")


async def close_to(record: Any, response: str, finished: bool) -> dict[str, float]:
    return {"reward": 1 / (1 + abs(float(response) - float(record["answer"]))), "finished": float(finished)}


def played(*responses: str, finished: bool = True, **arguments: Any) -> list[StepResult]:
    """What an episode's environment answers to these responses."""
    environment = ToolUse(**{"tools": ["calculator", f"{HERE}:shout", f"{HERE}:fails"], **arguments})

    async def episode() -> list[StepResult]:
        checked_prompt(await environment.reset(dict(RECORD), 0))
        return [checked_result(await environment.step(response, finished)) for response in responses]

    return asyncio.run(episode())


def told(result: StepResult) -> list[str]:
    assert isinstance(result.observation, list) and {message["role"] for message in result.observation} == {"tool"}
    return [message["content"] for message in result.observation]


def test_a_call_is_answered_and_a_response_without_one_is_rewarded() -> None:
    first, second = played(f"Let me see. {sums('6 * 7')}", "42")
    assert first == StepResult(
        [{"role": "tool", "name": "calculator", "content": "42"}], scores={"tool_calls": 1.0, "tool_errors": 0.0}
    )
    assert second == StepResult(None, 1.0, True, {"tool_calls": 1.0, "tool_errors": 0.0})
    assert [one.reward for one in played("41")] == [0.0]


def test_several_calls_are_run_in_their_order_and_no_more_than_allowed() -> None:
    response = sums("1 + 1") + call_of("shout", {"word": "a"}) + sums("2 + 2")
    (result,) = played(response)
    assert told(result) == ["2", "A", "4"] and result.scores == {"tool_calls": 3, "tool_errors": 0}
    (result,) = played(response, max_calls=1)
    assert told(result)[0] == "2" and len(told(result)) == 2 and "2 more calls" in told(result)[1]
    assert result.scores == {"tool_calls": 1, "tool_errors": 2}
    (result,) = played(response * 1000)
    assert len(told(result)) == 5


@pytest.mark.parametrize(
    ("response", "fault"),
    [
        ("<tool_call>{'name': 1}</tool_call>", "not JSON"), ("<tool_call></tool_call>", "not JSON"),
        ("<tool_call>[1]</tool_call>", "form"), ('<tool_call>{"arguments": {}}</tool_call>', "form"),
        (call_of(["calculator"], {}), "form"), (call_of("search", {}), "there are calculator, shout, fails"),
        (call_of("calculator", {}), "'expression'"), (call_of("calculator", "1 + 1"), "object"),
        (call_of("calculator", {"expression": 2}), "string"), (sums("1 / 0"), "division by zero"),
        (sums("10 ** 10 ** 10"), "too large"), (call_of("fails", {"word": "network"}), "OSError: no network"),
        ("<tool_call>" + "[" * 100_000, "not JSON"), ('<tool_call>{"name": "a", "name": "b"}', "twice"),
        ("<tool_call>" + '{"name": "calculator", "arguments": ' + "9" * 5000 + "}", "not JSON"),
    ],
)  # fmt: skip
def test_what_was_wrong_with_a_call_is_its_result_and_the_policy_may_correct_it(response: str, fault: str) -> None:
    wrong, right, answer = played(response, sums("6 * 7"), "42")
    (said,) = told(wrong)
    assert said.startswith("error: ") and fault in said and len(said) < 1000
    assert told(right) == ["42"] and right.scores == {"tool_calls": 2, "tool_errors": 1}
    assert answer.reward == 1.0 and answer.scores == {"tool_calls": 2, "tool_errors": 1}


def test_the_last_call_may_lack_its_closing_mark() -> None:
    assert parse_calls('<tool_call>{"name": "a"}</tool_call> and <tool_call>{"name": "b", "arguments": {"c": 1}}') == [
        ToolCall("a", {}), ToolCall("b", {"c": 1}),
    ]  # fmt: skip
    assert parse_calls("no call") == parse_calls("</tool_call>") == []


PARTS = st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name":', '"a"', "}", "[", " "])).map("".join)


@examples(300)
@given(st.text(max_size=40) | PARTS)
def test_any_text_is_calls_or_none(text: str) -> None:
    found = parse_calls(text)
    assert bool(found) == ("<tool_call>" in text)
    (result,) = played(text)
    assert result.done == (not found)


def test_results_are_text_of_a_bounded_length() -> None:
    result, pair, none = played(
        call_of("shout", {"word": "long"}), call_of("shout", {"word": "\ud83d"}), call_of("shout", {"word": ""}),
        result_characters=100,
    )  # fmt: skip
    assert told(result)[0].startswith("LONG") and "19900" in told(result)[0]
    assert len(told(result)[0]) < 150
    assert told(pair) == ["?"] and told(none) == ["(nothing)"]


def test_the_reward_is_any_function_and_its_scores_are_kept() -> None:
    (result,) = played("41", reward=f"{HERE}:close_to")
    assert result.reward == 0.5 and result.scores == {"finished": 1, "tool_calls": 0, "tool_errors": 0}


def test_where_the_prompt_describes_the_tools_results_are_text() -> None:
    environment = ToolUse(["calculator"], described="prompt")
    assert asyncio.run(environment.reset(RECORD, 0)) == RECORD["prompt"]
    result = asyncio.run(environment.step(sums("6 * 7") + sums("1"), True))
    expected = "<tool_response>\n42\n</tool_response>\n<tool_response>\n1\n</tool_response>"
    assert result.observation == expected  # type: ignore[comparison-overlap]


def test_a_chat_template_writes_the_tools_and_their_results(example: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(example / "model")
    tokenizer.chat_template = TEMPLATE.replace("\n{%", "{%").replace("\n{{", "{{").strip()
    prompt: Any = asyncio.run(ToolUse(["calculator", "python"]).reset(RECORD, 0))
    text = tokenizer.decode(encode_prompt(tokenizer, prompt))
    assert text.index('"name": "calculator"') < text.index('"name": "python"') < text.index(RECORD["prompt"])
    (result,) = played(sums("6 * 7") + sums("1"))
    text = tokenizer.decode(encode_observation(tokenizer, result.observation))
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
