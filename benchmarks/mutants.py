"""How many small defects the tests find, in two commits.

    python benchmarks/mutants.py OLD NEW --count 200 [--seed 0] [--out FILE]

OLD and NEW are checkouts that this script may write to; afterwards both are as before. A mutant is one change of one
function: another comparison or operator, a condition that is negated, a constant plus one, a statement left out. All
mutants are drawn from functions that are the same in both checkouts, so both suites are asked about the same defects.
A mutant is killed when a test of its package fails (default tier), or when these tests take `--timeout` seconds.

The tests of NEW are asked about every mutant. The tests of OLD are asked only about those that survived there, since
only these can be losses; `--both` asks them about all.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import write_record

PACKAGES = {
    "slimefsdp/algorithms": ["tests/algorithms", "tests/test_algorithms.py"],
    "slimefsdp/attention": ["tests/attention", "tests/test_exactness.py"],
    "slimefsdp/batching": ["tests/batching", "tests/training", "tests/preparation"],
    "slimefsdp/training": ["tests/training", "tests/preparation", "tests/test_trainer.py", "tests/test_algorithms.py"],
    "slimefsdp/preparation": ["tests/preparation", "tests/training", "tests/test_trainer.py"],
    "actors/fault_tolerance": ["tests/fault_tolerance"],
}
COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One defect: the `index`th possible change of the function `name` in `file`."""

    file: str  # in the checkout
    name: str
    index: int
    change: str  # for people


def _without_docstrings(tree: ast.AST) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def functions(root: Path) -> dict[str, tuple[str, str]]:
    """Returns the file and the name of each function of the packages, by its code without docstrings."""
    found = {}
    for package in PACKAGES:
        for file in sorted((root / package).rglob("*.py")):
            for node in ast.walk(_without_docstrings(ast.parse(file.read_text()))):
                if isinstance(node, ast.FunctionDef):
                    found[ast.dump(node)] = (file.relative_to(root).as_posix(), node.name)
    return found


def changes(function: ast.FunctionDef) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each possible change of a function: a description, and what makes it in the tree.

    Annotations, defaults, error messages and f-strings stay as they are.
    """
    for statement in function.body:
        yield from _changes_in(statement)


def _changes_in(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.Lambda | ast.arguments):
        return
    text = ast.unparse(node).splitlines()[0] if isinstance(node, ast.expr | ast.stmt) else ""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        replacement = COMPARISONS[type(node.ops[0])]()
        yield f"{text}: {type(replacement).__name__}", lambda: node.ops.__setitem__(0, replacement)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OPERATORS:
        operator = OPERATORS[type(node.op)]()
        yield f"{text}: {type(operator).__name__}", lambda: setattr(node, "op", operator)
    if isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{text}: {type(other).__name__}", lambda: setattr(node, "op", other)
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        negated = ast.UnaryOp(ast.Not(), node.test)
        yield f"{text}: condition negated", lambda: setattr(node, "test", negated)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{text}: {value}", lambda: setattr(node, "value", value)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield f"{text}: left out", lambda: setattr(node, "value", ast.Constant(None))
    for field, child in ast.iter_fields(node):
        if isinstance(node, ast.AnnAssign) and field == "annotation":
            continue
        for part in child if isinstance(child, list) else [child]:
            if isinstance(part, ast.AST):
                yield from _changes_in(part)


def _function(tree: ast.AST, code: str) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.dump(_without_docstrings(node)) == code:
            return node
    raise ValueError("the function is not there")


def draw(old: Path, new: Path, count: int, seed: int) -> list[tuple[str, Mutant, Mutant]]:
    """Returns `count` mutants, each with its function's code, as it is in OLD and in NEW."""
    of_old, of_new = functions(old), functions(new)
    candidates = []
    for code in sorted(set(of_old) & set(of_new)):
        file, name = of_new[code]
        function = _function(ast.parse((new / file).read_text()), code)
        for index, (change, _) in enumerate(changes(function)):
            candidates.append((code, Mutant(*of_old[code], index, change), Mutant(file, name, index, change)))
    return random.Random(seed).sample(candidates, count)


def tests_of(root: Path, file: str) -> list[str]:
    """Returns the tests of a file's package; those that have the module's name come first."""
    package = next(name for name in PACKAGES if file.startswith(f"{name}/"))
    places = [place for place in PACKAGES[package] if (root / place).exists()]
    modules = [path for place in places for path in sorted((root / place).glob("test_*.py"))]
    stem = Path(file).stem
    named = [path.relative_to(root).as_posix() for path in modules if stem in path.stem]
    # pytest runs a file once, where it is named first
    return [*named, *places]


def ask(root: Path, code: str, mutant: Mutant, timeout: float) -> str | None:
    """Makes the change in the checkout, runs the tests, and takes the change back.

    Returns:
        The test that failed, or what else ended the tests; None: the mutant survived.
    """
    path = root / mutant.file
    source = path.read_text()
    tree = ast.parse(source)
    list(changes(_function(tree, code)))[mutant.index][1]()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests_of(root, mutant.file)]
    variables = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        path.write_text(ast.unparse(ast.fix_missing_locations(tree)))
        process = subprocess.Popen(
            command,
            cwd=root,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout"
        if process.returncode == 0:
            return None
        failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return failed[0][:200] if failed else f"exit status {process.returncode}"
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of one mutant")
    parser.add_argument("--both", action="store_true", help="ask OLD about the mutants that NEW kills, too")
    parser.add_argument("--out", type=Path, help="writes the record after each mutant")
    args = parser.parse_args()
    old, new = args.old.resolve(), args.new.resolve()
    rows: list[dict[str, Any]] = []
    for number, (code, of_old, of_new) in enumerate(draw(old, new, args.count, args.seed), 1):
        row = {**asdict(of_new), "new": ask(new, code, of_new, args.timeout)}
        if args.both or row["new"] is None:
            row["old"] = ask(old, code, of_old, args.timeout)
        rows.append(row)
        print(f"{number}/{args.count} {row}", flush=True)
        results = {
            "killed_by_new": sum(row["new"] is not None for row in rows),
            "killed_by_old_alone": sum(row["new"] is None and row["old"] is not None for row in rows),
            "mutants": rows,
        }
        write_record(args.out, "mutants", 1, results)


if __name__ == "__main__":
    main()
