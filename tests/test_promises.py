"""docs/promises.md names tests that exist, and that the default tier runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[1] / "docs/promises.md").read_text(encoding="utf-8")


def test_the_default_tier_has_a_test_of_every_contract(default_tier: list[pytest.Item]) -> None:
    rows = re.findall(r"^\| (.+) \| `(tests/[\w/]+\.py::test_\w+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == sum(line.startswith("| ") for line in PAGE.splitlines()) - PAGE.count("| contract | test |")
    in_tier = {item.nodeid.partition("[")[0] for item in default_tier}
    assert [test for _, test in rows if test not in in_tier] == []
