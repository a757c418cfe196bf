"""Runs `slimefsdp report`: writes the page of runs, once or while they go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from actors.report.data import read_report
from actors.report.page import write_page
from slimefsdp.errors import ConfigError

PAGE = "report.html"


def report_command(runs: Sequence[Path], output: Path | None, watch_s: float | None) -> int:
    """Writes the page; with `watch_s`, again after so many seconds, until no run goes on. Returns the exit status.

    Raises:
        ConfigError: a run cannot be read, or several runs were given without `output`.
        CheckpointError: a file of a run is damaged, or the page cannot be written.
    """
    if output is None and len(runs) > 1:
        raise ConfigError(
            "--output is missing", field="--output", hint="name the page of these runs: --output FILE.html"
        )
    if len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("a run is given twice", field="RUN", hint="give each run once")
    target = runs[0] / PAGE if output is None else output
    while True:
        report = read_report(runs, watch_s)
        write_page(report, target)
        found = sum(len(run.findings) for run in report.runs)
        steps = ", ".join(f"{run.name} to step {run.step} ({run.state})" for run in report.runs)
        print(f"{target}: {steps}; {found} finding{'s' * (found != 1)}", flush=True)
        if report.refresh_s is None:
            return 0
        time.sleep(report.refresh_s)
