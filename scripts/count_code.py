"""Counts the size of the code, and how much of the code a training step runs.

    python scripts/count_code.py CHECKOUT [CHECKOUT ...] [--json FILE] [--static]

Two numbers come from a run of one step of `slimefsdp train` (left out with --static):

- files until the first optimiser step: files of `slimefsdp/` and `actors/` in which a function ran, over all processes.
  Code that runs while a module is imported does not count.
- files, stays and returns in a rank: the functions that one rank calls between the start of `train_step` and the
  optimiser step, in the order of their first calls. A stay is a sequence of successive functions in the same file. A
  return is a stay in a file that had an earlier stay.

All other numbers are counted in the source: lines, files, classes and functions beyond the limits of
docs/contributing.md, settings, commands, words of the documents, and cycles of imports.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

PACKAGES = ("slimefsdp", "actors")
MAX_FILE_LINES, MAX_CLASS_LINES, MAX_PARAMETERS = 500, 350, 8
# this becomes sitecustomize.py, which every Python process imports if the file is on its path
TRACER = """
import os, sys, threading, time

ROOT, LOG = os.environ["COUNT_FILES_OF"], os.environ["COUNT_FILES_INTO"]
STEPS = ("slimefsdp/trainer.py", "slimefsdp/calls/training.py")
seen, in_step, functions, state = set(), set(), set(), {"step": None, "stopped": False}

def note(kind, name):
    with open(os.path.join(LOG, str(os.getpid())), "a") as file:
        file.write(f"{time.time()} {kind} {name}\\n")

def is_import(frame):
    while frame is not None:
        name = frame.f_code.co_filename
        is_module = frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        if is_module and name.startswith(ROOT) or name.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

def profile(frame, event, argument):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(ROOT) or not code.co_flags & 1:  # 1: a function's own
        return
    name = code.co_filename[len(ROOT):]
    if not name.startswith(("slimefsdp/", "actors/")):
        return
    if name in STEPS and code.co_name == "train_step" and not state["step"]:
        state["step"] = threading.get_ident()
    is_update = state["step"] and code.co_name == "update_shards"  # optimizer.step() by a function of the project's own
    is_new = state["step"] == threading.get_ident() and code not in functions
    if name in seen and not is_new and not is_update:
        return
    if is_import(frame):
        return
    if is_new:
        functions.add(code)
        note("function", name)
    if name not in seen:
        seen.add(name)
        note("entered", name)
    if state["step"] and name not in in_step:
        in_step.add(name)
        note("in_step", name)
    if is_update:
        stepping()

def stepping(*_):
    note("optimizer", "-")
    sys.setprofile(None)
    threading.setprofile(None)
    state.update(step=None, stopped=True)

def at_optimizer():
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(stepping)

def in_ray_calls(module):
    # Ray runs an actor's calls in threads that `threading` knows nothing of
    made = module.FunctionActorManager._make_actor_method_executor
    def executor(self, name, method):
        run = made(self, name, method)
        def call(*args, **kwargs):
            if not state["stopped"]:
                sys.setprofile(profile)
            return run(*args, **kwargs)
        call.name, call.method = run.name, run.method
        return call
    module.FunctionActorManager._make_actor_method_executor = executor

AFTER = {"slimefsdp.trainer": lambda _: at_optimizer(), "ray._private.function_manager": in_ray_calls}

class Hook:
    def find_spec(self, name, path=None, target=None):
        if name not in AFTER:
            return None
        import importlib.util
        after = AFTER.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            after(module)
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Hook())
sys.setprofile(profile)
threading.setprofile(profile)
"""

# an untrained model solves nothing, and with equal rewards there would be no optimiser step
REWARD = "def reward(record, response, finished):\n    return {'reward': float(len(response) % 2)}\n"


def walked(checkout: Path) -> dict[str, Any]:
    """Runs the sort-digits example of the checkout for one step; returns which files and functions ran."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(TRACER)
        (folder / "log").mkdir()
        (folder / "even_length.py").write_text(REWARD)
        surroundings = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        data = folder / "data"
        make = [sys.executable, str(checkout / "scripts" / "make_sort_digits.py"), str(data)]
        subprocess.run(make, env=surroundings, check=True, stdout=subprocess.DEVNULL)
        settings = [
            f"run.dir={folder / 'run'}", "run.steps=1", f"model.path={data / 'model'}",
            f"data.train={data / 'train.jsonl'}", f"data.heldout={data / 'heldout.jsonl'}",
            "checkpoint.interval_steps=1", "evaluation.interval_steps=null",
            "rollout.reward=even_length:reward",
        ]  # fmt: skip
        config = str(checkout / "configs" / "sort_digits_grpo.yaml")
        subprocess.run(
            [sys.executable, "-m", "actors.cli", "train", config, *settings],
            env=surroundings
            | {
                "PYTHONPATH": os.pathsep.join([str(folder), str(checkout)]),
                "COUNT_FILES_OF": f"{checkout}{os.sep}",
                "COUNT_FILES_INTO": str(folder / "log"),
            },
            cwd=folder,  # otherwise `-m` would find the packages of the current folder
            check=True,
            stdout=subprocess.DEVNULL,
        )
        logs = {
            int(file.name): [line.split(" ", 2) for line in file.read_text().splitlines()]
            for file in (folder / "log").iterdir()
        }
    ranks = {pid: float(time) for pid, lines in logs.items() for time, kind, _ in lines if kind == "optimizer"}
    until = min(ranks.values())
    first = min(ranks, key=ranks.__getitem__)
    functions = [name for _, kind, name in logs[first] if kind == "function"]
    stays = [name for name, _ in groupby(functions)]
    before = [(pid, kind, name) for pid, lines in logs.items() for time, kind, name in lines if float(time) <= until]
    return {
        "processes": len(logs),
        "until_first_step": sorted({name for _, kind, name in before if kind == "entered"}),
        "inside_a_rank": sorted({name for pid, kind, name in before if kind == "in_step" and pid == first}),
        "stays_in_a_rank": stays,
    }


