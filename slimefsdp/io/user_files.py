"""Expands paths that users write, opens the files at these paths, and parses JSON.

The files are untrusted: a pipe without a writer would block, a device has no end, and JSON with a duplicate key means
different things to different readers. `~` and `$VAR` are expanded in all paths, in settings and on the command line;
`$$` means a dollar sign.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import reprlib
import stat
from pathlib import Path
from typing import Any, BinaryIO

from slimefsdp.errors import short_repr

_VARIABLE = re.compile(r"\$(\w+|\{[^}]*\})", re.ASCII)  # the syntax of os.path.expandvars

_MOST_BYTES, _MOST_CHARACTERS = 255, 4000  # Linux's limits on a name and on a whole path


class NoPath(ValueError):
    """Says that a text is not a usable path: `rule` is the reason, and `hint` the way out."""

    def __init__(self, rule: str, hint: str) -> None:
        super().__init__(f"{rule}: {hint}")
        self.rule, self.hint = rule, hint


def path_of(text: Any) -> Path:
    """Returns the path that a text names, with `~` and environment variables expanded.

    Raises:
        NoPath: `text` is not a str, is too long for a file system, or names an unset variable or the home of an unknown
            user. Shell syntax and URLs are refused too, because they would become oddly named local folders.
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
    """Returns the path if a file system can have it.

    Raises:
        NoPath: the path has a NUL or half a surrogate pair, or is too long, as a whole or in one name.
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
    """Returns `path_of(text)`, as the type of an argparse argument; errors have the hint on a line of its own."""
    try:
        return path_of(text)
    except NoPath as error:
        raise argparse.ArgumentTypeError(f"{short_repr(text)} {error.rule}\n{error.hint}") from None


_NO_DISK = (Path("/proc"), Path("/sys"), Path("/dev"))
_MEMORY_DISK = Path("/dev/shm")


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a plain file for reading, without blocking; follows links.

    Raises:
        OSError: the path cannot be opened, or is a pipe, device, socket or folder. ValueError: the path has a NUL.
    """
    # an ordinary open of a pipe without a writer would block
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Reads a whole file of at most `most_bytes`.

    Raises:
        OSError: see `open_plain`; or the file is larger. ValueError: the path has a NUL.
    """
    with open_plain(path) as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", os.fspath(path))
    return raw


def can_keep_files(folder: Path) -> bool:
    """Returns whether a folder is on a disk or in memory, and not in a file system of the kernel such as /proc.

    Raises:
        OSError, RuntimeError: `folder` is no possible path, or a loop of links.
    """
    resolved = folder.resolve()
    return resolved.is_relative_to(_MEMORY_DISK) or not any(resolved.is_relative_to(path) for path in _NO_DISK)


def refuse_unless_plain(path: Path) -> None:
    """Checks that a path is a plain file or does not exist, so that a file there can be appended to.

    Raises:
        OSError: the path is a pipe, device, socket or folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


def parse_json(text: str | bytes) -> Any:
    """Parses a JSON text; bytes are UTF-8.

    Python's numbers are accepted, including NaN and integers of up to 4,300 digits, so callers must check numbers.

    Raises:
        ValueError: the text is not JSON, has a key twice, or is nested too deeply; the message is one line.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def is_deeper(value: Any, levels: int) -> bool:
    """Returns whether lists and dictionaries are nested more than `levels` deep."""
    level = [value]
    for _ in range(levels):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
        if not level:
            return False
    return True


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {reprlib.repr(key)} occurs twice")
        result[key] = value
    return result
