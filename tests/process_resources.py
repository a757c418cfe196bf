"""What a process holds of the machine, for tests and benchmarks that look for leaks."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def held_by_the_process() -> dict[str, int]:
    """Resident bytes, open files and threads, without what Python and the C library could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that they keep is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = (len(list(Path("/proc/self", name).iterdir())) for name in ("fd", "task"))
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": files, "threads": threads}
