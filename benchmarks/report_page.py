"""Measures how long `slimefsdp report` takes, how large its page is, and how soon headless Chromium shows it.

    python benchmarks/report_page.py [--json FILE]

One run, and two, are made up: 1,000 steps, and five evaluations of 250 held-out prompts x 4 responses. Needs Chromium.
A page is loaded from the disk with an empty cache, and is shown when its script has built all parts. On a busy machine
the CPU-seconds of the page's thread say more than the time.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import write_record
from tests.support.browser import Browser
from tests.support.report_runs import write_run

LOADS = 7
TEXT = "To sort these digits, compare each with its neighbours and exchange them: {answer}. " * 6


def measure(folder: Path, runs: list[Path]) -> dict[str, Any]:
    """Writes the report of these runs with the command, and loads it several times."""
    page = folder / f"{len(runs)}.html"
    command = [sys.executable, "-m", "actors.cli", "report", *map(str, runs), "--output", str(page)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    command_s = time.perf_counter() - began
    shown, loaded, busy = [], [], []
    for number in range(LOADS):
        with Browser(folder / f"profile{len(runs)}{number}") as browser:
            browser.resize(1280, 900)
            browser.call("Performance.enable", timeDomain="threadTicks")
            began = time.perf_counter()
            browser.open(page)
            loaded.append(time.perf_counter() - began)
            shown.append(float(browser.run("document.body.dataset.ready")) / 1000)
            metrics = {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}
            busy.append(metrics["TaskDuration"])
            charts = browser.run("document.querySelectorAll('.chart canvas').length")
            assert browser.said == [] and len(browser.requests) == 1
    return {
        "runs": len(runs), "page_bytes": page.stat().st_size, "charts": charts, "command_s": round(command_s, 2),
        "shown_s": {"median": round(statistics.median(shown), 3), "max": round(max(shown), 3)},
        "cpu_s_of_the_page": {"median": round(statistics.median(busy), 3), "max": round(max(busy), 3)},
        "loaded_s": {"median": round(statistics.median(loaded), 3), "max": round(max(loaded), 3)},
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"steps": 1000, "prompts": 250, "samples": 4, "evaluations": 5, "text": TEXT}
        runs = [write_run(folder / "first", **sizes), write_run(folder / "second", **sizes, hack=True)]
        results = [measure(folder, runs[:count]) for count in (1, 2)]
    for result in results:
        print(result)
    what = "seconds until the page of slimefsdp report is shown: 1,000 steps, 5,000 responses a run"
    write_record(options.json, what, 1, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
