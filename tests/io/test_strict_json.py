"""JSON is read as Python's parser reads it; what that passes over, or ends in another way, is a ValueError."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.io.strict_json import parse_json

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
