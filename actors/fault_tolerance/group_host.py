"""The host process of a named group: a detached Ray actor that has a `Supervisor` and knows the attached programs."""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import ray

from actors.cluster.connect import connect, require_lasting_cluster
from actors.fault_tolerance.supervisor import Supervisor
from actors.model_folders import with_model_folders
from actors.startup import stage
from actors.workers.group_calls import RankRequest
from actors.workers.named_group import LEASE_S, NAMESPACE, Client, GroupStatus, Membership, NamedGroup, ask
from actors.workers.watchdog import remote_class
from slimefsdp.config import RunConfig
from slimefsdp.errors import SlimeError, StateError, portable
from slimefsdp.results import Health
from slimefsdp.rpc import Role, require_name


def launch_named(config: RunConfig, name: str) -> NamedGroup:
    """Launches a supervised group that outlives this program; this program becomes the group's first writer.

    The group exists until `shutdown()`, `slimefsdp groups stop`, or the end of the cluster. Its host process reads and
    writes `run.dir`, and starts on this machine if this machine has room.

    Raises:
        StateError: there is a group of this name. ResourceError: the cluster would end with this program.
        SlimeError: as `SupervisedGroup.launch`.
    """
    require_name(name, "a group")
    config = with_model_folders(config)
    connect(config)
    require_lasting_cluster()
    # paths become absolute, since host and ranks have other working directories
    config = config.with_model_paths({field: path.absolute() for field, path in config.model_paths.items()})
    if config.run.dir is not None:
        run = config.run.model_copy(update={"dir": config.run.dir.absolute()})
        config = config.model_copy(update={"run": run})
    node = ray.get_runtime_context().get_node_id()
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "scheduling_strategy": ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True),
    }
    try:
        host = remote_class(GroupHost).options(**options).remote(name, config)
    except ValueError:
        problem = f"there is a group {name!r} in this cluster"
        raise StateError(problem, field="name", hint="attach to it, end it, or choose another name") from None
    client = Client.here(writes=True)
    try:
        with stage(f"launching the group {name}"):
            ask(host, name, "launch", within_s=None)
        config, roles = ask(host, name, "attach", client)
    except BaseException:  # includes Ctrl-C
        ray.kill(host)
        raise
    return NamedGroup(Membership(name, host, client, config, roles), "actor")


_WAITERS = 64  # number of threads that wait for results
_KEPT_S = 600.0  # how long a program's answers are kept after the program's last sign of life


@dataclass(slots=True)
class _OpenCall:
    """A call whose answer no program has fetched yet."""

    name: str
    client: str
    answer: Future[Any]