def layout(checkout: Path) -> dict[str, Any]:
    """Returns counts of lines, the longest files, loose modules and cycles of imports."""
    lines = {
        str(path.relative_to(checkout)): len(path.read_text().splitlines())
        for folder in (*PACKAGES, "tests")
        for path in (checkout / folder).rglob("*.py")
    }
    product = {path: count for path, count in lines.items() if not path.startswith("tests")}
    return {
        "product_lines": sum(product.values()),
        "test_lines": sum(lines.values()) - sum(product.values()),
        "product_files": len(product),
        "longest": dict(sorted(product.items(), key=lambda entry: -entry[1])[:10]),
        "loose_modules": {
            package: sum(1 for path in (checkout / package).glob("*.py") if path.stem != "__init__")
            for package in PACKAGES
        },
        **beyond_limits(checkout, product),
        "settings": number_of_settings(checkout),
        "words_of_documents": sum(number_of_words(path) for path in documents(checkout)),
        "import_circles": circles({path: set(imports(checkout, path)) for path in product}),
    }


def beyond_limits(checkout: Path, product: dict[str, int]) -> dict[str, list[str]]:
    """Returns files, classes and functions that are larger than docs/contributing.md allows."""
    classes, functions = [], []
    for path in product:
        if path.endswith("_pb2.py"):
            continue
        for node in ast.walk(ast.parse((checkout / path).read_text())):
            if isinstance(node, ast.ClassDef) and (size := (node.end_lineno or 0) - node.lineno + 1) > MAX_CLASS_LINES:
                classes.append(f"{path}:{node.name} ({size})")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
                if len(names) > MAX_PARAMETERS:
                    functions.append(f"{path}:{node.name} ({len(names)})")
    return {
        "long_files": [f"{path} ({lines})" for path, lines in sorted(product.items()) if lines > MAX_FILE_LINES],
        "long_classes": sorted(classes),
        "many_parameters": sorted(functions),
    }


def number_of_settings(checkout: Path) -> int:
    """Returns the number of settings, which are rows of the tables in docs/settings.md."""
    text = (checkout / "docs" / "settings.md").read_text()
    return len(re.findall(r"^\| `[a-z_]+", text, re.MULTILINE))


def number_of_words(document: Path) -> int:
    """Returns the number of words with a letter or digit in a document; this excludes the marks of tables and lists."""
    return sum(re.search(r"\w", word) is not None for word in document.read_text().split())


def documents(checkout: Path) -> list[Path]:
    """Returns README, docs/ and the pages of configs/ and benchmarks/."""
    return [
        checkout / "README.md",
        *(checkout / "docs").glob("*.md"),
        *(checkout / "configs").glob("*.md"),
        *(checkout / "benchmarks").rglob("*.md"),
    ]


def imports(checkout: Path, path: str) -> Iterator[str]:
    """Yields the product's files that a file imports, including imports in functions and for the type checker.

    `from package import module` counts as an import of the module, not of the package.
    """
    waiting: list[ast.AST] = [ast.parse((checkout / path).read_text())]
    while waiting:
        node = waiting.pop()
        if path.endswith("__init__.py") and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue  # names that a package imports at their first use
        waiting += ast.iter_child_nodes(node)
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                is_module = any(
                    (checkout / f"{node.module}.{alias.name}".replace(".", "/")).with_suffix(end).exists()
                    for end in (".py", "")
                )
                names.append(f"{node.module}.{alias.name}" if is_module else node.module)
        for name in names:
            for file in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if name.split(".")[0] in PACKAGES and (checkout / file).is_file():
                    yield file


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns groups of files that import each other, directly or indirectly: Tarjan's components of several files."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in graph[node] & graph.keys():
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            position = stack.index(node)
            if len(stack) - position > 1:
                components.append(sorted(stack[position:]))
            del stack[position:]

    for node in graph:
        if node not in number:
            visit(node)
    return sorted(components)


def summary(figures: dict[str, Any]) -> dict[str, int]:
    """Returns the counts of a checkout by their names in docs/contributing.md."""
    counts = {
        "lines of product": figures["product_lines"],
        "lines of tests": figures["test_lines"],
        "files of product": figures["product_files"],
        "settings": figures["settings"],
        f"files above {MAX_FILE_LINES} lines": len(figures["long_files"]),
        f"classes above {MAX_CLASS_LINES} lines": len(figures["long_classes"]),
        f"functions with more than {MAX_PARAMETERS} parameters": len(figures["many_parameters"]),
        "words of documents": figures["words_of_documents"],
        "circles of imports": len(figures["import_circles"]),
    }
    if "until_first_step" in figures:
        stays = figures["stays_in_a_rank"]
        counts |= {
            "files until the first optimiser step": len(figures["until_first_step"]),
            "files in a rank": len(figures["inside_a_rank"]),
            "stays in a rank": len(stays),
            "returns in a rank": len(stays) - len(set(stays)),
        }
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path, help="write all names here, too")
    parser.add_argument("--static", action="store_true", help="run nothing")
    options = parser.parse_args()
    record = {}
    for checkout in (path.resolve() for path in options.checkouts):
        commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
        figures = {"commit": commit.stdout.strip(), **({} if options.static else walked(checkout)), **layout(checkout)}
        record[figures["commit"] or str(checkout)] = figures
        print(f"{figures['commit'][:12] or checkout}")
        for name, value in summary(figures).items():
            print(f"  {name:<44} {value:>8,}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
