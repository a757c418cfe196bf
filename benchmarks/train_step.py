"""Times the train step next to other trainers', on the batches of benchmarks/step; prints a table.

python benchmarks/train_step.py --workloads smoke --rounds 1     # a minute, to try an installation
python benchmarks/train_step.py --out train_step.json            # the table of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import environment
from benchmarks.step import harness
from benchmarks.step.workloads import DEFAULT_WORKLOADS
from slimefsdp.config import load_config

PEERS = "~/.cache/slimefsdp/peers"


def main() -> int:
    """Measures and prints; returns 1 where one of our own systems failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--systems", help="names with commas; default: slimefsdp and all peers, without adapters")
    parser.add_argument("--workloads", help="names with commas; default: all but smoke")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each system, in turns")
    parser.add_argument("--peers", type=Path, default=PEERS, help="where benchmarks/peers/setup.sh made environments")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--seed", type=int, default=0, help="of tokens, lengths, rewards and weights")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING", help="such as model.compile=true")
    parser.add_argument("--out", type=Path, help="write the record here, as JSON")
    options = parser.parse_args()
    # as benchmarks/step/own.py does in the processes that are measured: a wrong setting is refused before they start
    given = ["model.path=model", "mesh.device=cpu", "batch.max_tokens_per_rank=2048"]
    load_config(Path(__file__).parent / "step/slimefsdp.yaml", [*given, *options.set])
    provenance = {"what": harness.WHAT, **environment(options.threads), **harness.provenance()}

    def save(record: dict[str, Any]) -> None:
        if options.out is not None:
            options.out.write_text(json.dumps(provenance | record, indent=1) + "\n")

    found = harness.run(
        tuple(options.systems.split(",")) if options.systems else harness.DEFAULT_SYSTEMS,
        tuple(options.workloads.split(",")) if options.workloads else DEFAULT_WORKLOADS,
        rounds=options.rounds,
        peers=options.peers.expanduser(),
        device=options.device,
        threads=options.threads,
        seed=options.seed,
        settings=options.set,
        note=lambda line: print(line, file=sys.stderr, flush=True),
        save=save,
    )
    print(harness.table(found))
    own = [one["status"] for one in found["results"] if harness.SYSTEMS[one["system"]].script == harness.OWN]
    return 0 if all(status == "measured" for status in own) else 1


if __name__ == "__main__":
    sys.exit(main())
