"""Provides `@call`, which describes a remote call once for all code that forwards, checks or repeats the call.

The calls themselves are in slimefsdp/calls/.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast, get_args

from slimefsdp.errors import ConfigError, StateError, short_repr

Role = Literal["actor", "ref", "critic"]
ROLES: tuple[Role, ...] = get_args(Role)
LOSSES = {"actor": ("policy", "sft"), "critic": ("value",)}  # role -> the losses that `forward_backward` takes
DEFAULT_ADAPTER = "default"  # name of the run's own adapter, to which calls that name no adapter apply

Method = TypeVar("Method", bound=Callable[..., Any])
Arguments = dict[str, Any]  # the value of each parameter of a call by name, defaults included


@dataclass(frozen=True, eq=False, slots=True)
class Call:
    """Describes a call; `@call` creates the description.

    Args:
        method: the body of the call, which each rank runs.
        roles: the roles whose groups support the call.
        changes_state: whether later calls depend on this call. If so, the call is repeated after a loss of ranks, and
            on a named group only the writer may make the call.
        adapter: which adapter the call is for. `in_model` means the adapter that the caller has selected, which must be
            in the model; `by_name` the adapter named by the argument `name`; `any` that the adapter does not matter.
        answers_by_rank: whether a driver gets a list of all ranks' results instead of rank 0's result.
        is_exclusive: whether no other exclusive call may run on the rank at the same time. A call that is not exclusive
            only reports state.
        needs_whole_weights: whether the call is refused after an update that failed halfway, until a `load`.
        prepare: the method of `BatchPlanner` that checks and plans the call's `batch`. Each of its parameters gets the
            call's argument of the same name.
        check: checks the arguments for which no model is needed; the body checks the other arguments.
    """

    method: Callable[..., Any]
    roles: tuple[Role, ...]
    changes_state: bool = False
    adapter: Literal["in_model", "by_name", "any"] = "in_model"
    answers_by_rank: bool = False
    is_exclusive: bool = True
    needs_whole_weights: bool = False
    prepare: Callable[..., Any] | None = None
    check: Callable[[str, Arguments], None] | None = None

    @property
    def name(self) -> str:
        return self.method.__name__

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Returns the value of every parameter.

        Raises:
            TypeError: the arguments do not match the method's signature.
        """
        bound = inspect.signature(self.method).bind(None, *args, **kwargs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])

    def require(self, role: str, arguments: Arguments) -> None:
        """Raises if groups of this role do not support the call, or if an argument is wrong.

        Checks that need the model are left to the call's body.

        Raises:
            StateError: groups of this role do not support the call. SlimeError: an argument is wrong.
        """
        if role not in self.roles:
            problem = f"{self.name}() on a group of role {role!r}"
            raise StateError(problem, field=self.name, hint=f"call it on the {' or '.join(self.roles)} group")
        if self.check is not None:
            self.check(role, arguments)

    def planning(self, planner: Any, arguments: Arguments) -> Any:
        """Checks the call's batch with a group's `BatchPlanner`; returns the `Planning`, or None if there is no batch.

        Raises:
            BatchError, ConfigError: the batch or an argument does not fit the settings.
        """
        if self.prepare is None:
            return None
        names = inspect.signature(self.prepare).parameters.keys() & arguments.keys()
        return getattr(planner, self.prepare.__name__)(**{name: arguments[name] for name in names})


CALLS: dict[str, Call] = {}  # name -> call, in the order of definition


def call(*roles: Role, **description: Any) -> Callable[[Method], Method]:
    """Turns a method into a call. The call passes its arguments to the object's `_make`, which runs or sends the call.

    Args:
        roles: the roles whose groups support the call.
        description: the other fields of `Call`.
    """

    def decorate(method: Method) -> Method:
        described = CALLS[method.__name__] = Call(method, roles, **description)

        @wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self._make(described, described.bind(args, kwargs))

        wrapper.call = described  # type: ignore[attr-defined]
        return cast(Method, wrapper)

    return decorate


# ---------------------------------------------------------------------- arguments


@dataclass(frozen=True, slots=True)
class JobCheckpoint:
    """Identifies a save of a driver, and says which part of a job's checkpoint a group writes or reads.

    The checkpoint of a job is the actor's, with its critic and its reference group as parts. A driver gives a
    `JobCheckpoint` to the calls of each group; a program that calls a Trainer itself need not.

    Args:
        save_id: recorded in the manifests of a save; a load accepts only this save's checkpoint. None means any save.
        parts: in an actor's save, the folders of the parts that the other groups have written.
        is_part: whether the group writes or reads its part of the job's checkpoint. A critic that is saved by itself
            has separate checkpoints.
    """

    save_id: str | None = None
    parts: tuple[str, ...] = ()
    is_part: bool = False


_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("a finite number of 0 or more", lambda value: value >= 0),
    "betas": ("two numbers in [0, 1)", lambda value: 0 <= value < 1),
    "eps": ("a finite number above 0", lambda value: value > 0),
    "weight_decay": ("a finite number of 0 or more", lambda value: value >= 0),
    "max_grad_norm": ("a finite number of 0 or more", lambda value: value >= 0),
}


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """Overrides settings of `optim` for one optimiser update; None means that the setting stays.

    Raises:
        ConfigError: a value is not in its range.
    """

    lr: float | None = None  # replaces the schedule's rate; the schedule advances as usual
    betas: tuple[float, float] | None = None  # of AdamW, also under Muon; SGD takes the first beta as its momentum
    eps: float | None = None  # of AdamW, also under Muon
    weight_decay: float | None = None  # norms, biases and embeddings have none
    max_grad_norm: float | None = None  # 0 means that gradients are not clipped

    def __post_init__(self) -> None:
        if isinstance(self.betas, list):
            object.__setattr__(self, "betas", tuple(self.betas))
        for name, (rule, is_in_range) in _RANGES.items():
            value = getattr(self, name)
            numbers = value if name == "betas" else (value,)
            is_shaped = isinstance(numbers, tuple) and len(numbers) == (2 if name == "betas" else 1)
            if value is not None and not (
                is_shaped and all(map(is_finite, numbers)) and all(map(is_in_range, numbers))
            ):
                problem = f"{name}={short_repr(value)} of an optimiser update is not {rule}"
                raise ConfigError(problem, field=name, hint="leave it out, to use the settings of optim")


def is_finite(value: object) -> bool:
    # an int may exceed the largest float
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def require_loss(loss: str, role: str) -> None:
    """Checks that `forward_backward` supports a loss.

    Raises:
        ConfigError: the role does not support the loss.
    """
    if loss not in LOSSES[role]:
        problem = f"loss={loss!r} is not a loss of role {role!r}"
        raise ConfigError(problem, field="loss", hint=f"use {' or '.join(LOSSES[role])}")


def require_name(name: object, kind: str) -> None:
    """Checks that a name is valid.

    Args:
        kind: what the name is for, such as `an adapter`; for the error.

    Raises:
        ConfigError: the name is not valid.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        problem = f"name={short_repr(name)} cannot be the name of {kind}"
        hint = "use at most 100 letters, digits, and `.`, `_` or `-` after the first character"
        raise ConfigError(problem, field="name", hint=hint)
