"""A driver's handle on a group of ranks: it has the calls of slimefsdp/calls, and sends them to the ranks.

Batches, plans, losses, receivers and `loop_state` are refused where the call is made, before a rank has seen anything;
tags, steps and paths are refused by the ranks, by all alike. Ranks get the arguments as they were when the call was
made, and calls run in the order in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from slimefsdp.calls.state import InspectionCalls, StateCalls
from slimefsdp.calls.training import TrainingCalls
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError, SlimeError
from slimefsdp.results import Description, Health, Memory, MemoryReport
from slimefsdp.rpc import CALLS, DEFAULT_ADAPTER, Arguments, Call, Role, require_name

Result = TypeVar("Result")
Answer = TypeVar("Answer", covariant=True)
Parameters = ParamSpec("Parameters")


class Future(Protocol[Answer]):
    """The result of a call that is queued or running."""

    def result(self) -> Answer:
        """Waits for the result.

        Raises:
            WorkerHung: not all ranks answered in time. WorkerDied: a process ended.
            SlimeError: what a rank raised.
        """
        ...

    def __await__(self) -> Generator[Any, None, Answer]:
        """Waits for the result in a coroutine, while its event loop goes on."""
        ...


class EndsWithBlock:
    """A handle that a `with` block ends by its `shutdown`, whatever is raised there."""

    def shutdown(self) -> None:
        """Ends what the handle launched."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A call on its way to all ranks.

    Args:
        name: of the call.
        arguments: by name. Parameters that are not there have their defaults. A prepared request has its batch in
            Ray's object store.
        adapter: the adapter that the call is for; None: the run's own, or there are no adapters.
    """

    name: str
    arguments: Arguments = field(default_factory=dict)
    adapter: str | None = None

    @property
    def call(self) -> Call:
        """Returns what is known of the call."""
        return CALLS[self.name]

    def having(self, **arguments: Any) -> RankRequest:
        """Returns the same request with other values of these arguments."""
        return replace(self, arguments={**self.arguments, **arguments})


class GroupCalls(TrainingCalls, InspectionCalls[list[MemoryReport], list[Memory], list[Description]], StateCalls):
    """Base of all handles on a group; a subclass says how a request reaches the ranks."""

    role: Role

    def _start(self, request: RankRequest) -> Future[Any]:
        """Takes a request without waiting for it."""
        raise NotImplementedError

    def _submit(self, call: Call, arguments: Arguments) -> Future[Any]:
        call.require(self.role, arguments)
        adapter = arguments["name"] if call.adapter == "by_name" else None
        given = {name: _as_it_is_now(name, value) for name, value in arguments.items()}
        return self._start(RankRequest(call.name, given, adapter))

    def _make(self, call: Call, arguments: Arguments) -> Any:
        return self._submit(call, arguments).result()

    def adapter(self, name: str) -> AdapterHandle:
        """Returns a handle with the same calls for another adapter; whether it exists is asked when it is called."""
        return AdapterHandle(self, name)

    def __repr__(self) -> str:
        parts: list[str] = [self.role]
        with suppress(SlimeError):  # of a job that has ended
            config: RunConfig | None = getattr(self, "config", None)
            if config is not None:
                dp_replicate, dp = config.mesh_of(self.role)
                ranks = dp_replicate * dp * config.mesh.cp
                parts += [f"{ranks} rank{'s' * (ranks != 1)}", str(config.folder_of(self.role)[0])]
        return f"{type(self).__name__}({', '.join(parts)})"


class Job(Protocol):
    """A job whose groups are told apart by role: a supervisor in this process, or one in a process of its own."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """Returns the roles that the job has groups of."""
        ...

    def config_of(self, role: Role) -> RunConfig:
        """Returns the settings of a role's group, with mesh.dp as a number."""
        ...

    def submit(self, role: Role, request: RankRequest) -> Future[Any]:
        """Takes a call, which begins when those before it have begun.

        Raises:
            SlimeError: its arguments are wrong, and no rank has seen them; or the job has ended with this error.
        """
        ...

    def receivers(self, role: Role) -> list[Any]:
        """Returns what `update_weights` of another group can send to; it changes when lost ranks are replaced."""
        ...

    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]:
        """Returns each rank's answer, or the error that stands for it."""
        ...


class JobGroup(EndsWithBlock, GroupCalls):
    """A handle on the group of one role of a job, whose lost ranks are replaced."""

    def __init__(self, job: Job, role: Role) -> None:
        self.role = role
        self._job = job

    @property
    def config(self) -> RunConfig:
        """The settings, with mesh.dp as a number."""
        return self._job.config_of(self.role)

    @property
    def critic(self) -> Self | None:
        """The critic's handle, of an actor under algorithm=ppo."""
        return self._other("critic")

    @property
    def reference_group(self) -> Self | None:
        """The reference's handle, of an actor with reference.placement=group."""
        return self._other("ref")

    def _other(self, role: Role) -> Self | None:
        return type(self)(self._job, role) if self.role == "actor" and role in self._job.roles else None

    @property
    def receivers(self) -> list[Any]:
        """Returns what `update_weights` of another group can send to; it changes when lost ranks are replaced."""
        return self._job.receivers(self.role)

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        """Returns each rank's answer, or the error that stands for it."""
        return self._job.health(self.role, timeout_s)

    def _start(self, request: RankRequest) -> Future[Any]:
        return self._job.submit(self.role, request)


def submit(call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
    """Starts a call of a group and returns at once: `submit(group.train_step, batch)`.

    Args:
        call: a method of a group's handle.
        args, kwargs: of the call.

    Returns:
        A future. Its `result()`, or `await`, gives what the call returns or raises what it raises.

    Raises:
        SlimeError: an argument is wrong; no rank has seen anything. ConfigError: this is no call of a group.
    """
    group, description = getattr(call, "__self__", None), getattr(call, "call", None)
    if not isinstance(group, GroupCalls) or not isinstance(description, Call):
        problem = f"submit({getattr(call, '__qualname__', call)!s}), which is no call of a group"
        raise ConfigError(problem, field="call", hint="give a method of a group such as group.train_step")
    return group._submit(description, description.bind(args, kwargs))


class AdapterHandle(GroupCalls):
    """The calls of a group for one of its adapters; `GroupCalls.adapter` makes it.

    Calls for one adapter run in the order in which they were made. Adapters with waiting calls take turns, one call
    each.
    """

    def __init__(self, group: GroupCalls, name: str) -> None:
        require_name(name, "an adapter")
        self.name, self.role = name, group.role
        self._group = group

    def __repr__(self) -> str:
        return f"AdapterHandle({self.name} of {self._group!r})"

    def _start(self, request: RankRequest) -> Future[Any]:
        # None for the run's own: each adapter has one name, and one place in the order of calls
        own = None if self.name == DEFAULT_ADAPTER else self.name
        return self._group._start(replace(request, adapter=request.adapter or own))


def _as_it_is_now(name: str, value: Any) -> Any:
    """Returns a copy of an argument, which its owner may change before the ranks get it."""
    if name == "receivers":  # actors, which cannot be copied
        return list(value)
    if name == "batch":
        return value.copy() if isinstance(value, RolloutBatch) else value
    return deepcopy(value)
