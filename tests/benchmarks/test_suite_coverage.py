"""benchmarks/suite_coverage.py: when a newer suite counts as worse, and errors noted in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.suite_coverage import SITECUSTOMIZE, compare, plain_pair

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "suite_coverage.py"


def result(share: float, errors: list[str]) -> dict:
    return {"exit_status": 0, "commit": "0" * 40, "share": share, "lines": {"slimefsdp/a.py": [1, 2]}, "errors": errors}


@pytest.mark.parametrize(
    ("share", "errors", "status"),
    [
        (0.5, ["BatchError tokens[N]"], 0),
        (0.6, ["BatchError tokens[N]", "ConfigError mesh.dp"], 0),
        (0.49, ["BatchError tokens[N]"], 1),
        (0.6, ["ConfigError mesh.dp"], 1),
    ],
    ids=["equal", "more", "fewer lines", "an error lost"],
)
def test_compare_exits_by_whether_the_newer_suite_lost_something(tmp_path, share, errors, status):
    (tmp_path / "old.json").write_text(json.dumps(result(0.5, ["BatchError tokens[N]"])))
    (tmp_path / "new.json").write_text(json.dumps(result(share, errors)))
    command = [sys.executable, PROGRAM, "compare", tmp_path / "old.json", tmp_path / "new.json"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == status, run.stderr


def test_a_name_with_a_flipped_bit_is_no_field_that_was_lost() -> None:
    known = result(0.5, ["BatchError tokens", "ConfigError mesh.dp"])
    flipped = result(0.5, [*known["errors"], "BatchError token&", "BatchError toKens"])
    assert compare(flipped, known)["errors_lost"] == [] and not compare(flipped, known)["is_worse"]
    another = result(0.5, [*known["errors"], "ConfigError mesh.cp", "ModelError token&"])
    assert compare(another, known)["errors_lost"] == ["ConfigError mesh.cp", "ModelError token&"]


def test_errors_of_other_processes_are_noted_and_their_numbers_are_not(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    noted = tmp_path / "errors"
    noted.mkdir()
    raising = "from slimefsdp.errors import BatchError; BatchError('wrong', field='tokens[31]')"
    surroundings = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "RECORD_ERRORS": str(noted)}
    subprocess.run([sys.executable, "-c", raising], env=surroundings, check=True)
    (file,) = noted.iterdir()
    assert [plain_pair(line) for line in file.read_text().splitlines()] == ["BatchError tokens[N]"]
