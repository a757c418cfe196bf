"""The handles by which a driver calls groups of ranks. They have the methods of slimefsdp/calls.

A wrong batch, plan, loss, receiver or `loop_state` raises in the caller, before any rank sees the call. A wrong memory
tag, step or path raises on all ranks alike. Arguments are copied when the call is made.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from actors.workers.futures import Future
from slimefsdp.calls.state import InspectionCalls, StateCalls
from slimefsdp.calls.training import TrainingCalls
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.errors import ConfigError, SlimeError
from slimefsdp.results import Description, Health, Memory, MemoryReport
from slimefsdp.rpc import CALLS, DEFAULT_ADAPTER, Arguments, Call, Role, require_name

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class EndsWithBlock:
    """A handle whose `shutdown` is called at the end of a `with` block."""

    def shutdown(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


@dataclass(frozen=True, slots=True)
class RankRequest:
    """A call that is sent to all ranks.

    Args:
        name: the name of the call, a key of `CALLS`.
        arguments: name -> value; missing parameters have their defaults. A prepared request has a reference to its
            batch in Ray's object store. A save or load may have a `JobCheckpoint` under `job`.
        adapter: the adapter that the call is for; None means the run's own adapter, or that there are no adapters.
    """

    name: str
    arguments: Arguments = field(default_factory=dict)
    adapter: str | None = None

    @property
    def call(self) -> Call:
        return CALLS[self.name]

    def having(self, **arguments: Any) -> RankRequest:
        """Returns a copy of the request in which these arguments are replaced or added."""
        return replace(self, arguments={**self.arguments, **arguments})


class GroupCalls(TrainingCalls, InspectionCalls[list[MemoryReport], list[Memory], list[Description]], StateCalls):
    """The base class of all handles on a group; a subclass defines how a request reaches the ranks."""

    role: Role

    def _start(self, request: RankRequest) -> Future[Any]:
        raise NotImplementedError

    def _submit(self, call: Call, arguments: Arguments) -> Future[Any]:
        call.require(self.role, arguments)
        adapter = arguments["name"] if call.adapter == "by_name" else None
        copies = {name: _copy(name, value) for name, value in arguments.items()}
        return self._start(RankRequest(call.name, copies, adapter))

    def _make(self, call: Call, arguments: Arguments) -> Any:
        return self._submit(call, arguments).result()

    def adapter(self, name: str) -> AdapterHandle:
        """Returns a handle with the same calls for the adapter of this name, which need not exist yet."""
        return AdapterHandle(self, name)

    def __repr__(self) -> str:
        parts: list[str] = [self.role]
        with suppress(SlimeError):  # the job may have ended
            config: RunConfig | None = getattr(self, "config", None)
            if config is not None:
                ranks = config.ranks_of(self.role)
                parts += [f"{ranks} rank{'s' * (ranks != 1)}", str(config.folder_of(self.role)[0])]
        return f"{type(self).__name__}({', '.join(parts)})"


class Job(Protocol):
    """The interface to the job of a `JobGroup`: a `Supervisor` in this process, or a `Membership` of a named group."""

    @property
    def roles(self) -> tuple[Role, ...]: ...

    def config_of(self, role: Role) -> RunConfig: ...

    def submit(self, role: Role, request: RankRequest) -> Future[Any]: ...

    def receivers(self, role: Role) -> list[Any]: ...

    def health(self, role: Role, timeout_s: float) -> list[Health | SlimeError]: ...


class JobGroup(EndsWithBlock, GroupCalls):
    """A handle on the group of one role of a job; the job replaces lost ranks."""

    def __init__(self, job: Job, role: Role) -> None:
        self.role = role
        self._job = job

    @property
    def config(self) -> RunConfig:
        """Returns the settings, with mesh.dp as a number."""
        return self._job.config_of(self.role)

    @property
    def critic(self) -> Self | None:
        """Returns the critic's handle if this is an actor's group with algorithm=ppo, otherwise None."""
        return self._other("critic")

    @property
    def reference_group(self) -> Self | None:
        """Returns the reference group's handle if this is an actor's group with reference.dp, otherwise None."""
        return self._other("ref")

    def _other(self, role: Role) -> Self | None:
        return type(self)(self._job, role) if self.role == "actor" and role in self._job.roles else None

    @property
    def receivers(self) -> list[Any]:
        """Returns this group's receivers for a weight update by another group; replaced ranks are new receivers."""
        return self._job.receivers(self.role)

    def health(self, timeout_s: float = 5.0) -> list[Health | SlimeError]:
        return self._job.health(self.role, timeout_s)

    def _start(self, request: RankRequest) -> Future[Any]:
        return self._job.submit(self.role, request)


def submit(call: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[Result]:
    """Starts a call of a group without waiting for it, for example `submit(group.train_step, batch)`.

    Returns:
        The future of the call; its `result()`, or `await`, returns the call's result or raises the call's error.

    Raises:
        SlimeError: an argument is wrong; no rank has seen the call. ConfigError: `call` is not a call of a group.
    """
    group, description = getattr(call, "__self__", None), getattr(call, "call", None)
    if not isinstance(group, GroupCalls) or not isinstance(description, Call):
        problem = f"submit({getattr(call, '__qualname__', call)!s}), which is not a call of a group"
        raise ConfigError(problem, field="call", hint="give a method of a group such as group.train_step")
    return group._submit(description, description.bind(args, kwargs))


class AdapterHandle(GroupCalls):
    """A handle with the calls of a group for one of its adapters; `GroupCalls.adapter` returns it.

    Calls for one adapter run in the order in which they were made. Adapters with waiting calls take turns call by call.
    """

    def __init__(self, group: GroupCalls, name: str) -> None:
        require_name(name, "an adapter")
        self.name, self.role = name, group.role
        self._group = group

    def __repr__(self) -> str:
        return f"AdapterHandle({self.name} of {self._group!r})"

    def _start(self, request: RankRequest) -> Future[Any]:
        # `adapter` selects the lane in the `Dispatcher`. The run's own adapter has the lane None, even by its name.
        own = None if self.name == DEFAULT_ADAPTER else self.name
        return self._group._start(replace(request, adapter=request.adapter or own))


def _copy(name: str, value: Any) -> Any:
    """Returns a copy of an argument, since the caller may change the original before the ranks get it."""
    if name == "receivers":  # actors, which cannot be copied
        return list(value)
    if name == "batch":
        return value.copy() if isinstance(value, RolloutBatch) else value
    return deepcopy(value)
