"""Rules about the source itself: tools run green, imports go one way, the package is complete."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("slimefsdp", "actors")

# who may import a package at all, by path
DOORS = {
    "ray": ("actors/",),
    "pydantic": (
        "actors/service/",
        "slimefsdp/config/",
        "slimefsdp/convert/dcp.py",
        "scripts/settings_reference.py",
    ),
    "transformers": (
        "actors/engines/",
        "actors/rollout/",
        "scripts/",
        "slimefsdp/checkpoint/export.py",
        "slimefsdp/models/",
    ),
    "actors": ("actors/", "scripts/", "slimefsdp/__init__.py"),
}
# the rooms of each package, from the ground up: each may import those above it in this list, and nothing else
ROOMS = {
    "slimefsdp": (
        *("errors", "heartbeat", "io", "model_spec", "data", "results", "rpc"),
        *("distributed", "batching", "algorithms", "attention", "models", "sampling", "optim", "weight_sync"),
        *("config", "checkpoint", "convert", "estimate", "monitoring"),
        *("training", "calls", "trainer", "replay"),
    ),
    "actors": (
        *("startup", "side_process", "cluster", "signals", "run_dir", "model_folders"),
        *(
            "workers",
            "fault_tolerance",
            "torchrun",
            "engines",
            "rollout",
            "supervised_loops",
            "loop",
            "service",
            "report",
            "cli",
        ),
    ),
}
# below the trainer functions take values, not settings; what prepares a step, or estimates it, makes values of settings
CONFIG_READERS = ("config", "estimate", "training", "calls", "trainer", "replay")
# what a driver decides about a batch, in a process without torch
DECIDED_ON_THE_DRIVER = tuple(f"slimefsdp/training/{name}.py" for name in ("advantages", "identity", "plan", "prepare"))


@cache
def trees(*folders: str) -> dict[str, ast.Module]:
    """Parsed Python files below these folders, by path from the root."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def imported_modules(node: ast.AST, with_names_for_mypy: bool) -> Iterator[str]:
    """Dotted names that a tree imports; `from a import b` gives a and a.b, since b may be a module."""
    if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        children: list[ast.AST] = [*(node.body if with_names_for_mypy else []), *node.orelse]
    else:
        children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "imports are absolute here"
        yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    for child in children:
        yield from imported_modules(child, with_names_for_mypy)


def room_of(path: str) -> str:
    """slimefsdp/batching/packing.py -> batching; slimefsdp/trainer.py -> trainer."""
    return Path(path).parts[1].removesuffix(".py")


def imported_rooms(package: str) -> Iterator[tuple[str, str]]:
    """(path, room of the same package that it imports when it runs)."""
    for path, tree in trees(package).items():
        for name in sorted(set(imported_modules(tree, with_names_for_mypy=False))):
            top, _, rest = name.partition(".")
            if top == package and (room := rest.split(".")[0]) in ROOMS[package]:
                yield path, room


@pytest.mark.parametrize(
    "command",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=" ".join,
)
def test_the_linters_have_nothing_to_say(command):
    run = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("package", DOORS)
def test_each_dependency_comes_in_through_its_own_door(package):
    strays = [
        f"{path} imports {name}"
        for path, tree in trees(*PACKAGES, "scripts").items()
        for name in imported_modules(tree, with_names_for_mypy=True)
        if name.split(".")[0] == package and not path.startswith(DOORS[package])
    ]
    assert not strays


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_its_place_in_the_order(package: str) -> None:
    assert {room_of(path) for path in trees(package)} - {"__init__"} == set(ROOMS[package])


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_between_rooms_go_one_way(package: str) -> None:
    height = {room: place for place, room in enumerate(ROOMS[package])}
    backwards = [
        f"{path} imports {package}.{imported}"
        for path, imported in imported_rooms(package)
        if room_of(path) != "__init__" and height[imported] > height[room_of(path)]
    ]
    assert not backwards


def test_only_the_top_of_the_library_reads_settings() -> None:
    readers = {room_of(path) for path, imported in imported_rooms("slimefsdp") if imported == "config"}
    assert readers <= {*CONFIG_READERS, "__init__"}


def test_no_module_of_the_library_imports_itself_through_others():
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in trees(*PACKAGES)}
    edges = {
        module: set(imported_modules(trees(*PACKAGES)[path], with_names_for_mypy=False)) & modules.keys() - {module}
        for module, path in modules.items()
    }
    while free := {module for module, needed in edges.items() if not needed}:
        edges = {module: needed - free for module, needed in edges.items() if module not in free}
    assert not edges, f"these import each other: {sorted(edges)}"


def test_data_and_losses_know_no_process_group():
    strays = [
        path
        for path, tree in trees("slimefsdp").items()
        if (room_of(path) in ("io", "data", "batching", "algorithms", "config") or path in DECIDED_ON_THE_DRIVER)
        and (
            any(name.startswith("torch.distributed") for name in imported_modules(tree, with_names_for_mypy=True))
            or any(
                ast.unparse(node) == "torch.distributed" for node in ast.walk(tree) if isinstance(node, ast.Attribute)
            )
        )
    ]
    assert not strays


def test_no_file_names_one_machine_or_a_package_host():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is not known")
    listing = subprocess.run(
        [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    pattern = re.compile(rb"(?<![\w.])/(?:work|opt|root|farm)/|pypi\.org|pythonhosted\.org")
    found = []
    for name in filter(None, listing.stdout.split(b"\0")):
        file = ROOT / os.fsdecode(name)
        if file.is_file():
            lines = enumerate(file.read_bytes().splitlines(), start=1)
            found += [f"{file.relative_to(ROOT)}:{number}" for number, line in lines if pattern.search(line)]
    assert not found


def test_no_test_module_imports_another():
    # what several need stands in tests/support, so that a test module can be moved or split alone
    strays = [
        f"{path} imports {name}"
        for path, tree in trees("tests", "benchmarks").items()
        for name in imported_modules(tree, with_names_for_mypy=True)
        if name.startswith("tests.")
        and any(part.startswith(("test_", "conftest")) for part in name.split("."))
        and not path.endswith("conftest.py")
    ]
    assert not strays


@pytest.mark.default_tier
def test_the_wheel_holds_both_packages_whole_and_nothing_else(tmp_path):
    source = tmp_path / "source"  # building leaves folders behind in the source
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "tests", "scripts", "configs", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    subprocess.run([sys.executable, "-m", "pip", *command, tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("slimefsdp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert "slimefsdp = actors.cli.main:main" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)
    kinds = ("*.py", "*.pyi", "*.proto", "py.typed", "config.json", "page.*", "uPlot.*", "LICENSE")
    files = [file for package in PACKAGES for kind in kinds for file in (source / package).rglob(kind)]
    assert {name for name in names if ".dist-info/" not in name} == {str(file.relative_to(source)) for file in files}
