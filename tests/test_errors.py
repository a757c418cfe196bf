"""Typed errors: they survive process borders whole, and say field, value, place and way out."""

from __future__ import annotations

import copy
import errno
import pickle
import threading

import pytest
import ray.cloudpickle
import typer

from actors.cli import main as cli
from slimefsdp import errors
from slimefsdp.errors import ConfigError, SlimeError, portable


def subclasses(cls: type[SlimeError]) -> list[type[SlimeError]]:
    return [found for sub in cls.__subclasses__() for found in (sub, *subclasses(sub))]


PUBLIC = [SlimeError, *(cls for cls in subclasses(SlimeError) if cls.__module__ == errors.__name__)]


class WithOwnArguments(SlimeError):
    """A subclass whose constructor is not its base's."""

    def __init__(self, missing: list[str], count: int) -> None:
        super().__init__(f"{count} missing", field="weights")
        self.missing = missing


def copies(error: SlimeError) -> list[SlimeError]:
    pickled = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    return [*pickled, ray.cloudpickle.loads(ray.cloudpickle.dumps(error)), copy.copy(error), copy.deepcopy(error)]


def test_the_list_of_errors_is_complete():
    declared = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SlimeError)]
    assert set(PUBLIC) == set(declared) and len(PUBLIC) >= 11


@pytest.mark.parametrize("cls", PUBLIC)
def test_a_copy_in_another_process_keeps_type_attributes_and_text(cls):
    error = cls("mesh.dp=3 is odd", field="mesh.dp", hint="use 4", rank=2, call="load")
    error.step = 7  # what a caller adds travels too
    error.ends_rank = not cls.ends_rank
    error.add_note("seen on the driver")
    for twin in copies(error):
        assert type(twin) is cls and twin is not error
        assert vars(twin) == vars(error) and twin.args == error.args == ("mesh.dp=3 is odd",)
        assert str(twin) == str(error) and twin.exit_code == cls.exit_code and twin.code == cls.code


def test_what_a_terminal_would_obey_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "it said \x1b]0;title\x07\x00\x9b2J\r\u202e and\tgoes on\nbelow"
    error = SlimeError(hostile, hint=f"see {hostile}")
    assert cli.report(error) == SlimeError.exit_code
    for text in (str(error), capsys.readouterr().err):
        assert "\\x1b" in text and not set("\x1b\x07\x00\x9b\r\u202e") & set(text)
    assert "\tgoes on\nbelow" in error.message


def test_a_subclass_with_its_own_constructor_is_rebuilt_without_calling_it():
    for twin in copies(WithOwnArguments(["a", "b"], 2)):
        assert type(twin) is WithOwnArguments and twin.missing == ["a", "b"]
        assert str(twin) == "weights: 2 missing"


def test_what_else_is_wrong_travels_and_is_listed_below():
    error = ConfigError("a=1 must be text", field="a", hint="put it in quotes")
    error.others = ("b is required and not set; add it",)
    for twin in [error, *copies(error)]:
        assert str(twin) == "a=1 must be text; put it in quotes\n  also b is required and not set; add it"


def ending_with(error: Exception) -> int:
    """The exit status of a program of one command, which ends with an error."""
    program = typer.Typer()

    @program.command()
    def fail() -> None:
        raise error

    return cli.run_typer(program, "program", ["--"])


@pytest.mark.parametrize("cls", PUBLIC)
def test_the_command_line_prints_a_few_lines_and_ends_with_the_types_status(cls, capsys):
    text = "the cause\n" + "  at some place, \n" * 300
    error = cls(text, field="mesh.dp", hint="use 4", rank=2, call="load")
    error.others = ("rank 0: the same",)
    error.add_note("Traceback (most recent call last): of the rank")
    assert ending_with(error) == cls.exit_code
    printed = capsys.readouterr().err
    first, where, field, hint, other = printed.splitlines()
    assert first.startswith(f"error [{cls.code}]: the cause") and len(first) < 1500 and "--debug" in first
    assert "rank 2" in where and "load" in where
    assert "mesh.dp" in field and "use 4" in hint and "rank 0: the same" in other


class NeedsTwo(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


class Holds(Exception):
    def __init__(self, what: object) -> None:
        super().__init__("it holds something")
        self.what = what


class DropsNotes(Exception):
    def __reduce__(self):
        return (type(self), self.args)


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Local:
    class Inner(Exception):
        pass


def local_class() -> Exception:
    class OfAFunction(Exception):
        pass

    return OfAFunction("defined inside")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NeedsTwo("a", "b"), "NeedsTwo: a and b"),
        (Holds(threading.Lock()), "Holds: it holds something"),
        (Holds(lambda: 1), "Holds: it holds something"),
        (DropsNotes("kept"), "DropsNotes: kept"),
        (Unreadable(), "Unreadable: (it has no text)"),
        (local_class(), "local_class.<locals>.OfAFunction: defined inside"),
    ],
)
def test_what_pickling_loses_of_an_error_travels_as_text_with_its_notes(error, text):
    error.add_note("where it was")
    found = pickle.loads(pickle.dumps(portable(error)))
    assert type(found) is RuntimeError and str(found) == text and found.__notes__ == ["where it was"]


@pytest.mark.parametrize(
    "error", [KeyError("a"), OSError(28, "No space left"), Local.Inner("x"), Holds(3), SlimeError("y")]
)
def test_an_error_that_pickling_keeps_stays_itself(error):
    error.add_note("where it was")
    assert portable(error) is error


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_that_nobody_has_put_into_words_is_a_resource_error_all_the_same(number, capsys):
    assert ending_with(OSError(number, "no room", "curves.png")) == errors.ResourceError.exit_code
    assert "curves.png: no room" in capsys.readouterr().err
