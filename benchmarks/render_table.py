"""Prints the record of benchmarks/train_step.py as a Markdown table.

python benchmarks/render_table.py benchmarks/results/train_step.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step.harness import OURS, SYSTEMS


def markdown(record: Mapping[str, Any]) -> str:
    """A row for each workload, a column for each system; then what it was measured on."""
    cells = {(one["workload"], one["system"]): one for one in record["results"]}
    peers = [name for name in SYSTEMS if name != OURS and any(system == name for _, system in cells)]
    on_gpu = any(one.get("device_s") is not None for one in record["results"])
    clock = "second on the GPU" if on_gpu else "CPU-second"
    rows = [
        ["workload", f"slimefsdp, tokens a {clock} (peak)", *(f"as fast as {SYSTEMS[name].title}" for name in peers)],
        ["---"] * (len(peers) + 2),
    ]
    for name, workload in record["workloads"].items():
        title = f"`{name}`: {workload['title']}, {workload['tokens']:,} tokens"
        rows.append([title, _own(cells.get((name, OURS))), *(_peer(cells.get((name, peer))) for peer in peers)])
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", _caption(record)])


def _caption(record: Mapping[str, Any]) -> str:
    versions: dict[str, str] = {}
    for one in record["results"]:
        versions |= one.get("versions", {})
    installed = ", ".join(f"{name} {found}" for name, found in sorted(versions.items()))
    threads = f"{record['threads_per_rank']} thread{'s' * (record['threads_per_rank'] > 1)}"
    return f"({record['cpu']}, {threads}; {installed}; {record['date']}; medians of {record['rounds']} rounds.)"


def _own(one: Mapping[str, Any] | None) -> str:
    if one is None or one["status"] != "measured":
        return "not measured" if one is None else one["status"]
    return f"{one['tokens_per_second']:,.0f} ({one['peak_extra_mib']:,.0f} MiB)"


def _peer(one: Mapping[str, Any] | None) -> str:
    if one is None or one["status"] != "measured":
        return "not measured" if one is None else one["status"]
    ratio = one.get("slimefsdp_is_faster_by")
    return "computes something else" if ratio is None else f"{ratio:.2f}x ({one['peak_extra_mib']:,.0f} MiB)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    print(markdown(json.loads(parser.parse_args().record.read_text())))


if __name__ == "__main__":
    main()
