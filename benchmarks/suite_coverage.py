"""How much of the product the tests reach: lines, branches, and which typed errors they raise about which fields.

    python benchmarks/suite_coverage.py run --out NEW.json [-- ARGUMENTS FOR PYTEST]
    python benchmarks/suite_coverage.py compare OLD.json NEW.json [--out FILE]

`run` needs the package `coverage` and the current folder to be a checkout with its tests. Every Python process that the
tests start is counted (ranks, Ray's workers, the command line), but for those that are killed. It exits with pytest's
status. `compare` exits with 1 where the newer suite covers a smaller share of lines or branches, or never raises an
error class about a field that the older one raised it about.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment

PACKAGES = ("slimefsdp", "actors")
# ranks end in os._exit, Ray's workers, which are forked, by a signal; without `patch` and `sigterm` neither would leave
# its counts
COVERAGE = """\
[run]
branch = true
source = {packages}
data_file = {folder}/.coverage
parallel = true
concurrency = thread,multiprocessing
patch = subprocess,fork,_exit
sigterm = true
disable_warnings = no-data-collected,module-not-imported,module-not-measured,couldnt-parse
"""
# imported by every Python process that finds it on its path; notes each error of the product when it is made
SITECUSTOMIZE = """\
import contextlib, importlib.abc, importlib.util, os, sys

class _Recorder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "slimefsdp.errors":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            base = module.SlimeError
            made = base.__init__
            def __init__(self, *args, **kwargs):
                made(self, *args, **kwargs)
                # tests that forbid a process to write large files, or any, go without
                with contextlib.suppress(OSError):
                    with open(os.path.join(os.environ["RECORD_ERRORS"], str(os.getpid())), "a") as file:
                        file.write(f"{type(self).__name__}\\t{self.field}\\n")
            base.__init__ = __init__
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, _Recorder())
"""


def run(out: Path, pytest_arguments: list[str]) -> int:
    """Runs the tests and writes what they reached as JSON; returns pytest's exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = folder / "coveragerc"
        settings.write_text(COVERAGE.format(packages=",".join(PACKAGES), folder=folder))
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        errors = folder / "errors"
        errors.mkdir()
        surroundings = {
            **os.environ,
            "COVERAGE_RCFILE": str(settings),
            "RECORD_ERRORS": str(errors),
            "PYTHONPATH": os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        coverage = [sys.executable, "-m", "coverage"]
        tests = subprocess.run([*coverage, "run", "-m", "pytest", *pytest_arguments], env=surroundings)
        subprocess.run([*coverage, "combine", "--quiet", f"--rcfile={settings}", name], check=True)
        report = folder / "report.json"
        subprocess.run([*coverage, "json", "--quiet", f"--rcfile={settings}", "-o", report], check=True)
        write_result(out, report, errors, pytest_arguments, tests.returncode)
    return tests.returncode


def write_result(out: Path, report: Path, errors: Path, pytest_arguments: list[str], status: int) -> None:
    """Writes lines and branches per file out of coverage's JSON report, and the sorted pairs of error class and field.

    Args:
        errors: the folder in which every process noted its own.
    """
    files = {name: file["summary"] for name, file in sorted(json.loads(report.read_text())["files"].items())}
    lines = {name: [summary["covered_lines"], summary["num_statements"]] for name, summary in files.items()}
    branches = {name: [summary["covered_branches"], summary["num_branches"]] for name, summary in files.items()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "what": "lines and branches of the product that the tests ran [covered, all], and typed errors raised",
        **environment(threads=int(os.environ.get("OMP_NUM_THREADS", "1"))),
        "commit": commit,
        "pytest": pytest_arguments,
        "exit_status": status,
        "share": _share(_sum(lines)),
        "share_of_branches": _share(_sum(branches)),
        "lines": lines,
        "branches": branches,
        "errors": sorted({plain_pair(line) for file in errors.iterdir() for line in file.read_text().splitlines()}),
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"covered: {_share(_sum(lines)):.2%} of lines, {_share(_sum(branches)):.2%} of branches; "
        f"{len(result['errors'])} errors"
    )


def plain_pair(line: str) -> str:
    """`BatchError tokens[3]` as `BatchError tokens[N]`: which sample or file it was differs from run to run."""
    name, _, field = line.partition("\t")
    field = re.sub(r"\S*/\S+", "PATH", re.sub(r"\d+", "N", field))
    return f"{name} {field}"


def _sum(counts: dict[str, list[int]]) -> list[int]:
    return [sum(pair[i] for pair in counts.values()) for i in (0, 1)]


def _share(counts: list[int]) -> float:
    return counts[0] / counts[1] if counts[1] else 1.0


def compare(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What the newer suite lost; names that tests make by flipping bits of a field's name at random are none."""
    kept = set(new["errors"])
    lost = {pair for pair in set(old["errors"]) - kept if not _is_damage_of_one(pair, kept)}
    return {
        "commits": [old["commit"], new["commit"]],
        "share": [old["share"], new["share"]],
        "share_of_branches": [old["share_of_branches"], new["share_of_branches"]],
        "statements": [_sum(result["lines"])[1] for result in (old, new)],
        "errors": [len(old["errors"]), len(new["errors"])],
        "errors_lost": sorted(lost),
        "files_covered_less": {
            name: [old["lines"][name], new["lines"][name]]
            for name in sorted(old["lines"].keys() & new["lines"].keys())
            if _share(new["lines"][name]) < _share(old["lines"][name])
        },
        "exit_status": [old["exit_status"], new["exit_status"]],
        "is_worse": bool(lost) or any(new[share] < old[share] for share in ("share", "share_of_branches")),
    }


def _is_damage_of_one(pair: str, known: set[str]) -> bool:
    """Whether one character of a pair that is known became another that no name of a field has."""
    if re.fullmatch(r"\w+ [a-z0-9_.]+", pair):
        return False
    return any(
        len(other) == len(pair) and sum(a != b for a, b in zip(pair, other, strict=True)) == 1 for other in known
    )


def main() -> int:
    """The command line; see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("run")
    measuring.add_argument("--out", type=Path, required=True)
    measuring.add_argument("pytest_arguments", nargs="*")
    comparing = commands.add_parser("compare")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.out, arguments.pytest_arguments)
    difference = compare(*(json.loads(path.read_text()) for path in (arguments.old, arguments.new)))
    text = json.dumps(difference, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return int(difference["is_worse"])


if __name__ == "__main__":
    sys.exit(main())
