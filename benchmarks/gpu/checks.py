"""Checks that end in PASS, FAIL or SKIP: how the scripts of this folder run, report and record them.

A check that raises has failed, with its exception in one line, and the next one runs. What needs a GPU is skipped
without one, never passed. At the time limit the process ends with exit status 1, whatever hangs.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import write_record

Finding = tuple[bool, dict[str, Any]]  # whether a check holds, and the figures that say so


@dataclass(frozen=True)
class Check:
    """Something that is right or wrong on a device."""

    name: str
    function: Callable[[], Finding]
    needs_cuda: bool = False


def main(
    description: str, checks_of: Callable[[torch.device], Sequence[Check]], arguments: Sequence[str] | None = None
) -> int:
    """Runs a script's checks as its command line says; returns the exit status: 0, or 1 if any check failed.

    Args:
        description: of the script; its first line is the `what` of the record.
        checks_of: a device's checks, in order.
        arguments: None: those of the process.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="checks whose name matches, e.g. 'attention/*'")
    options = parser.parse_args(arguments)
    device = device_of(options.device)
    checks = [
        check
        for check in checks_of(device)
        if options.only is None or any(fnmatch.fnmatch(check.name, pattern) for pattern in options.only)
    ]
    if not checks:
        parser.error(f"--only {' '.join(options.only)}: no check has such a name")
    print(" ".join(f"{name}={value}" for name, value in hardware(device).items()), flush=True)
    return run_checks(checks, device, description.splitlines()[0], options.time_limit_s, options.json)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Device, time limit and record: what every script here can be told."""
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit-s", type=float, default=600.0, help="then the process ends, whatever it is doing")
    parser.add_argument("--json", type=Path, help="write the record here, anew after every result")


def device_of(name: str) -> torch.device:
    """The first GPU, which becomes the current one, or the CPU."""
    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def hardware(device: torch.device) -> dict[str, Any]:
    """What a record says of the device beside what `record.environment` does."""
    if device.type == "cpu":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def run_checks(
    checks: Sequence[Check], device: torch.device, what: str, time_limit_s: float, record: Path | None
) -> int:
    """Runs them in order, with a line and a new record after each; returns the exit status."""
    rows: list[dict[str, Any]] = [{"name": check.name, "verdict": "FAIL", "reason": "not run"} for check in checks]
    done = 0
    results = {**hardware(device), "checks": rows}

    def write() -> None:
        write_record(record, what, torch.get_num_threads(), results)

    def give_up() -> None:
        for row in rows[done:]:
            print(line_of(row))
        write()

    with time_limit(time_limit_s, give_up) as reporting:
        for check in checks:
            rows[done]["reason"] = f"still running at the time limit of {time_limit_s:g} s"
            row = verdict_of(check, device)
            with reporting:
                rows[done] = row
                done += 1
                print(line_of(row), flush=True)
                write()
    return int(any(row["verdict"] == "FAIL" for row in rows))


def verdict_of(check: Check, device: torch.device) -> dict[str, Any]:
    """A check's row of the record."""
    if check.needs_cuda and device.type != "cuda":
        return {"name": check.name, "verdict": "SKIP", "reason": "needs CUDA"}
    began = time.perf_counter()
    row: dict[str, Any] = {"name": check.name}
    try:
        is_right, figures = check.function()
        row |= {"verdict": "PASS" if is_right else "FAIL", "figures": figures}
    except Exception as error:  # whatever it is: it is this check's result, and the others have theirs
        row |= {"verdict": "FAIL", "reason": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    # only now are the exception and the frames gone that held the check's tensors
    gc.collect()
    if device.type == "cuda":
        with suppress(RuntimeError):  # after an illegal access every call raises; the next checks say so
            torch.cuda.empty_cache()
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def line_of(row: dict[str, Any]) -> str:
    """What is printed of a check."""
    if row["verdict"] == "SKIP":
        return f"SKIP {row['name']} ({row['reason']})"
    figures = [f"{name}={_short(value)}" for name, value in row.get("figures", {}).items()]
    return " ".join([row["verdict"], row["name"], *([row["reason"]] if "reason" in row else figures)])


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


@contextmanager
def time_limit(seconds: float, give_up: Callable[[], None]) -> Iterator[threading.Lock]:
    """After so many seconds inside, the process ends with exit status 1, also when a kernel or a peer hangs.

    Args:
        give_up: reports what there is before the process ends; called by another thread.

    Yields:
        The lock to report under: what is reported under it is reported whole, and not twice.
    """
    reporting = threading.Lock()

    def end() -> None:
        reporting.acquire()  # for good: nothing is reported after this
        try:
            give_up()
            sys.stdout.flush()
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield reporting
    finally:
        timer.cancel()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of what is expected; infinite where anything found is not finite.

    A gradient that should be almost zero is measured against a tenth of a standard normal tensor instead.
    """
    found, expected = found.detach().double(), expected.detach().double()
    if not torch.isfinite(found).all():
        return math.inf
    floor = 0.1 * math.sqrt(expected.numel())
    return float((found - expected).norm() / expected.norm().clamp_min(floor))
