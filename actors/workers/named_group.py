"""The handle on a named group. Such a group outlives the programs that use it.

A named group has a host process (actors/fault_tolerance/group_host.py), a detached Ray actor with the group's name.
Programs attach to the host. One program at a time is the writer, which may make calls that change the group; all other
programs only read. A program renews its lease every few seconds. If the writer's lease expires, another program may
become the writer.
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
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from actors.cluster.connect import join
from actors.cluster.ray_errors import cluster_is_gone, require_cluster
from actors.workers.futures import SLICE_S, Future
from actors.workers.group_calls import JobGroup, RankRequest
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, StateError, WorkerDied
from slimefsdp.results import Health
from slimefsdp.rpc import Role, require_name

NAMESPACE = "slimefsdp"
"""The Ray namespace of all named groups of a cluster."""
LEASE_S = 20.0
"""Seconds for which a program remains the writer after its last renewal."""
_RENEW_S = 3.0
_ANSWER_S = 30.0  # timeout of answers that the host gives without asking the ranks


@dataclass(frozen=True, slots=True)
class Client:
    """A program that is attached to a group."""

    id: str
    program: str  # host:pid
    writes: bool

    @classmethod
    def here(cls, writes: bool) -> Client:
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
    updates: int | None = None  # optimizer updates of rank 0 of the policy; None if the rank does not answer
    saved_step: int | None = None  # step of the newest checkpoint since the launch
    recoveries: int = 0
    calls: tuple[str, ...] = ()  # names of calls that have not ended, the oldest first
    writer: str | None = None  # host:pid
    readers: tuple[str, ...] = ()


class NamedGroup(JobGroup):
    """A handle on a named group; `actors.launch_named` and `WorkerGroup.attach` return it.

    The end of a `with` block detaches from the group, which continues to exist.
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
        """Returns a handle on a group that `actors.launch_named` has launched, in this or another program.

        Args:
            write: whether to become the writer, which may make calls that change the group.
            wait_s: limit on the wait for another writer to detach. A killed writer can be replaced after 20 s.
            address: the Ray cluster to connect to if this process is not connected; see cluster.address.
            allow_without_token: see cluster.allow_without_token.

        Raises:
            StateError: there is no such group, it is being launched or ended, or another program is the writer.
            ResourceError: no cluster can be reached. ConfigError: the name is invalid.
        """
        require_name(name, "a group")
        join(address, allow_without_token=allow_without_token)
        host = host_of(name)
        client = Client.here(write)
        deadline = time.monotonic() + wait_s
        while True:
            try:
                config, roles = ask(host, name, "attach", client)
                return cls(Membership(name, host, client, config, roles), "actor")
            except StateError as error:
                if error.field != "write" or time.monotonic() >= deadline:
                    raise
            time.sleep(min(_RENEW_S, max(0.0, deadline - time.monotonic())))

    @property
    def name(self) -> str:
        return self._job.name

    def status(self) -> GroupStatus:
        status: GroupStatus = self._job.ask("status")
        return status

    def detach(self) -> None:
        """Detaches this program; the group finishes this program's calls and continues to exist. Idempotent."""
        self._job.leave()

    def shutdown(self) -> None:
        """Ends the group for all programs, after saves in the background; idempotent.

        Raises:
            StateError: this program is not the writer.
        """
        if self.role == "actor" and not self._job.has_left:
            end_host(self._job.host, self.name, self._job.client.id)
            self._job.forget()

    def __exit__(self, *_: object) -> None:
        self.detach()


