"""A function becomes a tool with the schema that transformers makes of it, and is called with what fits that schema."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from calculator import calculator
from python_snippets import SnippetLimits, python_tool
from tool_functions import Tool, ToolError, load_tool
from transformers.utils import get_json_schema

HERE = __name__


def search(query: str, most: int = 3, exact: bool = False, weights: list[float] | None = None) -> Any:
    """Search the documents.

    Longer ones first.

    Args:
        query: what to look for,
            in words
        most: results
        exact: whether words are whole
        weights: of each word

    Returns:
        The results.
    """
    if query == "raise":
        raise OSError("no index")
    return {"query": query, "most": most, "exact": exact, "weights": weights}


async def later(place: Literal["here", "there"], more: dict[str, int], either: int | str = 3) -> str:
    """Wait a little.

    Args:
        place: where
        more: what
        either: how
    """
    await asyncio.sleep(0.001)
    return f"{place} {more} {either}"


def nothing() -> None:
    """Do nothing."""


@pytest.mark.parametrize(
    "function", [search, nothing, calculator, python_tool(SnippetLimits())], ids=["search", "nothing", "calc", "python"]
)
def test_its_schema_is_the_one_of_transformers(function: Any) -> None:
    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    assert Tool.of(function).schema == expected


def called(function: Any, arguments: Any) -> str:
    return asyncio.run(Tool.of(function).call(arguments))


def test_it_is_called_and_answers_in_text() -> None:
    assert called(search, {"query": "ä"}) == '{"query": "ä", "most": 3, "exact": false, "weights": null}'
    assert '"weights": [1, 2.5]' in called(search, {"query": "a", "most": 1, "weights": [1, 2.5]})
    assert called(later, {"place": "here", "more": {"a": 1}}) == "here {'a': 1} 3"
    assert called(nothing, {}) == "null"


@pytest.mark.parametrize(
    ("function", "arguments", "fault"),
    [
        (search, {}, "'query'"), (search, {"query": 3}, "not of type string"), (search, [1], "not of type object"),
        (search, "{}", "not of type object"), (search, None, "not of type object"),
        (search, {"query": "a", "most": True}, "not of type integer"),
        (search, {"query": "a", "most": 1.0}, "not of type integer"),
        (search, {"query": "a", "exact": 1}, "not of type boolean"),
        (search, {"query": "a", "weights": [1, "b"]}, "weights[1]"), (search, {"query": "a", "wide": 1}, "wide"),
        (later, {"place": "away", "more": {}}, "here, there"),
        (later, {"place": "here", "more": {}, "either": []}, "either"),
        (search, {"query": "raise"}, "OSError: no index"), (nothing, {"a": 1}, "'a'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_or_fails_is_told(function: Any, arguments: Any, fault: str) -> None:
    with pytest.raises(ToolError) as caught:
        called(function, arguments)
    assert fault in str(caught.value) and function.__name__ in str(caught.value)


def test_a_tool_of_ones_own_is_found_by_its_name() -> None:
    tool = load_tool(f"{HERE}:search")
    assert tool.name == "search" and tool.function is search
