"""What a recorded result says about where it comes from; shared by the benchmarks."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(threads: int) -> dict[str, Any]:
    """Date, command, commit, hardware, load and versions of this run."""
    cpu_lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", script(), *sys.argv[1:]]),
        "commit": commit(),
        "cpu": cpu_lines[0].split(":", 1)[1].strip() if cpu_lines else platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],  # of the last 1, 5 and 15 minutes, this included
        "threads_per_rank": threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def script() -> str:
    """The program that runs, as it is called from the root of the checkout."""
    path = Path(sys.argv[0]).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@cache
def commit() -> str:
    """Of the checkout, marked where files differ from it; `unknown` where it is none."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:  # a machine without git
        return "unknown"


def write_record(path: Path | None, what: str, threads: int, results: Any) -> None:
    """Writes results with `what` was measured and where; nothing without a path."""
    if path is not None:
        record = {"what": what, **environment(threads), "results": results}
        path.write_text(json.dumps(record, indent=2) + "\n")
