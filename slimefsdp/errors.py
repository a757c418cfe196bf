"""Defines the errors that a user can cause. Each error names the field, the value and the way out.

Errors are sent between processes (Ray pickles them), so each can be rebuilt from its plain attributes. `exit_code` is
the exit status of the command line.
"""

from __future__ import annotations

import math
import pickle
import reprlib
import unicodedata
from pathlib import Path
from typing import Any


class SlimeError(Exception):
    """Base class of all errors of this project.

    Args:
        message: what is wrong, including the value.
        field: the setting, tensor or batch field with the problem, e.g. `mesh.dp` or `rewards`.
        hint: the way out, as one imperative sentence.
        rank: the global rank that raised the error; None for the driver and the command line.
        call: the call that failed, e.g. `load` or `train_step`.

    Attributes:
        others: further problems with the same settings, or errors of other ranks, one sentence each.
        ends_rank: whether the rank's process has ended or will end, so that the other ranks would wait for it forever.
            False means that all ranks raise the error, and the group can still be used.
    """

    code = "error"
    exit_code = 1
    others: tuple[str, ...] = ()
    ends_rank: bool = False

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        hint: str | None = None,
        rank: int | None = None,
        call: str | None = None,
    ) -> None:
        message = printable(message)  # may quote text from outside, such as a record or a file
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = None if hint is None else printable(hint)
        self.rank = rank
        self.call = call

    def __str__(self) -> str:
        context = [f"{name} {value}" for name, value in (("rank", self.rank), ("in", self.call)) if value is not None]
        suffix = f" ({', '.join(context)})" if context else ""
        # pydantic-style prefix, unless the message already begins with the field
        head = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        text = f"{head}{self.message}{suffix}" + (f"; {self.hint}" if self.hint else "")
        return "\n  also ".join([text, *self.others])

    def __reduce__(self) -> tuple[Any, ...]:
        # __dict__ is restored on the new instance, so that subclasses may have more attributes
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode categories of control and format characters


def printable(text: str, *, kept: str = "\n\t") -> str:
    """Returns the text with control and format characters replaced by escapes such as \\x1b.

    Args:
        kept: characters that are not replaced.
    """
    if text.isprintable():
        return text
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _ESCAPED and character not in kept
        else character
        for character in text
    )


def _rebuild(cls: type[SlimeError], message: str, state: dict[str, Any]) -> SlimeError:
    error = cls.__new__(cls, message)  # not cls(message), because a subclass's __init__ may have other parameters
    error.__dict__.update(state)
    return error


class ConfigError(SlimeError):
    """A setting, override or YAML file is invalid."""

    code = "config"
    exit_code = 2


class BatchError(SlimeError):
    """A rollout batch is invalid; raised before any rank computes."""

    code = "batch"
    exit_code = 3


class ModelError(SlimeError):
    """A model folder or architecture cannot be loaded faithfully."""

    code = "model"
    exit_code = 4


class CheckpointError(SlimeError):
    """A checkpoint is missing, incomplete, altered, or incompatible with the run."""

    code = "checkpoint"
    exit_code = 5


class ResourceError(SlimeError):
    """The machine or cluster lacks resources that the run needs."""

    code = "resource"
    exit_code = 6


class StateError(SlimeError):
    """A call is not possible in the current state, e.g. an optimiser step without gradients."""

    code = "state"
    exit_code = 7


class WorkerDied(SlimeError):
    code = "worker_died"
    exit_code = 8
    ends_rank = True


class WorkerHung(SlimeError):
    """A rank did not answer or made no progress within the deadline.

    Attributes:
        seconds: time since the rank's last progress.
        stack: file with the stack traces of the rank's threads, if such a file was written.
    """

    code = "worker_hung"
    exit_code = 9
    seconds: float | None = None
    stack: str | None = None


class PeerFailed(SlimeError):
    """This rank failed only because another rank did; the other rank's error is the cause."""

    code = "peer_failed"
    exit_code = 10


class SyncError(SlimeError):
    """New weights did not reach a rollout engine completely and in time.

    Attributes:
        is_of_group: whether the process group of a broadcast failed, so that another member may be the cause.
    """

    code = "sync"
    exit_code = 11
    is_of_group: bool = False


class EngineError(SlimeError):
    """A rollout engine cannot do what was requested, or did something other than that."""

    code = "engine"
    exit_code = 12


class Interrupted(SlimeError):
    """The run was ended by SIGTERM or SIGINT, and can be resumed."""

    code = "interrupted"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: a temporary failure, try again


def portable(error: Exception) -> Exception:
    """Returns the error itself if pickling preserves it; else a RuntimeError with the error's type, text and notes.

    Some exceptions have objects that cannot be pickled, or a constructor with other arguments than pickle passes.
    """
    notes = getattr(error, "__notes__", [])
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error) and getattr(copy, "__notes__", []) == notes:
            return error
    except Exception:  # pickling runs the error's own methods, which may raise anything
        pass
    try:
        text = str(error)
    except Exception:
        text = "(it has no text)"
    plain = RuntimeError(f"{type(error).__qualname__}: {text}")
    for note in notes:
        plain.add_note(note)
    return plain


class _ShortText(reprlib.Repr):
    """Shortens values as `reprlib` does, but writes them as YAML does.

    `reprlib.Repr` calls the method `repr_TYPE` for a value of type TYPE.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 4, 6, 6
        self.maxstring = self.maxother = 60

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 200:  # Python refuses to print integers of thousands of digits
            return f"(an integer of about {int(value.bit_length() * math.log10(2)) + 1} digits)"
        return repr(value)

    def repr_float(self, value: float, level: int) -> str:
        return repr(value) if math.isfinite(value) else {"inf": ".inf", "-inf": "-.inf"}.get(repr(value), ".nan")

    def repr_PosixPath(self, value: Path, level: int) -> str:
        return self.repr1(str(value), level)


class _ShortRepr(_ShortText):
    """Shortens values in the same way, but writes them as Python does."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return repr(value)

    def repr_bool(self, value: bool, level: int) -> str:
        return repr(value)

    def repr_float(self, value: float, level: int) -> str:
        return repr(value)


def short_repr(value: Any) -> str:
    """Returns the Python repr of any value, on one line of bounded length."""
    return " ".join(_ShortRepr().repr(value).split())


def short_text(value: Any) -> str:
    """Returns the value as YAML would write it, on one line of bounded length, for error messages."""
    return _ShortText().repr(value)


def byte_text(number: int, *, round_up: bool = False) -> str:
    """Returns a number of bytes as text with one decimal and a decimal unit.

    Args:
        round_up: whether the number is rounded up, as for a lower limit, instead of to the nearest number.
    """
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if number >= 1000**power:
            tenths = 10 * number / 1000**power
            return f"{(math.ceil(tenths) if round_up else round(tenths)) / 10:,.1f} {unit}"
    return f"{number} B"
