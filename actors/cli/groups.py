"""`slimefsdp groups list` and `slimefsdp groups stop` show and end the named groups of a Ray cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.arguments import Address, AllowWithoutToken, AsJson, examples
from slimefsdp.errors import SlimeError
from slimefsdp.rpc import require_name

if TYPE_CHECKING:  # without importing ray, help and shell completion are quick
    from actors.workers.named_group import GroupStatus

commands = typer.Typer(help="List or stop the named groups of a Ray cluster.")


@commands.command(name="list", epilog=examples("slimefsdp groups list --address 10.0.0.1:6379"))
def list_groups(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Name of one group. Default: all groups.")] = None,
    as_json: AsJson = False,
    address: Address = "auto",
    allow_without_token: AllowWithoutToken = False,
) -> int:
    """Say what named groups there are, how far they are, and who is attached."""
    from actors.cluster.connect import disconnect, join

    if name is not None:
        require_name(name, "a group")
    join(address, allow_without_token=allow_without_token)
    try:
        from actors.workers.named_group import ask, host_of, named_groups

        statuses: dict[str, GroupStatus | SlimeError] = {}
        for group in named_groups() if name is None else [name]:
            try:
                statuses[group] = ask(host_of(group), group, "status")
            except SlimeError as error:
                if name is not None:
                    raise
                statuses[group] = error  # the other groups can still be shown
    finally:
        disconnect()
    if as_json:
        record = {
            group: {"error": status.message} if isinstance(status, SlimeError) else asdict(status)
            for group, status in statuses.items()
        }
        print(json.dumps(record, indent=2))
        return 0
    for group, status in statuses.items():
        print("\n".join([f"{group}: {status.message}"] if isinstance(status, SlimeError) else _lines(status)))
    if not statuses:
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


@commands.command(name="stop", epilog=examples("slimefsdp groups stop policy --address 10.0.0.1:6379"))
def stop_group(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the group.")],
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="End the group at once, even if a program writes to it; a save in the background is lost."
        ),
    ] = False,
    address: Address = "auto",
    allow_without_token: AllowWithoutToken = False,
) -> int:
    """End a named group and its processes."""
    from actors.cluster.connect import disconnect, join

    require_name(name, "a group")
    join(address, allow_without_token=allow_without_token)
    try:
        import ray

        from actors.workers.named_group import end_host, host_of

        host = host_of(name)
        if force:
            ray.kill(host)  # the ranks end with their host
        else:
            end_host(host, name, None)
    finally:
        disconnect()
    print(f"{name} has ended")
    return 0
