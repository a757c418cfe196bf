"""The table of a record of benchmarks/train_step.py, written between the markers of a Markdown file.

python benchmarks/render_table.py benchmarks/results/train_step.json README.md
python benchmarks/render_table.py benchmarks/results/train_step.json README.md --check
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step.harness import OURS, SYSTEMS

BEGIN, END = "<!-- train_step -->", "<!-- end of train_step -->"


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


def replaced(text: str, table: str) -> str:
    """The text with the table between its markers.

    Raises:
        SystemExit: the markers are not there, once each and in order.
    """
    found = re.fullmatch(f"(.*{re.escape(BEGIN)}\n).*(\n{re.escape(END)}.*)", text, flags=re.DOTALL)
    if found is None or text.count(BEGIN) != 1 or text.count(END) != 1:
        raise SystemExit(f"the file needs the lines {BEGIN} and {END}, once each")
    return f"{found[1]}{table}{found[2]}"


def main() -> int:
    """Writes, or with --check compares; then the status is 1 where the file says something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("document", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 where the table is another")
    options = parser.parse_args()
    text = options.document.read_text()
    new = replaced(text, markdown(json.loads(options.record.read_text())))
    if options.check:
        return int(new != text)
    options.document.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
