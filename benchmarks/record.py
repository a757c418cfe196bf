"""What a recorded result says about where it comes from; shared by the benchmarks."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment(threads: int) -> dict[str, Any]:
    """Date, command, hardware and versions of this run."""
    cpu_lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "cpu": cpu_lines[0].split(":", 1)[1].strip() if cpu_lines else platform.machine(),
        "cores": os.cpu_count(),
        "threads_per_rank": threads,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def write_record(path: Path | None, what: str, threads: int, results: Any) -> None:
    """Writes results with `what` was measured and where; nothing without a path."""
    if path is not None:
        record = {"what": what, **environment(threads), "results": results}
        path.write_text(json.dumps(record, indent=2) + "\n")