class GroupHost:
    """Answers the programs that are attached to a group.

    `begin` runs in a single thread, so that calls keep their order; `result` runs in other threads.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"results": _WAITERS, "control": 8}

    def __init__(self, name: str, config: RunConfig) -> None:
        self._name, self._config = name, config
        self._job: Supervisor | None = None
        self._launch_failure: Exception | None = None
        self._launched = time.time()
        self._lock = threading.Lock()
        self._clients: dict[str, tuple[Client, float]] = {}  # id -> (client, time.monotonic() of its last renewal)
        self._left: set[str] = set()
        self._writer: str | None = None
        self._is_stopping = False
        self._tickets = itertools.count()
        self._waiters = ThreadPoolExecutor(_WAITERS, thread_name_prefix="answers")
        self._open_calls: dict[int, _OpenCall] = {}
        self._saved_step: int | None = None

    def launch(self) -> None:
        try:
            self._job = Supervisor(self._config)
        except Exception as error:
            self._launch_failure = error  # also reported to later programs
            raise portable(error) from None
        self._config = self._job.config_of("actor")

    def begin(self, client: str, role: Role, request: RankRequest) -> int:
        """Queues a call after all earlier calls; returns the ticket for `result`.

        Raises:
            StateError: the call would change the group, and the client is not the writer; or the group is being ended.
            SlimeError: the call is wrong, and no rank has seen it.
        """
        job = self._ready()
        with self._lock:
            self._require_going_on()
            if request.call.changes_state and client != self._writer:
                raise self._not_the_writer(request.name)
        call, ticket = job.submit(role, request), next(self._tickets)
        # A thread waits for the result even if no program fetches it, since only a wait replaces lost ranks.
        self._open_calls[ticket] = _OpenCall(request.name, client, self._waiters.submit(self._answer, request, call))
        return ticket

    def _answer(self, request: RankRequest, call: Any) -> Any:
        try:
            value = call.result()
        except Exception as error:
            raise portable(error) from None
        if request.name == "save" and request.adapter is None:
            self._saved_step = request.arguments["step"]
        return value

    @ray.method(concurrency_group="results")
    def result(self, ticket: int) -> Any:
        """Waits for a call and returns its result; a ticket can be used once."""
        open_call = self._open_calls.get(ticket)
        if open_call is None:
            problem = f"the group {self._name} has forgotten the answer of a program that it did not hear of for long"
            raise StateError(problem, field="name", hint="attach again; the call was done")
        try:
            return open_call.answer.result()
        finally:
            self._open_calls.pop(ticket, None)

    @ray.method(concurrency_group="control")
    def attach(self, client: Client) -> tuple[RunConfig, tuple[Role, ...]]:
        """Attaches a program; returns the settings of the group and its roles.

        Raises:
            StateError: another program is the writer; or the group is being launched, or has ended.
        """
        job = self._ready()
        if job.failure is not None:
            raise self._ended(job.failure)
        with self._lock:
            self._require_going_on()
            writer = self._present_writer()
            if client.writes:
                if writer is not None and writer.id != client.id:
                    raise StateError(
                        f"the group {self._name} is written by {writer.program}",
                        field="write",
                        hint="attach with write=False, give wait_s, or detach there: a program that has ended makes "
                        f"room after {LEASE_S:g} s",
                    )
                self._writer = client.id
            self._clients[client.id] = client, time.monotonic()
        return self._config, job.roles

    @ray.method(concurrency_group="control")
    def renew(self, client: Client) -> None:
        with self._lock:
            if client.id not in self._left:  # a renewal may arrive after the program has detached
                self._clients[client.id] = client, time.monotonic()

    @ray.method(concurrency_group="control")
    def detach(self, client: str) -> None:
        with self._lock:
            self._clients.pop(client, None)
            self._left.add(client)
            if self._writer == client:
                self._writer = None

    @ray.method(concurrency_group="control")
    def receivers(self, role: Role) -> list[Any]:
        return self._ready().receivers(role)

    @ray.method(concurrency_group="control")
    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]:
        return self._ready().health(role, timeout_s)

    @ray.method(concurrency_group="control")
    def status(self) -> GroupStatus:
        """Returns the status of the group; asks its ranks only for their health."""
        first = None
        failure = self._launch_failure if self._job is None else self._job.failure
        if self._job is not None and failure is None and not self._is_stopping:
            first = self._job.health("actor", timeout_s=2.0)[0]
        with self._lock:
            writer = self._present_writer()
            readers = [client.program for client in self._present() if client is not writer]
        state = "launching" if self._job is None else "ending" if self._is_stopping else "ready"
        if failure is not None:
            state = f"ended by {type(failure).__name__}: {failure}"
        return GroupStatus(
            self._name,
            state,
            str(self._config.model.path),
            self._config.ranks,
            self._launched,
            None if self._config.run.dir is None else str(self._config.run.dir),
            first.updates_taken if isinstance(first, Health) else None,
            self._saved_step,
            0 if self._job is None else len(self._job.recoveries),
            tuple(open_call.name for open_call in list(self._open_calls.values()) if not open_call.answer.done()),
            None if writer is None else writer.program,
            tuple(readers),
        )

    @ray.method(concurrency_group="control")
    def stop(self, client: str | None) -> None:
        """Waits for saves in the background, then ends the ranks.

        Raises:
            StateError: another program is the writer.
        """
        with self._lock:
            if client is not None and client != self._writer:
                raise self._not_the_writer("shutdown")
            writer = self._present_writer()
            if writer is not None and client is None:
                raise StateError(
                    f"the group {self._name} is written by {writer.program}",
                    field="name",
                    hint="end that program first, or give --force",
                )
            self._is_stopping = True
        if self._job is not None:
            self._job.shutdown()

    def _ready(self) -> Supervisor:
        if self._launch_failure is not None:
            raise self._ended(self._launch_failure)
        if self._job is None:
            problem = f"the group {self._name} is being launched"
            raise StateError(problem, field="name", hint="try again when `slimefsdp groups list` says that it is ready")
        return self._job

    def _ended(self, failure: Exception) -> StateError:
        return StateError(
            f"the group {self._name} has ended by {type(failure).__name__}: {failure}",
            field="name",
            hint=f"remove it by `slimefsdp groups stop {self._name}`, and launch it again",
        )

    def _require_going_on(self) -> None:
        if self._is_stopping:
            raise StateError(f"the group {self._name} is being ended", field="name", hint="launch it again")

    def _not_the_writer(self, call: str) -> StateError:
        writer = self._present_writer()
        who = "nobody" if writer is None else writer.program
        return StateError(
            f"{call} changes the group {self._name}, which {who} writes, and not this program",
            field="write",
            hint="attach with write=True; a writer that was not heard of for long loses its place to another",
        )

    def _present(self) -> list[Client]:
        now = time.monotonic()
        silent = {key: now - seen for key, (_, seen) in self._clients.items() if now - seen > LEASE_S}
        self._forget_answers({key for key, silent_s in silent.items() if silent_s > _KEPT_S})
        return [client for key, (client, _) in self._clients.items() if key not in silent]

    def _forget_answers(self, clients: set[str]) -> None:
        """Drops the answers for programs that were not heard of for long; their calls still run to the end."""
        for client in clients:
            self._clients.pop(client, None)
        for ticket, open_call in list(self._open_calls.items()):
            if open_call.client in clients:
                self._open_calls.pop(ticket, None)

    def _present_writer(self) -> Client | None:
        return next((client for client in self._present() if client.id == self._writer), None)
