"""Which tests the default tier runs, and which are left to `bash scripts/test.sh --all`: told by what a test uses.

Left to the whole suite are tests on a Ray cluster or in processes that they start, on architectures that another one
stands for, on more than two ranks, and of many cases on ranks all but a few.
"""

from __future__ import annotations

import math
import subprocess
import types
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.support.tiny_models import ARCHITECTURES

STAND_FOR_ALL = {"qwen3", "qwen3_moe"}  # a dense model and one with experts
QUICK_EXAMPLES = 20
CASES = 2  # of a test on ranks, unless its module has another number as DEFAULT_CASES
AXES = {"dp", "dp_replicate", "cp", "tp"}
COUNTS = {*AXES, "ranks", "world", "world_size", "size", "shards", "writers", "readers"}
WORDS = {
    "ray": "on a Ray cluster",
    "processes": "in processes of their own",
    "architecture": "of other architectures",
    "ranks": "on more than two ranks",
    "cases": "more cases on ranks",
    "slow": "slow ones",
}
is_whole = False  # set before test modules are imported
is_part = pytest.StashKey[bool]()  # of a session: only some files or tests were asked for
collected = pytest.StashKey[list[pytest.Item]]()  # of a session, before any were left out


def often(count: int) -> int:
    """How often a test repeats something: so often in the whole suite, a tenth of it in the default tier."""
    return count if is_whole else max(count // 10, 2)


def examples(count: int) -> hypothesis.settings:
    """Settings for a property with so many examples in the whole suite, and few in the default tier."""
    return hypothesis.settings(max_examples=count if is_whole else min(count, QUICK_EXAMPLES), deadline=None)


def reached(function: Any) -> Iterator[Any]:
    """What a test's code names, through functions and classes of the tests."""
    waiting, seen = [function], set()
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, types.MethodType):
            thing = thing.__func__
        while hasattr(thing, "__wrapped__"):
            thing = thing.__wrapped__
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if not str(getattr(thing, "__module__", "")).startswith("tests."):
            continue
        if isinstance(thing, type):
            waiting += [value for value in vars(thing).values() if callable(value)]
        elif isinstance(thing, types.FunctionType):
            if hasattr(thing, "hypothesis"):
                waiting.append(thing.hypothesis.inner_test)
            codes = [thing.__code__]
            for code in codes:
                codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
                waiting += [thing.__globals__[name] for name in code.co_names if name in thing.__globals__]


def used(item: pytest.Item) -> list[Any]:
    """What a test and its fixtures name."""
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009
    fixtures = [definition.func for found in definitions.values() for definition in found]
    return [thing for function in (getattr(item, "obj", None), *fixtures) for thing in reached(function)]


def parameters(item: pytest.Item) -> dict[str, Any]:
    """By name, of the test and of its fixtures."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def ranks_of(name: str, value: Any) -> int:
    """How many ranks a parameter asks for, as far as it tells."""
    if isinstance(value, dict):
        axes = [size for axis, size in value.items() if axis in AXES and isinstance(size, int)]
        return max([math.prod(axes), *(ranks_of(key, inner) for key, inner in value.items())])
    if name == "axes" and isinstance(value, tuple):
        return math.prod(value)
    return value if name in COUNTS and isinstance(value, int) else 1


def left_because(item: pytest.Item) -> str | None:
    """Why a test is left to the whole suite, a key of WORDS; None: it is of the default tier."""
    fixtures, given = set(getattr(item, "fixturenames", ())), parameters(item)
    if item.get_closest_marker("default_tier"):
        return None
    if item.get_closest_marker("slow"):
        return "slow"
    if "cluster" in fixtures:
        return "ray"
    if any(thing is subprocess for thing in used(item)):
        return "processes"
    if {value for value in given.values() if isinstance(value, str)} & (ARCHITECTURES.keys() - STAND_FOR_ALL):
        return "architecture"
    if "ranks" in fixtures:
        each = {name: ranks_of(name, value) for name, value in given.items()}
        together = math.prod(size for name, size in each.items() if name in AXES)
        if max([together, *each.values()]) > 2:
            return "ranks"
    return None


def divide(items: list[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item], Counter[str]]:
    """(of the default tier, left to the whole suite, how many of these by reason)."""
    reasons = [left_because(item) for item in items]
    cases: dict[tuple[str, int], list[int]] = defaultdict(list)  # on ranks, by test function and how many it keeps
    for index, (item, reason) in enumerate(zip(items, reasons, strict=True)):
        is_chosen_by_hand = item.get_closest_marker("default_tier") is not None
        if reason is None and "ranks" in getattr(item, "fixturenames", ()) and not is_chosen_by_hand:
            kept = getattr(getattr(item, "module", None), "DEFAULT_CASES", CASES)
            cases[item.nodeid.partition("[")[0], kept].append(index)
    for (_, kept), indices in cases.items():
        for index in set(indices) - set(spread(indices, kept)):
            reasons[index] = "cases"
    chosen, left = [], []
    for item, reason in zip(items, reasons, strict=True):
        (chosen if reason is None else left).append(item)
    return chosen, left, Counter(reason for reason in reasons if reason is not None)


def spread(values: list[int], count: int) -> list[int]:
    """That many of them, the first, the last and some between; all, where there are no more."""
    if len(values) <= count or count == 1:
        return values[:count]
    return [values[round(step * (len(values) - 1) / (count - 1))] for step in range(count)]
