"""Every error a user can cause, as a type that says which field, which value and the way out.

Errors cross process borders (Ray pickles them), so each one rebuilds from its plain attributes. The command line turns
`exit_code` into its own exit status.
"""

from __future__ import annotations

import math
import pickle
import reprlib
import unicodedata
from pathlib import Path
from typing import Any


class SlimeError(Exception):
    """Base of all errors of this project.

    Args:
        message: what is wrong, with the value.
        field: the setting, tensor or batch field it is about, e.g. `mesh.dp` or `rewards`.
        hint: the way out, as one imperative sentence.
        rank: the global rank that raised it; None where no rank is involved (the driver, the command line).
        call: what was being done, e.g. `load` or `train_step`.

    `others` holds what else is wrong with the same settings, or what other ranks said, one sentence each; set by who
    raises it. `ends_rank` says that the process of the rank that it happened on has ended, or ends with it, so that
    that rank's peers wait for it in vain; an error that all ranks raise alike leaves them as they are.
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
        message = printable(message)  # it may quote an environment, a record or a file of somebody else
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = None if hint is None else printable(hint)
        self.rank = rank
        self.call = call

    def __str__(self) -> str:
        where = [f"{name} {value}" for name, value in (("rank", self.rank), ("in", self.call)) if value is not None]
        place = f" ({', '.join(where)})" if where else ""
        # pydantic-style prefix, once: messages often begin with the field already
        head = f"{self.field}: " if self.field and not self.message.startswith(self.field) else ""
        said = f"{head}{self.message}{place}" + (f"; {self.hint}" if self.hint else "")
        return "\n  also ".join([said, *self.others])

    def __reduce__(self) -> tuple[Any, ...]:
        # __dict__ is restored over the fresh instance, so subclasses may carry more attributes
        return (_rebuild, (type(self), self.message, self.__dict__.copy()))


_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})  # Unicode's categories of what is not shown but acts


def printable(text: str, *, kept: str = "\n\t") -> str:
    """The text with an escape such as \\x1b in the place of each control or format character.

    Args:
        kept: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        one.encode("unicode_escape").decode() if unicodedata.category(one) in _ESCAPED and one not in kept else one
        for one in text
    )


def _rebuild(cls: type[SlimeError], message: str, state: dict[str, Any]) -> SlimeError:
    error = cls.__new__(cls, message)  # not cls(message): a subclass's __init__ may take other arguments
    error.__dict__.update(state)
    return error


class ConfigError(SlimeError):
    """A setting, override or YAML file that cannot be honoured."""

    code = "config"
    exit_code = 2


class BatchError(SlimeError):
    """A rollout batch that breaks a rule, found before any rank sees it."""

    code = "batch"
    exit_code = 3


class ModelError(SlimeError):
    """A model folder or architecture that cannot be loaded faithfully."""

    code = "model"
    exit_code = 4


class CheckpointError(SlimeError):
    """A checkpoint that is missing, torn, altered or of another run's shape."""

    code = "checkpoint"
    exit_code = 5


class ResourceError(SlimeError):
    """The machine or cluster cannot give what the run needs."""

    code = "resource"
    exit_code = 6


class StateError(SlimeError):
    """A call that does not fit the present state, e.g. an optimiser step without gradients."""

    code = "state"
    exit_code = 7


class WorkerDied(SlimeError):
    """A rank's process ended."""

    code = "worker_died"
    exit_code = 8
    ends_rank = True


class WorkerHung(SlimeError):
    """A rank did not answer, or did not get on, within its deadline.

    `seconds` is for how long, and `stack` the file with what its threads were doing, where one was written.
    """

    code = "worker_hung"
    exit_code = 9
    seconds: float | None = None
    stack: str | None = None


class PeerFailed(SlimeError):
    """This rank failed only because another one did; the other one's error is the cause."""

    code = "peer_failed"
    exit_code = 10


class SyncError(SlimeError):
    """New weights did not reach a rollout engine whole and in time.

    `is_of_group` says that the broadcast group broke, so that another member of it may be at fault.
    """

    code = "sync"
    exit_code = 11
    is_of_group: bool = False


class EngineError(SlimeError):
    """A rollout engine that cannot do what it is asked, or did something else."""

    code = "engine"
    exit_code = 12


class Interrupted(SlimeError):
    """The run was asked to end by SIGTERM or SIGINT, and can be gone on with."""

    code = "interrupted"
    exit_code = 75  # EX_TEMPFAIL of sysexits.h: not a fault of the run's, try again


def portable(error: Exception) -> Exception:
    """The error, if another process can read it; else a RuntimeError with its type's name, its text and its notes.

    An exception may hold what cannot be pickled, need arguments that pickling does not keep, or be of a class that the
    other process cannot import.
    """
    notes = getattr(error, "__notes__", [])
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error) and getattr(copy, "__notes__", []) == notes:
            return error
    except Exception:  # its own methods run here, and may raise anything
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
    """`reprlib` with YAML's own words where they differ from Python's; it calls `repr_<type name>`."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxtuple = 3, 4, 6, 6
        self.maxstring = self.maxother = 60

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_int(self, value: int, level: int) -> str:
        if value.bit_length() > 200:  # Python refuses to print some thousands of digits
            return f"(an integer of about {int(value.bit_length() * math.log10(2)) + 1} digits)"
        return repr(value)

    def repr_float(self, value: float, level: int) -> str:
        return repr(value) if math.isfinite(value) else {"inf": ".inf", "-inf": "-.inf"}.get(repr(value), ".nan")

    def repr_PosixPath(self, value: Path, level: int) -> str:
        return self.repr1(str(value), level)


class _ShortRepr(_ShortText):
    """Shortens the repr of values to the same bounds."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return repr(value)

    def repr_bool(self, value: bool, level: int) -> str:
        return repr(value)

    def repr_float(self, value: float, level: int) -> str:
        return repr(value)


def short_repr(value: Any) -> str:
    """The value as Python writes it, on one line of bounded length, whatever it is."""
    return " ".join(_ShortRepr().repr(value).split())


def short_text(value: Any) -> str:
    """The value on one line of bounded length, as a YAML file would say it, for error messages."""
    return _ShortText().repr(value)


def byte_text(number: int, *, round_up: bool = False) -> str:
    """So many bytes with one decimal, in the decimal unit that fits; `round_up` where less would not do."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if number >= 1000**power:
            tenths = 10 * number / 1000**power
            return f"{(math.ceil(tenths) if round_up else round(tenths)) / 10:,.1f} {unit}"
    return f"{number} B"
