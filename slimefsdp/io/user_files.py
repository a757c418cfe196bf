"""Files that users name: how their paths are written, and how they are opened and their JSON is read.

Nothing in them may hold up, fill or mislead the process: a pipe without a writer waits, a device has no end, and of a
key that JSON gives twice other readers take another value. `~` and `$VAR` expand in a path wherever one is written,
in settings and on the command line alike; `$$` is a dollar.
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


_NO_DISK = (Path("/proc"), Path("/sys"), Path("/dev"))
_MEMORY_DISK = Path("/dev/shm")


def open_plain(path: str | os.PathLike[str]) -> BinaryIO:
    """The file, open for reading, at once; links are followed.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder. ValueError: a NUL in the path.
    """
    # of a pipe without a writer, another open would wait for one
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
    """All of a file of at most so many bytes.

    Raises:
        OSError: as `open_plain`, or there are more. ValueError: a NUL in the path.
    """
    with open_plain(path) as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes", os.fspath(path))
    return raw


def can_keep_files(folder: Path) -> bool:
    """Whether a folder is none of those that the kernel makes up, whatever permissions say of them.

    Raises:
        OSError, RuntimeError: it is no path, or leads round in a circle.
    """
    place = folder.resolve()
    return place.is_relative_to(_MEMORY_DISK) or not any(place.is_relative_to(path) for path in _NO_DISK)


def refuse_unless_plain(path: Path) -> None:
    """Refuses a path to append to that exists and is no plain file.

    Raises:
        OSError: it is a pipe, a device, a socket or a folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8.

    Numbers are as Python reads them: whole ones of up to 4,300 digits, and NaN. Who computes with them checks them.

    Raises:
        ValueError: in one line; it is no JSON, names a key twice, or is nested deeper than Python can follow.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and dictionaries are inside each other on more than so many levels."""
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
