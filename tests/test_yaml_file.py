"""Settings text: every kind of bad YAML is a ConfigError with its place, and good YAML means what it says."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimefsdp.config_messages import short_text
from slimefsdp.errors import ConfigError
from slimefsdp.yaml_file import MAX_BYTES, MAX_DEPTH, MAX_INTEGER_DIGITS, apply_override, parse_yaml, read_yaml_mapping

BAD_TEXT = {
    "tab as indentation": ("a:\n\tb: 1", ["tab", "line 2, column 1", "spaces"]),
    "tab after a key": ("a:\tb\n  c: 1", ["tab", "line 1"]),
    "key twice": ("a: 1\nb: 2\na: 3", ["'a' is given twice", "line 3, column 1", "keep one"]),
    "key twice at depth": ("a:\n  b:\n    c: 1\n    c: 1", ["'c' is given twice", "line 4, column 5"]),
    "key twice in a flow mapping": ("{a: 1, 'a': 2}", ["'a' is given twice", "line 1, column 8"]),
    "key twice in a list": ("- {a: 1, a: 2}", ["'a' is given twice"]),
    "leading zero": ("a: 010", ["'010'", "line 1, column 4", "plain decimal"]),
    "negative leading zero": ("a: -007", ["'-007'", "line 1"]),
    "octal": ("a: 0o17", ["'0o17'"]),
    "hexadecimal": ("a: 0xFF", ["'0xFF'"]),
    "binary": ("a: 0b101", ["'0b101'"]),
    "sexagesimal": ("a: 1:30", ["'1:30'", "quote it"]),
    "sexagesimal fraction": ("a: 190:20:30.15", ["'190:20:30.15'"]),
    "octal key": ("012: 1", ["'012'", "line 1, column 1"]),
    "alias": ("a: &x 1\nb: *x", ["alias *x", "line 2, column 4", "write the value out"]),
    "alias to itself": ("&x [*x]", ["alias *x"]),
    "alias bomb": ("a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", ["alias *a", "line 2"]),
    "merge key": ("a:\n  <<: {b: 1}", ["merge key", "line 2, column 3"]),
    "core tag": ("a: !!int '3'", ["tag !!int", "line 1, column 4", "remove it"]),
    "tag with a value that does not fit": ("a: !!bool maybe", ["tag !!bool"]),
    "empty integer tag": ("a: !!int ''", ["tag !!int"]),
    "timestamp tag": ("a: !!timestamp x", ["tag !!timestamp"]),
    "set": ("a: !!set {b, c}", ["tag !!set"]),
    "python tag": ("a: !!python/object/apply:os.getcwd []", ["tag !!python/object/apply:os.getcwd"]),
    "own tag": ("!mine\na: 1", ["tag !mine", "line 1, column 1"]),
    "the loader's internal tag": ("a: !surprise {b: 1}", ["tag !surprise"]),
    "non-specific tag": ("a: ! 3", ["tag !"]),
    "two documents": ("a: 1\n---\nb: 2", ["second document", "line 2", "keep one"]),
    "an empty second document": ("a: 1\n...\n---\n", ["second document", "line 3"]),
    "another YAML version": ("%YAML 3.0\n---\na: 1", ["version", "line 1"]),
    "NUL": ("a: 1\nb: 'x\0'", ["U+0000", "line 2", "remove it"]),
    "NUL escape": ('a: "x\\0"', ["'x\\x00'", "line 1, column 4"]),
    "control character": ("a: \x07", ["U+0007", "line 1"]),
    "surrogate": ("a: \ud800", ["U+D800"]),
    "surrogate escape": ('a: "\\ud800"', ["half a character", "line 1, column 4"]),
    "escape beyond Unicode": ('a: 1\nb: "\\UFFFFFFFF"', ["escape", "line 2", "remove"]),
    "escape just beyond Unicode": ('a: "\\U00110000"', ["escape", "line 1", "remove"]),
    "unknown escape": ('a: "\\q"', ["line 1, column 6"]),
    "integer of 5,000 digits": ("a: " + "7" * 5000, ["5000 digits", "line 1, column 4", "smaller"]),
    "negative integer of 50 digits": ("a: -" + "7" * 50, ["50 digits"]),
    "float out of range": ("a: 1e999", ["'1e999'", "beyond the range", "line 1"]),
    "negative float out of range": ("a: -1.0e999", ["'-1.0e999'"]),
    "integer key": ("3: x", ["key 3 is not a name", "line 1, column 1", "quote it"]),
    "boolean key": ("true: x", ["key true"]),
    "null key": ("~: x", ["key null"]),
    "list key": ("? [a, b]\n: x", ["key ['a', 'b']"]),
    "mapping key": ("{a: 1}: x", ["key {'a': 1}"]),
    "no key": (": 1", ["line 1, column 1"]),
    "deep flow": ("a: " + "[" * 500 + "]" * 500, [f"more than {MAX_DEPTH} levels", "line 1"]),
    "deep blocks": ("".join("  " * depth + "a:\n" for depth in range(100)), ["levels", "line 20"]),
    "deep lists": ("- " * 10_000 + "x", ["levels"]),
    "deep keys": ("? " * 10_000 + "x", ["levels"]),
    "open bracket": ("b: 1\na: [1, 2\n", ["inside a bracket", "line 2, column 4", "close"]),
    "open brace": ("a: {b: 1", ["inside a bracket", "line 1, column 4"]),
    "open quote": ("b: 1\na: 'x\n", ["inside a quote", "line 2, column 4", "close the quote"]),
    "two colons": ("a: b: c", ["`:`", "'a: b: c'", "line 1, column 5", "quote"]),
    "crooked indentation": ("a:\n  b: 1\n c: 2", ["'c: 2'", "line 3, column 2", "indent"]),
    "at sign": ("a: @x", ["'@'", "line 1, column 4", "quotes"]),
    "backtick": ("a: `x`", ["'`'", "quotes"]),
    "lonely star": ("a: *", ["line 1"]),
    "percent": ("%", ["line 1"]),
    "key of 2,000 letters": ("a" * 2000 + ": 1", ["line 1"]),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_refused_with_its_place_and_a_way_out(name):
    text, expected = BAD_TEXT[name]
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, name="some.yaml")
    message = str(caught.value)
    assert [part for part in [*expected, "some.yaml"] if part not in message] == [], message
    assert caught.value.hint and len(message) < 300 and "\n" not in message and message.isprintable()


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
        (b"", ["is empty", "begin with sections"]),
        (b"# only a comment\n", ["is empty"]),
        (b"---\n", ["is empty"]),
        (b"~", ["is empty"]),
        (b"- a\n- b\n", ["['a', 'b']", "not sections", "begin with sections"]),
        (b"hello\n", ["'hello'"]),
        (b"3", ["holds 3"]),
        (b"a: 1\nb: caf\xe9\n", ["not UTF-8", "0xe9", "line 2", "save it as UTF-8"]),
        ("a: 1".encode("utf-16"), ["not UTF-8", "0xff"]),
        (b"a: 1\0", ["U+0000"]),
        (b"#" * (MAX_BYTES + 1), ["larger than", str(MAX_BYTES)]),
    ],
)
def test_a_file_that_holds_no_settings_is_refused_by_name(tmp_path, raw, expected):
    path = tmp_path / "c.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        read_yaml_mapping(path)
    assert [part for part in [*expected, str(path)] if part not in str(caught.value)] == [], str(caught.value)


def test_a_path_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("a: 1")
    bad = {
        tmp_path: "Is a directory",
        tmp_path / "none.yaml": "No such file",
        tmp_path / "file" / "below": "Not a directory",
        tmp_path / "a\0b": "null byte",
        tmp_path / ("a" * 5000): "too long",
        type(tmp_path)("/dev/zero"): "larger than",  # size 0, no end
    }
    for path, reason in bad.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            read_yaml_mapping(path)
        assert caught.value.hint and len(str(caught.value)) < 400


def test_byte_order_mark_line_ends_and_the_full_size_are_accepted(tmp_path):
    path = tmp_path / "c.yaml"
    for raw in (b"\xef\xbb\xbfa: 1\nb: 2\n", b"a: 1\r\nb: 2\r\n", b"a: 1\nb: 2".ljust(MAX_BYTES)):
        path.write_bytes(raw)
        assert read_yaml_mapping(path) == {"a": 1, "b": 2}


def test_an_override_sets_one_value_and_leaves_its_neighbours():
    tree = {"a": {"b": 1, "c": 2}}
    for override in ("a.b=1e-6", "d.e.f=[1, x]", "g=", "h.i=a=b"):
        apply_override(tree, override)
    assert tree == {"a": {"b": 1e-6, "c": 2}, "d": {"e": {"f": [1, "x"]}}, "g": None, "h": {"i": "a=b"}}


@pytest.mark.parametrize(
    "override",
    ["", "=", "=3", "a", "a.b", ".", ".a=1", "a.=1", "a..b=1", "a b=1", "a =1", " a=1", "--a.b=1", "a-b=1", "a.0=1",
     "a\n=1", "a.'b'=1", ".".join("x" * 3000) + "=1"],
)  # fmt: skip
def test_an_override_of_another_form_is_refused_and_shown(override):
    tree = {}
    with pytest.raises(
        ConfigError, match=r"override ['\"].* is not of the form section\.name=value; write it like"
    ) as caught:
        apply_override(tree, override)
    assert tree == {} and len(str(caught.value)) < 300


def test_an_override_into_a_value_names_both_and_leaves_the_tree():
    for value, shown in ((3, "3"), (None, "null"), ([1], r"\[1\]"), ("m", "'m'")):
        tree = {"a": {"b": value}}
        with pytest.raises(ConfigError, match=f"a.b.c='x' needs the section a.b, but a.b={shown}; remove") as caught:
            apply_override(tree, "a.b.c=x")
        assert caught.value.field == "a.b.c" and tree == {"a": {"b": value}}


@pytest.mark.parametrize(
    "text", ["[", "a: b: c", "*x", "!!int 3", "010", "\t", "2\0", "\udcff", '"', "9" * 5000, "1e999"]
)
def test_an_override_with_a_bad_value_names_the_override(text):
    with pytest.raises(ConfigError, match=r"\(override 'a\.b=.*'.* line 1") as caught:
        apply_override({}, f"a.b={text}")
    assert caught.value.hint and len(str(caught.value)) < 300


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
