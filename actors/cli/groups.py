"""`slimefsdp status` and `slimefsdp stop`: the named groups of a Ray cluster."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from actors.cluster.connect import disconnect, join
from slimefsdp.errors import SlimeError
from slimefsdp.rpc import require_name

if TYPE_CHECKING:
    from actors.workers.named_group import GroupStatus


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `status`."""
    parser.add_argument("name", nargs="?", help="of one group; without it, all of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_address(parser)


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `stop`."""
    parser.add_argument("name", help="of the group")
    parser.add_argument(
        "--force",
        action="store_true",
        help="also while a program writes to it, at once; a save in the background is lost",
    )
    _add_address(parser)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--address", default="auto", help="of the Ray cluster, as cluster.address (default: auto)")
    parser.add_argument("--allow-without-token", action="store_true", help="as cluster.allow_without_token")


def status_command(options: argparse.Namespace) -> int:
    """What named groups there are, how far they are, and who is attached."""
    if options.name is not None:
        require_name(options.name, "a group")
    join(options.address, allow_without_token=options.allow_without_token)
    try:
        from actors.workers.named_group import ask, host_of, named_groups

        found: list[GroupStatus | SlimeError] = []
        names = named_groups() if options.name is None else [options.name]
        for name in names:
            try:
                found.append(ask(host_of(name), name, "status"))
            except SlimeError as error:
                if options.name is not None:
                    raise
                found.append(error)  # the others can be shown
    finally:
        disconnect()
    if options.json:
        shown = {}
        for name, one in zip(names, found, strict=True):
            shown[name] = {"error": one.message} if isinstance(one, SlimeError) else asdict(one)
        print(json.dumps(shown, indent=2))
        return 0
    for name, one in zip(names, found, strict=True):
        print("\n".join([f"{name}: {one.message}"] if isinstance(one, SlimeError) else _lines(one)))
    if not names:
        print("no named groups in this cluster")
    return 0


def _lines(status: GroupStatus) -> Iterator[str]:
    minutes = (time.time() - status.launched) / 60
    yield f"{status.name}: {status.state}, {status.ranks} ranks for {minutes:.0f} min, {status.recoveries} recoveries"
    yield f"  model    {status.model}"
    updates = "no answer of rank 0" if status.updates is None else status.updates
    saved = "none since the launch" if status.saved_step is None else f"step {status.saved_step}"
    yield f"  updates  {updates}; last checkpoint: {saved}"
    yield f"  run.dir  {status.run_dir or 'none'}"
    yield f"  calls    {', '.join(status.calls) or 'none'}"
    yield f"  writer   {status.writer or 'none'}"
    yield f"  readers  {', '.join(status.readers) or 'none'}"


def stop_command(options: argparse.Namespace) -> int:
    """Ends a named group and its processes."""
    require_name(options.name, "a group")
    join(options.address, allow_without_token=options.allow_without_token)
    try:
        import ray

        from actors.workers.named_group import end_host, host_of

        host = host_of(options.name)
        if options.force:
            ray.kill(host)  # its ranks end with it
        else:
            end_host(host, options.name, None)
    finally:
        disconnect()
    print(f"{options.name} has ended")
    return 0
