"""What every call on a group of ranks is held to, on the driver and on each rank: roles, arguments, one at a time."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, Literal, NoReturn, ParamSpec, Protocol, TypeVar, get_args

from slimefsdp import heartbeat
from slimefsdp.errors import ConfigError, StateError, SyncError, short_repr

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
    "create_adapter": ("actor",),
    "delete_adapter": ("actor",),
    "adapters": ("actor",),
    "export_adapter": ("actor",),
}
"""Call -> the roles that answer it."""


DEFAULT_ADAPTER = "default"
"""The adapter that a run with `lora.rank` begins with, and that calls are for which name none."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What one optimiser update does otherwise than the settings of `optim` say; None: as they say.

    Raises:
        ConfigError: a value is not in its range.
    """

    lr: float | None = None  # 0 or more, in place of the schedule's; its place in the schedule advances all the same
    betas: tuple[float, float] | None = None  # each in [0, 1), of AdamW, also beside Muon; of SGD the first: momentum
    eps: float | None = None  # above 0, of AdamW, also beside Muon
    weight_decay: float | None = None  # 0 or more; none on norms, biases and embeddings
    max_grad_norm: float | None = None  # 0 or more, 0: gradients are not clipped

    def __post_init__(self) -> None:
        rules = {
            "lr": "a finite number of 0 or more",
            "betas": "two numbers in [0, 1)",
            "eps": "a finite number above 0",
            "weight_decay": "a finite number of 0 or more",
            "max_grad_norm": "a finite number of 0 or more",
        }
        for name, rule in rules.items():
            value = getattr(self, name)
            if value is None:
                continue
            numbers = value if name == "betas" else [value]
            if not isinstance(numbers, list | tuple) or len(numbers) != (2 if name == "betas" else 1):
                self._refuse(name, rule)
            for one in numbers:
                # whole numbers may be larger than any float; NaN is in no range
                is_number = isinstance(one, int | float) and not isinstance(one, bool)
                is_in_range = is_number and 0 <= one <= sys.float_info.max
                if not is_in_range or (name == "eps" and one == 0) or (name == "betas" and one >= 1):
                    self._refuse(name, rule)
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(self.betas))

    def _refuse(self, name: str, rule: str) -> NoReturn:
        problem = f"{name}={short_repr(getattr(self, name))} of an optimiser update is not {rule}"
        raise ConfigError(problem, field=name, hint="leave it out, and the settings of optim hold")


def require_loss(loss: str, role: str) -> None:
    """Whether `forward_backward` takes the loss on a role.

    Raises:
        ConfigError: naming those that it takes.
    """
    if loss not in LOSSES[role]:
        problem = f"loss={loss!r} is not a loss of role {role!r}"
        raise ConfigError(problem, field="loss", hint=f"use {' or '.join(LOSSES[role])}")


def require_adapter_settings(name: object, rank: object, alpha: object, seed: object) -> None:
    """Whether `create_adapter` can use what it was given, as far as that alone tells.

    Raises:
        ConfigError: naming the argument.
    """
    require_adapter_name(name)
    for argument, value, least in (("rank", rank, 1), ("seed", seed, 0)):
        if value is not None and (type(value) is not int or not least <= value < 2**63):
            problem = f"{argument}={short_repr(value)} of an adapter is no whole number of {least} or more"
            raise ConfigError(problem, field=argument, hint="leave it out, and the settings of the run hold")
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and 0 < alpha <= 1e30
    if alpha is not None and not is_number:
        problem = f"alpha={short_repr(alpha)} of an adapter is no finite number above 0"
        raise ConfigError(problem, field="alpha", hint="leave it out, and lora.alpha holds")


def require_adapter_name(name: object) -> None:
    """Whether an adapter can be called so.

    Raises:
        ConfigError: it cannot.
    """
    _require_name(name, "an adapter")


def require_group_name(name: object) -> None:
    """Whether a group that outlives its program can be called so.

    Raises:
        ConfigError: it cannot.
    """
    _require_name(name, "a group")


def _require_name(name: object, of: str) -> None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        problem = f"name={short_repr(name)} cannot be the name of {of}"
        hint = "use at most 100 letters, digits, and `.`, `_` or `-` behind the first one"
        raise ConfigError(problem, field="name", hint=hint)


def require_log_probs(with_log_probs: object, role: str) -> None:
    """Whether `forward_backward` can return log-probs.

    Raises:
        ConfigError: a critic has none, or it is no bool.
    """
    if not isinstance(with_log_probs, bool) or (with_log_probs and role == "critic"):
        problem = f"with_log_probs={short_repr(with_log_probs)} on a group of role {role!r}"
        raise ConfigError(problem, field="with_log_probs", hint="give true or false, and to a policy alone")


def require_update_settings(settings: object) -> None:
    """Whether `optimizer_step` can use what it was given.

    Raises:
        ConfigError: it is no `UpdateSettings`.
    """
    if settings is not None and not isinstance(settings, UpdateSettings):
        problem = f"settings={short_repr(settings)} is a {type(settings).__name__}"
        raise ConfigError(problem, field="settings", hint="give slimefsdp.rpc.UpdateSettings, or leave it out")


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
