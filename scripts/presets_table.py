"""Compares or writes the figures of the GPU presets in configs/README.md, as `slimefsdp plan` computes them.

python scripts/presets_table.py           # exit status 1 if a figure in the page is wrong
python scripts/presets_table.py --write   # writes the figures
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from pathlib import Path

from actors.cli.main import main as slimefsdp

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
PAGE = CONFIGS / "README.md"
# | [name](name) | what it is | memory | time | run on |
_ROW = re.compile(r"^(\| \[([\w.]+)\]\(\2\) \| [^|\n]+ \|) [^|\n]+ \| [^|\n]+ (\| [^|\n]+ \|)$", re.MULTILINE)


def figures(preset: Path) -> tuple[str, str]:
    """Returns two texts: the estimated memory of a GPU, and the estimated time of one step's updates.

    Raises:
        SystemExit: `plan` refuses the preset, or the estimate exceeds the GPU.
    """
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = slimefsdp(["plan", str(preset), "--json"])
    if status:
        raise SystemExit(f"plan refuses {preset}")
    record = json.loads(printed.getvalue())
    chosen = record["estimate"]["chosen"]
    if not chosen["fits"]:
        raise SystemExit(f"{preset} does not fit")
    seconds = len(record["updates"]) * chosen["seconds"]["total"]
    return f"{chosen['memory']['total'] / 1e9:.0f} GB", f"{seconds:.0f} s"


def current(text: str) -> str:
    def row(match: re.Match[str]) -> str:
        memory, time = figures(CONFIGS / match[2])
        return f"{match[1]} {memory} | {time} {match[3]}"

    return _ROW.sub(row, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write configs/README.md instead of comparing")
    is_written = parser.parse_args().write
    text = PAGE.read_text(encoding="utf-8")
    new = current(text)
    if is_written:
        PAGE.write_text(new, encoding="utf-8")
        print(f"wrote {PAGE}")
    elif new != text:
        print(f"{PAGE} is stale: run `python scripts/presets_table.py --write`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