class Membership:
    """The `Job` of a named group. The program stays attached until it calls `leave`, drops this object, or ends."""

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

    def submit(self, role: Role, request: RankRequest) -> Future[Any]:
        if request.name in ("export_hf", "export_adapter"):  # a relative path is relative to this program's directory
            request = request.having(path=Path(request.arguments["path"]).absolute())
        ticket = self.ask("begin", self.client.id, role, request, within_s=None)
        return Future(partial(_answer_of, self.host.result.remote(ticket), self.name, request.name))

    def receivers(self, role: Role) -> list[Any]:
        receivers: list[Any] = self.ask("receivers", role)
        return receivers

    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]:
        answers: list[Health | SlimeError] = self.ask("health", role, timeout_s, within_s=None)
        return answers

    def ask(self, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
        """Calls a method of the group's host, as the function `ask` does; raises StateError after `leave`."""
        if self.has_left:
            raise StateError(f"the group {self.name} after detach()", field="name", hint="attach to it again")
        return ask(self.host, self.name, method, *args, within_s=within_s)

    def leave(self) -> None:
        self._finalizer()

    def forget(self) -> None:
        """Stops renewing the lease; called when the group has ended."""
        self._over.set()
        self._finalizer.detach()


def _renew(host: Any, client: Client, over: threading.Event) -> None:
    while not over.wait(_RENEW_S) and not cluster_is_gone():
        try:
            host.renew.remote(client)
        except Exception:  # the program's next call reports the cause
            return


def _leave(host: Any, client: Client, over: threading.Event) -> None:
    over.set()
    try:
        if not cluster_is_gone():
            ray.get(host.detach.remote(client.id), timeout=_ANSWER_S)
    except (RayError, OSError) as error:  # the host has ended, or will see the lease expire
        print(f"left a group that did not answer: {str(error).partition(chr(10))[0]}", file=sys.stderr)


def host_of(name: str) -> Any:
    """Returns the Ray actor of a named group, or raises StateError if there is none."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        names = ", ".join(named_groups()) or "none"
        problem = f"there is no group {name!r} in this cluster; its groups: {names}"
        raise StateError(problem, field="name", hint="name one of those, or launch it") from None


def named_groups() -> list[str]:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)


def ask(host: Any, name: str, method: str, *args: Any, within_s: float | None = _ANSWER_S) -> Any:
    """Calls a method of a group's host and returns the answer.

    Args:
        within_s: limit in seconds; None means no limit, for answers that need the ranks.

    Raises:
        WorkerDied: the host has ended. StateError: the host does not answer, or cannot be reached.
        SlimeError: any error that the method raises.
    """
    require_cluster()
    return _answer_of(getattr(host, method).remote(*args), name, method, within_s)


def end_host(host: Any, name: str, client: str | None) -> None:
    """Ends a group and its host, after saves in the background.

    Args:
        client: the id of the program that ends the group, which must be the writer. None, for `slimefsdp groups stop`,
            is refused if the group has a writer.

    Raises:
        StateError: another program is the writer.
    """
    try:
        ask(host, name, "stop", client, within_s=None)
    except WorkerDied:
        return
    ray.kill(host)


def _answer_of(reference: Any, group: str, call: str, within_s: float | None = None) -> Any:
    deadline = None if within_s is None else time.monotonic() + within_s
    while not ray.wait([reference], timeout=SLICE_S)[0]:
        require_cluster()
        if deadline is not None and time.monotonic() > deadline:
            raise StateError(
                f"the process of the group {group} has not answered {call} for {within_s:g} s",
                field="name",
                hint=f"`slimefsdp groups stop {group} --force` ends it if it does not recover",
            )
    try:
        return ray.get(reference, timeout=_ANSWER_S)
    except RayTaskError as error:
        if isinstance(error.cause, SlimeError):
            raise error.cause from None
        raise
    except ActorUnavailableError as error:  # the connection broke; the process may still run
        raise StateError(
            f"the process of the group {group} cannot be reached, and whether it did {call} is not known: {error}",
            field="name",
            hint="look at the network; `slimefsdp groups list` shows the group's state",
        ) from None
    except RayActorError as error:
        reason = next(iter(str(error).splitlines()), "")
        raise WorkerDied(
            f"the process of the group {group} has ended: {reason}",
            hint="launch the group again, and load its last checkpoint",
            call=call,
        ) from None
