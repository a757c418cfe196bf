"""Reward functions: found by name or refused with the reason, checked at each call, and right on hand-worked cases."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.rollout.rewards import exact_match, load_reward, sorted_digits
from slimefsdp.errors import BatchError, ConfigError

digits = st.text("0123456789", min_size=1, max_size=7)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module that only this test can import, and returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"user_reward_{tmp_path.name}"

    def write(source: str) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    sys.modules.pop(name, None)


def test_a_reward_is_found_by_module_and_function():
    reward = load_reward("actors.rollout.rewards:exact_match")
    assert reward({"prompt": "p", "answer": "4"}, "4", True) == {"reward": 1.0}
    assert reward.__name__ == "exact_match"


def test_other_keys_and_numpy_numbers_come_back_as_floats(user_module):
    name = user_module(
        "import numpy as np\n"
        "def score(record, response, finished):\n"
        "    return {'reward': np.float32(0.5), 'length': len(response), 'ok': finished}\n"
    )
    scores = load_reward(f"{name}:score")({"prompt": "p"}, "abc", True)
    assert scores == {"reward": np.float32(0.5), "length": 3.0, "ok": 1.0}
    assert all(type(value) is float for value in scores.values())


@pytest.mark.parametrize("name", ["no_colon", ":function", "module:", ""])
def test_a_name_of_another_form_is_refused(name):
    with pytest.raises(ConfigError, match=r"rollout\.reward: .*does not name a function.*module:function"):
        load_reward(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module_anywhere:f", "module 'no_such_module_anywhere' .* cannot be imported: ModuleNotFoundError"),
        ("actors.rollout.rewards:nothing", "module 'actors.rollout.rewards' has no 'nothing'"),
        ("math:pi", "'math:pi' is a float, which cannot be called"),
    ],
)
def test_what_is_missing_or_not_callable_is_named(name, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        load_reward(name)
    assert caught.value.field == "rollout.reward" and caught.value.hint


@pytest.mark.parametrize("source", ["1 / 0", "def f(:"])
def test_a_module_that_fails_to_import_is_named_with_its_own_error(user_module, source):
    name = user_module(source)
    with pytest.raises(ConfigError, match=r"cannot be imported: (ZeroDivisionError|SyntaxError)") as caught:
        load_reward(f"{name}:f")
    assert isinstance(caught.value.__cause__, (ZeroDivisionError, SyntaxError))


@pytest.mark.parametrize(
    "result",
    ["1.0", "{'score': 1.0}", "None", "{'reward': float('nan')}", "{'reward': '1'}", "{'reward': 1, 'n': None}"],
)
def test_a_result_that_breaks_the_contract_is_refused_when_it_is_returned(user_module, result):
    name = user_module(f"def f(record, response, finished):\n    return {result}\n")
    with pytest.raises(BatchError, match=f"{name}:f returned"):
        load_reward(f"{name}:f")({"prompt": "p"}, "r", True)


def test_exact_match_wants_the_whole_answer_and_an_end():
    record = {"prompt": "p", "answer": 12}
    assert exact_match(record, " 12\n", True) == {"reward": 1.0}
    assert exact_match(record, "12", False) == exact_match(record, "012", True) == {"reward": 0.0}


@pytest.mark.parametrize(
    ("response", "reward", "exact"),
    [
        ("23578", 1.0, 1.0),
        (" 23578\n", 1.0, 1.0),
        ("23587", 0.5 * 3 / 5, 0.0),
        ("2357", 0.5 * 4 / 5, 0.0),
        ("23578888", 0.5 * 5 / 8, 0.0),
        ("87532", 0.5 * 1 / 5, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_sorted_digits_gives_half_for_the_answer_and_half_for_the_places(response, reward, exact):
    scores = sorted_digits({"prompt": "sort 52837", "answer": "23578"}, response, True)
    assert scores == {"reward": pytest.approx(reward), "exact": exact}


@given(answer=digits, response=digits)
def test_sorted_digits_is_one_only_for_the_answer_and_zero_without_an_end(answer, response):
    record = {"prompt": "p", "answer": answer}
    scores = sorted_digits(record, response, True)
    assert (scores["reward"] == 1.0) == (scores["exact"] == 1.0) == (response == answer)
    assert 0.0 <= scores["reward"] <= (1.0 if response == answer else 0.5)
    assert sorted_digits(record, response, False) == {"reward": 0.0, "exact": 0.0}


@given(answer=digits, more=digits)
def test_padding_a_right_answer_never_pays(answer, more):
    record = {"prompt": "p", "answer": answer}
    assert sorted_digits(record, answer + more, True)["reward"] < sorted_digits(record, answer, True)["reward"]


@pytest.mark.parametrize("reward", [exact_match, sorted_digits])
def test_a_record_without_an_answer_is_refused_by_its_prompt(reward):
    with pytest.raises(BatchError, match="'sort 1' has no answer"):
        reward({"prompt": "sort 1"}, "1", True)


def test_finding_a_reward_imports_the_standard_library_only():
    code = (
        "import sys; from actors.rollout.rewards import load_reward; "
        "load_reward('actors.rollout.rewards:sorted_digits'); "
        "print({'torch', 'transformers', 'numpy', 'ray', 'pydantic'} & set(sys.modules))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
