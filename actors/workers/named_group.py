"""The handle on a group that lives in a process of its own, whichever programs come and go.

That process (actors/fault_tolerance/group_host.py) is a detached Ray actor under the group's name. Programs attach to
it: one at a time may make calls that change the group, all others read. A program says every few seconds that it is
there; once it has been silent for `LEASE_S`, its place as the writer is free for another.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.cluster.connect import join
from actors.cluster.ray_errors import cluster_is_gone, require_cluster
from actors.workers.futures import Awaitable
from actors.workers.group_calls import JobGroup, RankRequest
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, StateError, WorkerDied
from slimefsdp.results import Health
from slimefsdp.rpc import Role, require_name

NAMESPACE = "slimefsdp"
"""Of Ray, in which all named groups of a cluster are."""
LEASE_S = 20.0
"""A program that has said nothing for so long may be gone: another may write in its place."""
_RENEW_S = 3.0
_SLICE_S = 0.25  # of a wait, in between which signals are handled
_ANSWER_S = 30.0  # of the process behind a name, for what needs no rank


@dataclass(frozen=True, slots=True)
class Client:
    """A program that is attached to a group."""

    id: str
    program: str  # host:pid
    writes: bool

    @classmethod
    def here(cls, writes: bool) -> Client:
        """Returns a new client of this process."""
        return cls(uuid.uuid4().hex, f"{socket.gethostname()}:{os.getpid()}", writes)


@dataclass(frozen=True)
class GroupStatus:
    """Describes a named group, as `slimefsdp groups list` shows it."""

    name: str
    state: str  # launching, ready, ending, or `ended by` an error
    model: str
    ranks: int
    launched: float  # seconds since the epoch
    run_dir: str | None
    updates: int | None = None  # that rank 0 of the policy has taken; None: it does not answer
    saved_step: int | None = None  # of the last checkpoint since the launch
    recoveries: int = 0
    calls: tuple[str, ...] = ()  # that have not ended, the oldest first
    writer: str | None = None  # host:pid
    readers: tuple[str, ...] = ()


class HostCall(Awaitable):
    """The future of a call that the group's process has taken."""

    def __init__(self, group: str, call: str, reference: Any) -> None:
        self._group, self._call, self._reference = group, call, reference

    def __repr__(self) -> str:
        return f"HostCall({self._call} of {self._group})"

    def result(self) -> Any:
        """Waits for the call, and returns its result.

        Raises:
            WorkerDied: the group's process has ended. SlimeError: what the call raised.
        """
        return _answer_of(self._reference, self._group, self._call)


class NamedGroup(JobGroup):
    """A handle on a group that lives on when this program ends.

    Had from `actors.launch_named` and `WorkerGroup.attach`. As a context it is left at the end of the block.
    """

    _job: Membership

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        write: bool = False,
        wait_s: float = 0.0,
        address: str = "auto",
        allow_without_token: bool = False,
    ) -> NamedGroup:
        """Returns a handle on a group that `actors.launch_named` launched, in this program or another.

        Args:
            write: makes calls that change the group possible, which one program at a time may.
            wait_s: how long to wait for another writer to leave. One that ended without a word makes room after 20 s.
            address: of the Ray cluster, where this process is not connected to one; as cluster.address.
            allow_without_token: as cluster.allow_without_token.

        Raises:
            StateError: there is no such group, it is being launched or ended, or another program writes.
            ResourceError: no cluster can be reached. ConfigError: nothing can have such a name.
        """
        require_name(name, "a group")
        join(address, allow_without_token=allow_without_token)
        host = host_of(name)
        client = Client.here(write)
        until = time.monotonic() + wait_s
        while True:
            try:
                config, roles = ask(host, name, "attach", client)
                return cls(Membership(name, host, client, config, roles), "actor")
            except StateError as error:
                if error.field != "write" or time.monotonic() >= until:
                    raise
            time.sleep(min(_RENEW_S, max(0.0, until - time.monotonic())))

    @property
    def name(self) -> str:
        """The name by which other programs attach."""
        return self._job.name

    def status(self) -> GroupStatus:
        """Returns what `slimefsdp groups list` shows of the group."""
        found: GroupStatus = self._job.ask("status")
        return found

    def detach(self) -> None:
        """Leaves the group as it is, with its critic and reference; idempotent. Calls that were made are finished."""
        self._job.leave()

    def shutdown(self) -> None:
        """Ends the group for everybody, after saves in the background; idempotent.

        Raises:
            StateError: this program is not its writer.
        """
        if self.role == "actor" and not self._job.has_left:
            end_host(self._job.host, self.name, self._job.client.id)
            self._job.forget()

    def __exit__(self, *_: object) -> None:
        self.detach()


