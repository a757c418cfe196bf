"""docs/promises.md names tests that are there: for each promise the one of the default tier that holds it."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/promises.md").read_text(encoding="utf-8")
HEADER = "| promise | default tier | full tier |"
TEST = r"`(tests/[\w/]+\.py::test_\w+)`"


def promises(page: str) -> list[tuple[str, list[str], list[str]]]:
    """Every row of every table: the promise, the tests of its second column, those of its third."""
    rows = []
    for line in page.splitlines():
        if not line.startswith("|") or line == HEADER or re.fullmatch(r"[|-]+", line):
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, f"a row has three cells: {line}"
        for cell in cells[1:]:
            assert re.fullmatch(rf"({TEST}(, {TEST})*)?", cell), f"tests in backticks, and commas between them: {cell}"
        rows.append((cells[0], re.findall(TEST, cells[1]), re.findall(TEST, cells[2])))
    return rows


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """The names of a module's test functions."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(rows: list[tuple[str, list[str], list[str]]]) -> list[str]:
    """The tests that are named and are not there."""
    named = {test for _, default, full in rows for test in (*default, *full)}
    found = (test.split("::") for test in sorted(named))
    return [f"{file}::{name}" for file, name in found if not (ROOT / file).is_file() or name not in functions_of(file)]


def test_every_promise_names_one_test_of_the_default_tier_and_no_test_twice() -> None:
    rows = promises(PAGE)
    assert len(rows) >= 120
    for promise, default, full in rows:
        assert promise.endswith("."), f"a sentence: {promise}"
        assert len(default) == 1, f"one test holds it: {promise}"
        assert len({*default, *full}) == 1 + len(full), f"a test is named twice: {promise}"


def test_no_promise_is_made_twice() -> None:
    counts = Counter(promise.lower() for promise, _, _ in promises(PAGE))
    assert [promise for promise, count in counts.items() if count > 1] == []


def test_every_test_that_the_page_names_exists() -> None:
    assert missing(promises(PAGE)) == []


def test_the_default_tier_has_a_test_of_every_promise(default_tier: list[pytest.Item]) -> None:
    held = {item.nodeid.partition("[")[0] for item in default_tier}
    assert [promise for promise, (test, *_), _ in promises(PAGE) if test not in held] == []


@pytest.mark.parametrize("test", ["tests/test_promises.py::test_no_such_test", "tests/test_no_such_module.py::test_a"])
def test_a_test_that_is_gone_is_seen(test: str) -> None:
    row = f"| It works. | `{test}` | |"
    assert missing(promises(f"{HEADER}\n|---|---|---|\n{row}")) == [test]
