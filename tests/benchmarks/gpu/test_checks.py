"""A check ends in PASS, FAIL or SKIP, whatever it does, and so does each one after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import checks
from benchmarks.gpu.checks import Check, Finding

ROOT = Path(__file__).resolve().parents[3]
HANGS = """
import sys, time
from pathlib import Path
import torch
from benchmarks.gpu.checks import Check, run_checks

right = lambda: (True, {})
named = [Check("before", right), Check("hangs", lambda: time.sleep(3600)), Check("after", right)]
run_checks(named, torch.device("cpu"), "a hang", 2.0, Path(sys.argv[1]))
"""


def right() -> Finding:
    return True, {"error": 1.25e-7, "equal": True}


def wrong() -> Finding:
    return False, {"error": 0.5}


def broken() -> Finding:
    raise RuntimeError("the first line\n  and the second")


def outcome(tmp_path: Path, *arguments: str, names: dict[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit status, and the rows of the record by name."""
    record = tmp_path / "record.json"

    def checks_of(device: torch.device) -> list[Check]:
        return [Check(name, function, needs_cuda="cuda" in name) for name, function in names.items()]

    status = checks.main("what\nmore", checks_of, ["--device", "cpu", "--json", str(record), *arguments])
    return status, {row["name"]: row for row in json.loads(record.read_text())["results"]["checks"]}


def test_a_check_that_raises_fails_in_a_line_and_the_next_ones_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = outcome(tmp_path, names={"broken": broken, "wrong": wrong, "right": right})
    assert status == 1 and [row["verdict"] for row in rows.values()] == ["FAIL", "FAIL", "PASS"]
    assert capsys.readouterr().out.splitlines()[1:] == [
        "FAIL broken RuntimeError: the first line and the second",
        "FAIL wrong error=0.5",
        "PASS right error=1.25e-07 equal=True",
    ]
    assert rows["right"]["figures"] == {"error": 1.25e-7, "equal": True}


def test_what_needs_a_gpu_is_skipped_without_one_and_not_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, rows = outcome(tmp_path, names={"cuda": broken, "right": right})
    assert status == 0 and [row["verdict"] for row in rows.values()] == ["SKIP", "PASS"]
    assert "SKIP cuda (needs CUDA)\n" in capsys.readouterr().out


def test_a_pattern_chooses_checks_and_one_that_fits_none_is_refused(tmp_path: Path) -> None:
    names = {"one/a": right, "one/b": right, "two": wrong}
    assert outcome(tmp_path, "--only", "one/*", names=names)[1].keys() == {"one/a", "one/b"}
    with pytest.raises(SystemExit) as ended:
        outcome(tmp_path, "--only", "three", names=names)
    assert ended.value.code == 2


def test_a_record_says_with_what_and_by_which_command_it_was_made(tmp_path: Path) -> None:
    outcome(tmp_path, names={"right": right})
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["what"] == "what" and record["results"]["device"] == "cpu"
    assert record.keys() >= {"date", "command", "commit", "cpu", "cores", "python", "torch", "transformers"}


def test_a_check_that_hangs_ends_at_the_time_limit_and_the_rest_is_not_run(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", HANGS, str(record)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "PASS before",
        "FAIL hangs still running at the time limit of 2 s",
        "FAIL after not run",
    ]
    rows = json.loads(record.read_text())["results"]["checks"]
    assert [row["verdict"] for row in rows] == ["PASS", "FAIL", "FAIL"]
