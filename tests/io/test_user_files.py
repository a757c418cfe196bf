"""Paths expand `~` and `$VAR` wherever users write them; JSON that Python would pass over is a ValueError."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.config import config_from_dict
from slimefsdp.errors import ConfigError
from slimefsdp.io.user_files import NoPath, parse_json, path_argument, path_of


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OF_THIS_TEST", "runs")
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~", ""), ("~/a", "a"), ("$HOME/a", "a"), ("${HOME}/a", "a"), ("~/$OF_THIS_TEST/b", "runs/b"),
        ("$HOME/${OF_THIS_TEST}s", "runss"), ("$HOME/$$OF_THIS_TEST", "$OF_THIS_TEST"),
        ("~/a$$$OF_THIS_TEST", "a$runs"),
    ],
)  # fmt: skip
def test_home_and_variables_expand_in_settings_and_arguments_alike(home: Path, text: str, expected: str) -> None:
    tree = {"model": {"path": "m"}, "optim": {"total_updates": 1}, "run": {"dir": text}}
    found = [path_of(text), path_argument(text), config_from_dict(tree).run.dir]
    assert found == [home / expected] * 3


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "a\0b", "$NO_SUCH_VARIABLE", "x/${NO_SUCH_VARIABLE}/y", "~nobody_at_all/x", "${HOME", "${HOME-x}/a",
        "${}", "$(whoami)/x", "s3://bucket/run", "file:///tmp/run", "hf+x://a",
    ],
)  # fmt: skip
def test_what_leads_nowhere_is_refused_in_settings_and_arguments_alike(home: Path, text: str) -> None:
    with pytest.raises(NoPath) as caught:
        path_of(text)
    assert caught.value.rule and caught.value.hint
    with pytest.raises(argparse.ArgumentTypeError):
        path_argument(text)
    with pytest.raises(ConfigError) as refused:
        config_from_dict({"model": {"path": "m"}, "optim": {"total_updates": 1}, "run": {"dir": text}})
    assert refused.value.field == "run.dir" and refused.value.hint == caught.value.hint


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(VALUES)
def test_sound_json_is_read_as_pythons_parser_reads_it(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"a": 1, "a": 1}', "'a'"),
        ('[{"b": {"a": 1, "a": 2}}]', "'a'"),
        ('{"a": 1, "\\u0061": 2}', "'a'"),
        ("[" * 100_000, ""),
        ('{"a":' * 100_000, ""),
        ("9" * 5000, "5000"),
        ("", "line 1 column 1"),
        ("[1] 2", "line 1 column 5"),
        (b"\xff", "utf-8"),
        (json.dumps({"k" * 10_000: 1})[:-1] + ', "' + "k" * 10_000 + '": 2}', "kkk"),
    ],
)
def test_all_else_is_a_value_error_in_one_short_line(text, named):
    with pytest.raises(ValueError, match=named) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@given(st.binary(max_size=40) | st.text('[]{}":,0123456789.eE-truefalsn\\u', max_size=40))
def test_no_text_leads_to_another_exception(text):
    try:
        parse_json(text)
    except ValueError as error:
        assert str(error)
