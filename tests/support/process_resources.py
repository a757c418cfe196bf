"""What a process holds of the machine, for tests and benchmarks that look for leaks."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def held_by_the_process() -> dict[str, int]:
    """Resident bytes, open files and threads, without what Python and the C library could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that they keep is no leak
    return held_by("self")


def held_by(process: int | str) -> dict[str, int]:
    """Resident bytes, open files and threads of any process, by its id, as they are."""
    folder = Path("/proc", str(process))
    pages = int((folder / "statm").read_text().split()[1])
    files, threads = (len(list((folder / name).iterdir())) for name in ("fd", "task"))
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": files, "threads": threads}


def unnamed_files(folder: Path) -> list[int]:
    """The open files of this process that were made in a folder and have no name there."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
        if target.startswith(f"{folder.resolve()}/") and target.endswith(" (deleted)"):
            found.append(int(descriptor.name))
    return sorted(found)


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """The kernel refuses to make a file of this process longer, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
