"""Files that somebody names, opened so that none can hold up or fill the process: a pipe waits, a device has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

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
    """For a file that will be appended to: it is one, or there is none yet.

    Raises:
        OSError: it is a pipe, a device, a socket or a folder.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
