"""What docs/environments.md shows is so: its code runs, its settings load, its defaults are those of the code."""

from __future__ import annotations

import asyncio
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tool_functions import load_tool

from actors.rollout.environment import checked_prompt, checked_result, load_environment
from slimefsdp import StepResult
from slimefsdp.config import config_from_dict

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/environments.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def my_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's code, under the names that its settings have for it."""
    for name, code in zip(("guessing", "tools"), blocks("python"), strict=True):
        module = types.ModuleType(f"my_package.{name}")
        monkeypatch.setitem(sys.modules, "my_package", types.ModuleType("my_package"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(code, name, "exec"), module.__dict__)
    yield


def test_the_settings_it_shows_are_accepted_and_name_environments() -> None:
    shown = [yaml.safe_load(block) for block in blocks("yaml")]
    assert len(shown) == 2
    for sections in shown:
        base: dict[str, Any] = {
            "model": {"path": "m"}, "batch": {"max_tokens_per_rank": 4096}, "optim": {"total_updates": 1},
        }  # fmt: skip
        config = config_from_dict({**base, **sections})
        assert config.rollout.environment is not None
        load_environment(config.rollout.environment, config.environment.arguments)(**config.environment.arguments)


@pytest.mark.parametrize("number", [1, 7, 15])
def test_the_game_it_shows_is_won_by_halving(number: int) -> None:
    game = load_environment("my_package.guessing:GuessNumber", {"most": 15})(most=15)
    record = {"prompt": "x", "answer": str(number)}
    assert checked_prompt(game.reset(record, 0)) == "Guess a number from 1 to 15."
    (confused, low, high) = (checked_result(game.step("what?", True)), 1, 15)
    assert confused == StepResult("Say a number.", scores={"found": 0.0})
    for _ in range(4):
        guess = (low + high) // 2
        result = checked_result(game.step(str(guess), True))
        if result.done:
            break
        low, high = (guess + 1, high) if result.observation == "higher" else (low, guess - 1)
    assert result == StepResult(None, 1.0, True, {"found": 1.0})


def test_the_tool_it_shows_is_one() -> None:
    tool = load_tool("my_package.tools:search")
    assert tool.schema["function"]["parameters"]["required"] == ["query"]
    assert asyncio.run(tool.call({"query": "a"})) == '["nothing about a"]'
