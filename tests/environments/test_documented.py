"""What docs/environments.md shows is so: its code runs, its settings load, its defaults are those of the code."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.environments import StepResult
from actors.environments.python_snippets import SnippetLimits
from actors.environments.tool_functions import load_tool
from actors.environments.tools import ToolUse
from actors.rollout.environment import OF_EPISODES, checked_prompt, checked_result, load_environment
from actors.rollout.rewards import RESERVED
from benchmarks import calculator_seeds
from slimefsdp.config import config_from_dict

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_arguments_of_tool_use_are_listed_with_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|(.*?)\|.+\|$", PAGE.split("## Tools")[1], re.MULTILINE))
    parameters = inspect.signature(ToolUse).parameters
    assert list(rows) == list(parameters)
    for name, written in rows.items():
        default = parameters[name].default
        assert written.strip(" `") == ("" if default in (inspect.Parameter.empty, None) else str(default)), name
    (limits,) = re.findall(r"^\| `python` \|.*\| limits of .*?: (.*) \|$", PAGE, re.MULTILINE)
    shown = {name: float(value) for name, value in re.findall(r"`(\w+)` \(([\d.]+)\)", limits)}
    assert shown == {name: getattr(SnippetLimits(), name) for name in SnippetLimits.__slots__}


def test_the_names_that_are_taken_are_listed() -> None:
    (said,) = re.findall(r"last counts\. (.*?) are taken", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == OF_EPISODES
    (said,) = re.findall(r"It cannot be called (.*?), which", (ROOT / "docs/rollouts.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == RESERVED


def test_every_one_of_ten_thousand_unruly_episodes_was_accounted_for() -> None:
    results = json.loads((ROOT / "benchmarks/results/episodes.json").read_text())["results"]
    assert set(results) == {"Unruly", "UnrulyLater"}
    for found in results.values():
        kinds, grown = found["by_kind"], found["mib_grown_in_the_second_half"]
        assert sum(kinds.values()) == found["episodes"] == 10_000 and min(kinds.values()) > 0
        assert grown["driver"] < 2 and grown["engine"] < 64
        cells = [
            f"{kinds['plain']:,}",
            f"{kinds['raise']}, {kinds['wrong']}, {kinds['giant']}",
            f"{kinds['exit']}, {kinds['hang']}",
            f"{found['episodes_per_second']:.0f}",
            f"{grown['driver']:+.1f}, {grown['engine']:+.1f} MiB",
        ]
        assert f"| {' | '.join(cells)} |" in PAGE


def test_the_figures_of_the_example_are_the_recorded_ones_and_it_learned(tmp_path: Path) -> None:
    record = json.loads((ROOT / "benchmarks/results/calculator_seeds.json").read_text())
    assert calculator_seeds.table(record) in PAGE
    assert record["strategies"] == calculator_seeds.STRATEGIES
    assert [run["seed"] for run in record["runs"]] == [0, 1, 2]
    for run in record["runs"]:
        assert run["before"] < 0.5 < 0.8 < run["after"] and run["largest_rollout_mismatch"] <= 1e-4
        calls = [point["eval/tool_calls"] for point in run["curve"] if "eval/tool_calls" in point]
        assert calls[0] < 0.7 and calls[-1] > 0.9, "it asks"
    calculator_seeds.draw(record["runs"], tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").read_bytes()[:4] == (ROOT / "docs/images/calculator_grpo.png").read_bytes()[:4]
