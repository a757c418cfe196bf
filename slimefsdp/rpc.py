"""What every call on a group of ranks is held to, on the driver and on each rank: roles, arguments, one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar, get_args

from slimefsdp import heartbeat
from slimefsdp.errors import ConfigError, StateError, SyncError

Role = Literal["actor", "ref", "critic"]
ROLES: tuple[Role, ...] = get_args(Role)
_TRAINED: tuple[Role, ...] = ("actor", "critic")
LOSSES = {"actor": ("policy", "sft"), "critic": ("value",)}
"""Role -> the losses that `forward_backward` takes."""
ROLES_OF_CALLS: dict[str, tuple[Role, ...]] = {
    "compute_log_probs": ("actor", "ref"),
    "compute_values": ("critic",),
    "train_step": _TRAINED,
    "forward_backward": _TRAINED,
    "optimizer_step": _TRAINED,
    "zero_grad": _TRAINED,
    "sleep": ROLES,
    "wake_up": ROLES,
    "memory": ROLES,
    "describe": ROLES,
    "check_sync": ROLES,
    "gradient_health": _TRAINED,
    "update_weights": ("actor", "ref"),
    "update_ref": ("actor",),
    "save": _TRAINED,
    "finish_save": _TRAINED,
    "load": _TRAINED,
    "restored": _TRAINED,
    "export_hf": ROLES,
}
"""Call -> the roles that answer it."""


def require_loss(loss: str, role: str) -> None:
    """Whether `forward_backward` takes the loss on a role.

    Raises:
        ConfigError: naming those that it takes.
    """
    if loss not in LOSSES[role]:
        problem = f"loss={loss!r} is not a loss of role {role!r}"
        raise ConfigError(problem, field="loss", hint=f"use {' or '.join(LOSSES[role])}")


def require_role(call: str, role: str) -> None:
    """Refuses a call that makes no sense on a group of a role.

    Raises:
        StateError: naming the roles that answer it.
    """
    answering = ROLES_OF_CALLS[call]
    if role not in answering:
        groups = " or ".join(answering)
        raise StateError(f"{call}() on a group of role {role!r}", field=call, hint=f"call it on the {groups} group")


def require_receivers(receivers: object) -> None:
    """Whether `update_weights` can send to what it was given.

    Raises:
        SyncError: it is no list, or something in it has no `begin`, `receive` and `commit`.
    """
    hint = "give a list of actors that implement slimefsdp.weight_sync.receive.Receiver"
    if not isinstance(receivers, Collection):
        raise SyncError(f"receivers is a {type(receivers).__name__}, not a list", field="receivers", hint=hint)
    for receiver in receivers:
        if not all(hasattr(receiver, name) for name in ("begin", "receive", "commit")):
            raise SyncError(f"{type(receiver).__name__} has no begin, receive and commit", field="receivers", hint=hint)


class CallLock:
    """Lets one call at a time run on an object; calls may call each other in the thread that holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._running: str | None = None

    @contextmanager
    def held_by(self, call: str) -> Iterator[None]:
        """Holds the lock for a call.

        Raises:
            StateError: a call is running in another thread.
        """
        if not self._lock.acquire(blocking=False):
            raise StateError(
                f"{call}() while {self._running or 'another call'}() is running in another thread",
                field=call,
                hint="call it when that one has returned",
            )
        before, self._running = self._running, self._running or call
        try:
            yield
        finally:
            self._running = before
            self._lock.release()


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Locked(Protocol):
    call_lock: CallLock


class _Ranked(_Locked, Protocol):
    @property
    def role(self) -> str: ...


Owner = TypeVar("Owner", bound=_Locked)
RankedOwner = TypeVar("RankedOwner", bound=_Ranked)


def serialized(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Runs a method of an object with a `call_lock` only while no other thread is in one; else it is a StateError."""

    @wraps(method)
    def call(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self.call_lock.held_by(method.__name__):
            return method(self, *args, **kwargs)

    return call


def rpc(
    method: Callable[Concatenate[RankedOwner, Arguments], Result],
) -> Callable[Concatenate[RankedOwner, Arguments], Result]:
    """Makes a method one of these calls: on its roles alone, and one at a time; raises StateError otherwise.

    Each is an activity of `slimefsdp.heartbeat`.
    """

    @wraps(method)
    def call(self: RankedOwner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        require_role(method.__name__, self.role)
        with heartbeat.during(method.__name__):
            return method(self, *args, **kwargs)

    return serialized(call)
