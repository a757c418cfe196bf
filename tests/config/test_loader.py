"""Settings text: every kind of bad YAML is a ConfigError with its place, and good YAML means what it says."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.config.loader import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_INTEGER_DIGITS,
    apply_override,
    parse_yaml,
    read_yaml_mapping,
)
from slimefsdp.errors import ConfigError, short_text
from tests.support.refusals import refused

BAD_TEXT = {
    "tab as indentation": ("a:\n\tb: 1", ["line 2, column 1"]),
    "tab after a key": ("a:\tb\n  c: 1", ["line 1, column 3"]),
    "key twice": ("a: 1\nb: 2\na: 3", ["'a'", "line 3, column 1"]),
    "key twice at depth": ("a:\n  b:\n    c: 1\n    c: 1", ["'c'", "line 4, column 5"]),
    "key twice in a flow mapping": ("{a: 1, 'a': 2}", ["'a'", "line 1, column 8"]),
    "key twice in a list": ("- {a: 1, a: 2}", ["'a'", "line 1, column 10"]),
    "leading zero": ("a: 010", ["'010'", "line 1, column 4"]),
    "negative leading zero": ("a: -007", ["'-007'", "line 1"]),
    "octal": ("a: 0o17", ["'0o17'"]),
    "hexadecimal": ("a: 0xFF", ["'0xFF'"]),
    "binary": ("a: 0b101", ["'0b101'"]),
    "sexagesimal": ("a: 1:30", ["'1:30'"]),
    "sexagesimal fraction": ("a: 190:20:30.15", ["'190:20:30.15'"]),
    "octal key": ("012: 1", ["'012'", "line 1, column 1"]),
    "alias": ("a: &x 1\nb: *x", ["*x", "line 2, column 4"]),
    "alias to itself": ("&x [*x]", ["*x"]),
    "alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ["*a", "line 2"]),
    "merge key": ("a:\n  <<: {b: 1}", ["<<", "line 2, column 3"]),
    "core tag": ("a: !!int '3'", ["!!int", "line 1, column 4"]),
    "tag with a value that does not fit": ("a: !!bool maybe", ["!!bool"]),
    "empty integer tag": ("a: !!int ''", ["!!int"]),
    "timestamp tag": ("a: !!timestamp x", ["!!timestamp"]),
    "set": ("a: !!set {b, c}", ["!!set"]),
    "python tag": ("a: !!python/object/apply:os.getcwd []", ["!!python/object/apply:os.getcwd"]),
    "own tag": ("!mine\na: 1", ["!mine", "line 1, column 1"]),
    "the loader's internal tag": ("a: !surprise {b: 1}", ["!surprise"]),
    "non-specific tag": ("a: ! 3", ["!", "line 1, column 4"]),
    "two documents": ("a: 1\n---\nb: 2", ["---", "line 2"]),
    "an empty second document": ("a: 1\n...\n---\n", ["---", "line 3"]),
    "another YAML version": ("%YAML 3.0\n---\na: 1", ["%YAML 3.0", "line 1"]),
    "NUL": ("a: 1\nb: 'x\0'", ["U+0000", "line 2"]),
    "NUL escape": ('a: "x\\0"', ["'x\\x00'", "line 1, column 4"]),
    "control character": ("a: \x07", ["U+0007", "line 1"]),
    "surrogate": ("a: \ud800", ["U+D800"]),
    "surrogate escape": ('a: "\\ud800"', ["\\ud800", "line 1, column 4"]),
    "escape beyond Unicode": ('a: 1\nb: "\\UFFFFFFFF"', ["line 2"]),
    "escape just beyond Unicode": ('a: "\\U00110000"', ["line 1"]),
    "unknown escape": ('a: "\\q"', ["line 1, column 6"]),
    "integer of 5,000 digits": ("a: " + "7" * 5000, [5000, "line 1, column 4"]),
    "negative integer of 50 digits": ("a: -" + "7" * 50, [50]),
    "float out of range": ("a: 1e999", ["'1e999'", "line 1"]),
    "negative float out of range": ("a: -1.0e999", ["'-1.0e999'"]),
    "integer key": ("3: x", [3, "line 1, column 1"]),
    "boolean key": ("true: x", ["true"]),
    "null key": ("~: x", ["null"]),
    "list key": ("? [a, b]\n: x", ["['a', 'b']"]),
    "mapping key": ("{a: 1}: x", ["{'a': 1}"]),
    "no key": (": 1", ["line 1, column 1"]),
    "deep flow": ("a: " + "[" * 500 + "]" * 500, [MAX_DEPTH, "line 1"]),
    "deep blocks": ("".join("  " * depth + "a:\n" for depth in range(100)), [MAX_DEPTH, "line 20"]),
    "deep lists": ("- " * 10_000 + "x", [MAX_DEPTH]),
    "deep keys": ("? " * 10_000 + "x", [MAX_DEPTH]),
    "open bracket": ("b: 1\na: [1, 2\n", ["line 2, column 4"]),
    "open brace": ("a: {b: 1", ["line 1, column 4"]),
    "open quote": ("b: 1\na: 'x\n", ["line 2, column 4"]),
    "two colons": ("a: b: c", ["`:`", "'a: b: c'", "line 1, column 5"]),
    "crooked indentation": ("a:\n  b: 1\n c: 2", ["'c: 2'", "line 3, column 2"]),
    "at sign": ("a: @x", ["'@'", "line 1, column 4"]),
    "backtick": ("a: `x`", ["'`'", "line 1, column 4"]),
    "lonely star": ("a: *", ["line 1"]),
    "percent": ("%", ["line 1"]),
    "anchor twice": ("a: &x 1\nb: &x 2", ["anchor", "line 2, column 4"]),
    "key of 2,000 letters": ("a" * 2000 + ": 1", ["line 1"]),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_refused_with_its_place_and_a_way_out(name):
    text, expected = BAD_TEXT[name]
    with refused(ConfigError, None, "some.yaml", *expected) as caught:
        parse_yaml(text, name="some.yaml")
    message = str(caught.value)
    assert len(message) < 300 and "\n" not in message and message.isprintable()


def test_scalars_follow_the_core_schema_of_yaml_1_2():
    text = """
        float: [1e-6, 1., .5, -2.5E+3, 1_0.5]
        special: [.inf, -.INF, +.inf]
        integer: [0, -3, +4, 1_000, 9999999999999999999999999999999999999999]
        """
    value = parse_yaml(text)
    assert value["float"] == [1e-6, 1.0, 0.5, -2500.0, "1_0.5"]
    assert value["special"] == [float("inf"), float("-inf"), float("inf")]
    assert value["integer"] == [0, -3, 4, "1_000", 10**MAX_INTEGER_DIGITS - 1]
    assert parse_yaml("[yes, no, on, off, y, n, Norway]") == ["yes", "no", "on", "off", "y", "n", "Norway"]
    assert parse_yaml("[true, True, TRUE, false]") == [True, True, True, False]
    assert parse_yaml("[~, null, NULL, '', 2020-01-01, 1.2.3, =]") == [None, None, None, "", "2020-01-01", "1.2.3", "="]
    assert parse_yaml("['010', \"0x10\", '1:30']") == ["010", "0x10", "1:30"]
    assert str(parse_yaml(".nan")) == "nan" and parse_yaml("") is None


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"], exclude_characters="\u2028\u2029"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_", min_size=1), inner, max_size=3),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_json_is_read_as_the_json_parser_reads_it(value):
    text = json.dumps(value, ensure_ascii=False)
    assert json.dumps(parse_yaml(text), ensure_ascii=False) == text  # compares types too: 1 is not 1.0


@given(st.text(max_size=40) | st.text("[]{}:,-?&*!|>'\"%@`#~ \n\tab01.e<=_", max_size=40))
def test_no_text_leads_to_another_exception(text):
    try:
        parse_yaml(text)
    except ConfigError as error:
        assert error.hint and "<text>" in error.message


@given(st.binary(max_size=60))
def test_no_bytes_lead_to_another_exception(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("raw") / "c.yaml"
    path.write_bytes(raw)
    try:
        assert isinstance(read_yaml_mapping(path), dict)
    except ConfigError as error:
        assert error.hint and "c.yaml" in error.message


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", []),
        (b"# only a comment\n", []),
        (b"---\n", []),
        (b"~", []),
        (b"- a\n- b\n", ["['a', 'b']"]),
        (b"hello\n", ["'hello'"]),
        (b"3", [3]),
        (b"a: 1\nb: caf\xe9\n", ["UTF-8", "0xe9", "line 2"]),
        ("a: 1".encode("utf-16"), ["UTF-8", "0xff"]),
        (b"a: 1\0", ["U+0000"]),
        (b"#" * (MAX_BYTES + 1), [MAX_BYTES]),
    ],
)
def test_a_file_that_holds_no_settings_is_refused_by_name(tmp_path, raw, expected):
    path = tmp_path / "c.yaml"
    path.write_bytes(raw)
    with refused(ConfigError, None, path, *expected):
        read_yaml_mapping(path)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("a: 1")
    bad = {
        tmp_path: [tmp_path, os.strerror(errno.EISDIR)],
        tmp_path / "none.yaml": [tmp_path / "none.yaml", os.strerror(errno.ENOENT)],
        tmp_path / "file" / "below": [tmp_path / "file" / "below", os.strerror(errno.ENOTDIR)],
        tmp_path / "a\0b": ["a\\x00b"],
        tmp_path / ("a" * 5000): ["aaa", os.strerror(errno.ENAMETOOLONG)],
        type(tmp_path)("/dev/zero"): ["/dev/zero"],
    }
    for path, values in bad.items():
        with refused(ConfigError, None, *values) as caught:
            read_yaml_mapping(path)
        assert len(str(caught.value)) < 400


def test_a_path_that_is_no_file_may_be_the_name_of_a_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small_0.6b.yaml").touch()
    for written in ("small_0.6b", "small_0.6b.yaml"):
        with pytest.raises(ConfigError, match=re.escape("did you mean configs/small_0.6b.yaml?")):
            read_yaml_mapping(Path(written))


def test_byte_order_mark_line_ends_and_the_full_size_are_accepted(tmp_path):
    path = tmp_path / "c.yaml"
    for raw in (b"\xef\xbb\xbfa: 1\nb: 2\n", b"a: 1\r\nb: 2\r\n", b"a: 1\nb: 2".ljust(MAX_BYTES)):
        path.write_bytes(raw)
        assert read_yaml_mapping(path) == {"a": 1, "b": 2}


def test_an_override_sets_one_value_and_leaves_its_neighbours():
    tree = {"a": {"b": 1, "c": 2}}
    for override in ("a.b=1e-6", "d.e.f=[1, x]", "g=null", "h.i=a=b"):
        apply_override(tree, override)
    assert tree == {"a": {"b": 1e-6, "c": 2}, "d": {"e": {"f": [1, "x"]}}, "g": None, "h": {"i": "a=b"}}


def test_null_empties_what_names_are_then_put_into():
    tree = {"data": {"heldout": {"old": "a.jsonl"}}}
    for override in ("data.heldout=null", "data.heldout.sums=b.jsonl", "data.heldout.products=c.jsonl"):
        apply_override(tree, override)
    assert tree == {"data": {"heldout": {"sums": "b.jsonl", "products": "c.jsonl"}}}


@pytest.mark.parametrize(
    "override",
    ["", "=", "=3", "a", "a.b", ".", ".a=1", "a.=1", "a..b=1", "a b=1", "a =1", " a=1", "--a.b=1", "a-b=1", "a.0=1",
     "a\n=1", "a.'b'=1", ".".join("x" * 3000) + "=1"],
)  # fmt: skip
def test_an_override_of_another_form_is_refused_and_shown(override):
    tree = {}
    with refused(ConfigError, None, "override", repr(override) if len(override) < 100 else "x.x") as caught:
        apply_override(tree, override)
    assert tree == {} and len(str(caught.value)) < 300


def test_an_override_into_a_value_names_both_and_leaves_the_tree():
    for value, shown in ((3, "3"), ([1], "[1]"), ("m", "'m'")):
        tree = {"a": {"b": value}}
        with refused(ConfigError, "a.b.c", "a.b.c='x'", f"a.b={shown}"):
            apply_override(tree, "a.b.c=x")
        assert tree == {"a": {"b": value}}


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_override_without_a_value_changes_nothing(text):
    tree = {"a": {"b": 1}}
    with refused(ConfigError, "a.b", "a.b="):
        apply_override(tree, f"a.b={text}")
    assert tree == {"a": {"b": 1}}


@pytest.mark.parametrize("text", ["[", "a: b: c", "*x", "!!int 3", "010", "2\0", "\udcff", '"', "9" * 5000, "1e999"])
def test_an_override_with_a_bad_value_names_the_override(text):
    with refused(ConfigError, None, "override 'a.b=", "line 1") as caught:
        apply_override({}, f"a.b={text}")
    assert len(str(caught.value)) < 300


@given(JSON_VALUES | st.floats() | st.binary() | st.integers(10**4000, 10**4001))
def test_any_value_is_shown_on_one_short_line(value):
    text = short_text(value)
    assert 0 < len(text) < 2000 and "\n" not in text


def test_values_are_shown_as_yaml_writes_them():
    nested: list[object] = []
    nested.append(nested)
    assert short_text([None, True, False, 1e-6, float("inf"), "a"]) == "[null, true, false, 1e-06, .inf, 'a']"
    assert short_text(10**5000) == "(an integer of about 5001 digits)"
    assert len(short_text("x" * 10_000)) <= 60 and len(short_text(nested)) < 60
