"""`slimefsdp bench`: the train step beside its peers, on the batches of benchmarks/step; needs a checkout.

Torch is imported by the processes that are measured, not here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from slimefsdp.config import load_config
from slimefsdp.errors import ConfigError
from slimefsdp.io.user_files import can_keep_files, path_argument

CHECKOUT = Path(__file__).resolve().parents[2]
PEERS = "~/.cache/slimefsdp/peers"


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "--systems", help="names with commas between them; default: slimefsdp and all peers, without adapters"
    )
    parser.add_argument("--workloads", help="names with commas between them; default: all but smoke")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each system, in turns (default 5)")
    parser.add_argument(
        "--peers", type=path_argument, default=PEERS, metavar="DIR",
        help=f"where benchmarks/peers/setup.sh made the peers' environments (default {PEERS})",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of tokens, lengths, rewards and weights (default 0)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SETTING",
        help="one of slimefsdp's settings instead of that in benchmarks/step/slimefsdp.yaml, e.g. model.compile=true",
    )  # fmt: skip
    parser.add_argument("--out", type=path_argument, metavar="FILE", help="write the record here, as JSON")


def bench_command(options: argparse.Namespace) -> int:
    """Measures, and prints a table.

    Raises:
        ConfigError: there is no checkout, or a name or number is wrong.
    """
    if not (CHECKOUT / "benchmarks/step/harness.py").is_file():
        raise ConfigError(
            f"{CHECKOUT} has no benchmarks",
            field="bench",
            hint="run it from a checkout, installed with pip install -e",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))  # an editable install knows the two packages alone
    from benchmarks.record import environment
    from benchmarks.step import harness
    from benchmarks.step.workloads import DEFAULT_WORKLOADS

    out = options.out
    if out is not None:
        is_plain = can_keep_files(out) and (out.is_file() or not out.exists())
        if not is_plain or not out.absolute().parent.is_dir():
            raise ConfigError(f"--out={out} is no plain file in a folder", field="--out", hint="name a file")
    if not 0 <= options.seed < 2**31:
        raise ConfigError(f"--seed={options.seed} is no seed", field="--seed", hint="give a number from 0 to 2^31 - 1")
    try:
        # as benchmarks/step/own.py does in the processes that are measured, which give these three
        given = ["model.path=model", "mesh.device=cpu", "batch.max_tokens_per_rank=2048"]
        load_config(CHECKOUT / "benchmarks/step/slimefsdp.yaml", [*given, *options.set])
    except ConfigError as error:
        error.field = "--set"
        raise
    provenance = {"what": harness.WHAT, **environment(options.threads), **harness.provenance()}

    def save(record: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(provenance | record, indent=1) + "\n")

    found = harness.run(
        _names(options.systems) or harness.DEFAULT_SYSTEMS,
        _names(options.workloads) or DEFAULT_WORKLOADS,
        rounds=options.rounds,
        peers=options.peers,
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


def _names(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(name.strip() for name in text.split(","))
