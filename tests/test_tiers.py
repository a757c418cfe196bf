"""The default tier leaves out what it may, and nothing of the product."""

from __future__ import annotations

import ast
import types
from pathlib import Path

import pytest

from slimefsdp.config.rollout import SERVERS
from tests.support import tiers

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("slimefsdp", "actors")
ELSEWHERE = {"slimefsdp.weight_sync.vllm_plugin"}  # is imported inside vLLM alone: tests/engines/real


def imports_of(path: Path) -> set[str]:
    """Modules that a file of the product imports, wherever in it; `from a import b` gives a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_default_tier_touches_every_module(default_tier: list[pytest.Item]) -> None:
    """Each is named by one of its tests, or imported by a module that is, directly or through one more."""
    named = set()
    for thing in {id(thing): thing for item in default_tier for thing in tiers.used(item)}.values():
        named.add(thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None))
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    }
    # a command is imported by the command line when it is called
    named |= {name for name in imports_of(paths["actors.cli.main"]) if name.startswith("actors.cli.")}
    # and the engine of a server when settings name it
    named |= {server.dialect.partition(":")[0] for server in SERVERS.values()}
    touched = named
    for _ in range(2):
        touched = touched | {name for module in touched & paths.keys() for name in imports_of(paths[module])}
    assert sorted(paths.keys() - touched) == sorted(ELSEWHERE)
