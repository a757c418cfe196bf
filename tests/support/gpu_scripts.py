"""The scripts of benchmarks/gpu in a process of their own, as if a machine lacked what they must do without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# the first argument names the packages that are not installed, the others are the command
WITHOUT = """
import functools, runpy, sys
import torch

torch.compile = functools.partial(torch.compile, backend="eager")  # traced, not compiled: inductor takes half a minute
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class ScriptRun(NamedTuple):
    status: int
    printed: str
    errors: str
    record: dict[str, Any]


def run_gpu_script(name: str, folder: Path, *arguments: str, without: tuple[str, ...]) -> ScriptRun:
    """Runs benchmarks/gpu/NAME on a CPU without these packages; its record is written into the folder."""
    file = folder / "record.json"
    script = [str(ROOT / "benchmarks/gpu" / name), "--device", "cpu", "--time-limit-s", "1400", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, ",".join(without), *script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert file.exists(), done.stdout + done.stderr
    record = json.loads(file.read_text())
    assert record["command"].startswith(f"python benchmarks/gpu/{name} --device cpu")
    return ScriptRun(done.returncode, done.stdout, done.stderr, record)
