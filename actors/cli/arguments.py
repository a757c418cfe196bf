"""Defines arguments that several commands take, and parsers of single arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import typer

from slimefsdp.errors import short_repr
from slimefsdp.io.user_files import NoPath, path_of


def path(text: str) -> Path:
    """Returns the path that an argument names, with `~` and `$VAR` expanded."""
    try:
        return path_of(text)
    except NoPath as error:
        raise typer.BadParameter(f"{short_repr(text)} {error.rule}; {error.hint}") from None


def path_as_written(text: str) -> str:
    """Checks an argument as `path` does, but returns the text unchanged, since it may be a hub id and not a path."""
    path(text)
    return text


def one_of(choices: Collection[str]) -> Callable[[str], str]:
    """Returns a parser that accepts only these choices."""

    def choice(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{short_repr(text)} is not one of {', '.join(choices)}")
        return text

    return choice


Config = Annotated[Path, typer.Argument(parser=path, metavar="CONFIG", help="YAML file of settings.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="SECTION.NAME=VALUE", help="Settings that replace those of the file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Address = Annotated[str, typer.Option(help="Address of the Ray cluster, as in cluster.address.")]
AllowWithoutToken = Annotated[bool, typer.Option("--allow-without-token", help="As cluster.allow_without_token.")]


def examples(*lines: str) -> str:
    """Returns the text with examples at the end of a command's help."""
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])
