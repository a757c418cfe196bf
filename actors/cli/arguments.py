"""Arguments that several commands share, and how paths and choices on the command line are read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from slimefsdp.errors import short_repr
from slimefsdp.io.user_files import NoPath, path_of


class WrongValue(typer.BadParameter):
    """A value that an argument does not take, with the way out; typer adds which argument it is."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def path(text: str) -> Path:
    """Returns the path that a word of the command line names, with `~` and `$VAR` expanded."""
    try:
        return path_of(text)
    except NoPath as error:
        raise WrongValue(f"{short_repr(text)} {error.rule}", error.hint) from None


def path_as_written(text: str) -> str:
    """Returns the word itself, once `path` has taken it: an id on the hub must not become a path."""
    path(text)
    return text


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Returns a reader of words that takes these alone, and names the nearest one for another."""

    def choice(text: str) -> str:
        if text in choices:
            return text
        near = difflib.get_close_matches(text, choices, n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(choices)}"
        raise WrongValue(f"{short_repr(text)} is not one of {', '.join(choices)}", hint)

    return choice


Config = Annotated[Path, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.NAME=VALUE", help="Settings on top of those of the file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Address = Annotated[str, typer.Option(help="Address of the Ray cluster, as in cluster.address.")]
AllowWithoutToken = Annotated[bool, typer.Option("--allow-without-token", help="As cluster.allow_without_token.")]