class Membership:
    """The `Job` of a named group; this program is attached to it until it leaves, ends, or drops this object."""

    def __init__(self, name: str, host: Any, client: Client, config: RunConfig, roles: tuple[Role, ...]) -> None:
        self.name, self.host, self.client, self.config, self.roles = name, host, client, config, roles
        self._over = threading.Event()
        threading.Thread(target=_renew, args=(host, client, self._over), name="slimefsdp-lease", daemon=True).start()
        self._finalizer = weakref.finalize(self, _leave, host, client, self._over)

    @property
    def has_left(self) -> bool:
        return self._over.is_set()

    def config_of(self, role: Role) -> RunConfig:
        return self.config

    def submit(self, role: Role, request: RankRequest) -> HostCall:
        if request.name in ("export_hf", "export_adapter"):  # in this program's folder, which ranks do not share
            request = request.having(path=Path(request.arguments["path"]).absolute())
        ticket = self.ask("begin", self.client.id, role, request, within_s=None)
        return HostCall(self.name, request.name, self.host.result.remote(ticket))

    def receivers(self, role: Role) -> list[Any]:
        found: list[Any] = self.ask("receivers", role)
        return found

    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]:
        found: list[Health | SlimeError] = self.ask("health", role, timeout_s, within_s=None)
        return found

    def ask(self, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
        """Asks the group's process, as the function `ask`; raises StateError after `leave`."""
        if self.has_left:
            raise StateError(f"the group {self.name} after detach()", field="name", hint="attach to it again")
        return ask(self.host, self.name, method, *args, within_s=within_s)

    def leave(self) -> None:
        """Detaches this program; idempotent."""
        self._finalizer()

    def forget(self) -> None:
        """Stops renewing the lease of a group that has ended."""
        self._over.set()
        self._finalizer.detach()


def _renew(host: Any, client: Client, over: threading.Event) -> None:
    while not over.wait(_RENEW_S) and not cluster_is_gone():
        try:
            host.renew.remote(client)
        except Exception:  # who makes the next call is told why
            return


def _leave(host: Any, client: Client, over: threading.Event) -> None:
    over.set()
    try:
        if not cluster_is_gone():
            ray.get(host.detach.remote(client.id), timeout=_ANSWER_S)
    except (RayError, OSError) as error:  # it has ended, or finds out by itself
        print(f"left a group that did not answer: {str(error).partition(chr(10))[0]}", file=sys.stderr)


def host_of(name: str) -> Any:
    """Returns the Ray actor of a named group.

    Raises:
        StateError: there is no group of this name.
    """
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        there = ", ".join(named_groups()) or "none"
        problem = f"there is no group {name!r} in this cluster; groups that are there: {there}"
        raise StateError(problem, field="name", hint="name one of those, or launch it") from None


def named_groups() -> list[str]:
    """Returns the names of all groups of the cluster, sorted."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return sorted(one["name"] for one in found if one["namespace"] == NAMESPACE)


def ask(host: Any, name: str, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
    """Calls a method of a group's process and returns its answer.

    Args:
        within_s: None: it answers when ranks have.

    Raises:
        WorkerDied: it has ended. StateError: it does not answer, or cannot be reached. SlimeError: what it raised.
    """
    require_cluster()
    return _answer_of(getattr(host, method).remote(*args), name, method, within_s)


def end_host(host: Any, name: str, client: str | None) -> None:
    """Ends a group and its process, after saves in the background.

    Args:
        client: who asks, which must be the writer where there is one; None: whoever may.

    Raises:
        StateError: another program writes.
    """
    try:
        ask(host, name, "stop", client, within_s=None)
    except WorkerDied:
        return
    ray.kill(host)


def _answer_of(reference: Any, group: str, call: str, within_s: float | None = None) -> Any:
    until = None if within_s is None else time.monotonic() + within_s
    while not ray.wait([reference], timeout=_SLICE_S)[0]:
        require_cluster()
        if until is not None and time.monotonic() > until:
            raise StateError(
                f"the process of the group {group} has not answered {call} for {within_s:g} s",
                field="name",
                hint=f"`slimefsdp groups stop {group} --force` ends it where it does not come back",
            )
    try:
        return ray.get(reference, timeout=_ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, SlimeError):
            raise error.cause from None
        raise
    except ActorUnavailableError as error:  # by a connection that broke; Ray says so of a process that may be there
        raise StateError(
            f"the process of the group {group} cannot be reached, and whether it did {call} is not known: {error}",
            field="name",
            hint="look at the network; `slimefsdp groups list` says how far the group is",
        ) from None
    except RayActorError as error:
        said = next(iter(str(error).splitlines()), "")
        raise WorkerDied(
            f"the process of the group {group} has ended: {said}",
            hint="launch the group again, and load its last checkpoint",
            call=call,
        ) from None
