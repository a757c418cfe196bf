"""`slimefsdp serve` under load, and what HTTP costs of a forward_backward.

    python benchmarks/service.py load --minutes 10 --json benchmarks/results/service_load.json
    python benchmarks/service.py http --json benchmarks/results/service_http.json

The first: four equal clients train while 200 of their samples are in flight; a fifth is killed, then a rank. Every
request is answered once, by the counts of both sides; memory of the server's processes, fairness and waits are
recorded. The second: the same batches through the unmodified client and directly through a group of the same settings,
by turns; the ratio is the median over rounds of that inside one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from actors.cluster.connect import disconnect  # noqa: E402
from benchmarks.record import write_record  # noqa: E402
from benchmarks.serving import http, load  # noqa: E402

WHAT = {
    "load": "slimefsdp serve with clients that train and sample, one of which is killed, and then a rank",
    "http": "forward_backward by a client of slimefsdp serve beside the same batch given to a group",
}


def main(argv: list[str] | None = None) -> int:
    """Prints what was found and writes the record; 1 where it is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("load", help="clients that train and sample, and two deaths")
    part.add_argument("--minutes", type=float, default=10.0)
    part.add_argument("--in-flight", type=int, default=200, help="samples, of the four clients together")
    part.add_argument("--json", type=Path, help="write the record here")
    part = parts.add_parser("http", help="forward_backward through HTTP and directly")
    part.add_argument("--shapes", nargs="+", choices=http.SHAPES, default=list(http.SHAPES))
    part.add_argument("--tokens", nargs="+", type=int, default=[512, 8192, 16384, 32768], help="of a batch")
    part.add_argument("--rounds", type=int, default=6, help="even, so that both are first equally often")
    part.add_argument("--json", type=Path, help="write the record here")
    args = parser.parse_args(argv)
    if args.part == "http" and (args.rounds < 2 or args.rounds % 2 or min(args.tokens) < http.LENGTH):
        parser.error(f"--rounds must be even, and --tokens at least {http.LENGTH}")
    if args.part == "load" and (args.in_flight < load.CLIENTS or args.minutes <= 0):
        parser.error(f"--in-flight must be at least {load.CLIENTS}, and --minutes above 0")
    found = under_load(args) if args.part == "load" else of_http(args)
    write_record(args.json, WHAT[args.part], 1, found)
    return 0 if found["passed"] else 1


def under_load(args: argparse.Namespace) -> dict[str, Any]:
    """The first part's record."""
    with tempfile.TemporaryDirectory() as folder:
        found = load.under_load(Path(folder), 60 * args.minutes, args.in_flight)
    for name, value in found.items():
        if name != "held":
            print(f"{name}: {value}")
    return found


def of_http(args: argparse.Namespace) -> dict[str, Any]:
    """The second part's record; of a tiny model, or a few tokens, it says what the way takes, and nothing is asked."""
    found: dict[str, Any] = {}
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found[shape] = http.through_http(Path(folder), shape, args.tokens, args.rounds)
    disconnect()
    passed = all(one["is_equal"] for of_shape in found.values() for one in of_shape.values())
    passed &= all(
        one["rate_of_http"] >= http.LEAST
        for shape in found
        for tokens, one in found[shape].items()
        if shape != "tiny" and int(tokens) >= http.ENOUGH
    )
    return {"passed": passed, "models": {shape: http.SHAPES[shape] for shape in args.shapes}, "tokens": found}


if __name__ == "__main__":
    sys.exit(main())
