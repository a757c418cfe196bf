"""Paths as users write them, in settings and on the command line alike: `~` and `$VAR` expand, `$$` is a dollar."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any

from slimefsdp.errors import short_repr

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)  # as os.path.expandvars finds them

_MOST_BYTES, _MOST_CHARACTERS = 255, 4000  # of one name, of a whole path; Linux takes no more


class NoPath(ValueError):
    """What was written leads nowhere; `rule` says why, `hint` the way out."""

    def __init__(self, rule: str, hint: str) -> None:
        super().__init__(f"{rule}: {hint}")
        self.rule, self.hint = rule, hint


def path_of(text: Any) -> Path:
    """The path that a text names, with `~` and variables of the environment expanded.

    Raises:
        NoPath: it is no text, names a variable that is not set, or the home of an unknown user; or has what a shell
            would replace, or begins like the address of a store elsewhere: as paths they would be odd folders here; or
            is longer than file systems take.
    """
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise NoPath("must be a path", "write the path of a file or folder")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]*://", text):
        raise NoPath("is an address, not a path of this machine", "copy or mount it, and write the path of that")
    parts = text.split("$$")
    names = [name.strip("{}") for part in parts for name in _VARIABLE.findall(part)]
    unset = [name for name in names if name not in os.environ]
    if unset:
        raise NoPath(f"names the variable {unset[0]}, which is not set", "set and export it, or write $$ for a $")
    if any(re.search(r"\$[{(]", _VARIABLE.sub("", part)) for part in parts):
        raise NoPath("has a $ that only a shell could replace", "write the path out, or $$ for a $")
    try:
        path = Path("$".join(map(os.path.expandvars, parts))).expanduser()
    except RuntimeError:
        raise NoPath("begins with the home of an unknown user", "write the path out") from None
    return possible(path)


def possible(path: Path) -> Path:
    """The path, if a file system can have it.

    Raises:
        NoPath: it holds a NUL or half a character, or a name of it, or all of it, is too long.
    """
    try:
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
    except UnicodeEncodeError:
        raise NoPath("holds half a character, which no name does", "write the character itself") from None
    if "\0" in str(path):
        raise NoPath("must be a path", "write the path of a file or folder")
    if len(str(path)) > _MOST_CHARACTERS or longest > _MOST_BYTES:
        raise NoPath(f"has a name of more than {_MOST_BYTES} bytes, or is too long as a whole", "shorten it")
    return path


def path_argument(text: str) -> Path:
    """`path_of` as the type of an argument of argparse, whose message has the hint on a line of its own."""
    try:
        return path_of(text)
    except NoPath as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} {error.rule}\n{error.hint}") from None
