"""Calls a function before and after each disk operation of a save, so that tests can end a process at any of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")


def watch_disk(passed: Callable[[str], object]) -> Callable[[], None]:
    """Has `passed` called with points such as "before rename .tmp_step", without the numbers of steps.

    The middle of a file of tensors is a point, too: "half of the tensors are written".

    Returns:
        What ends it.
    """
    from slimefsdp.io.safetensors_file import TensorFileWriter

    real: dict[str, Any] = {name: getattr(os, name) for name in OPERATIONS}
    start, write = TensorFileWriter.__init__, TensorFileWriter.write

    def watched(name: str) -> Callable[..., Any]:
        def operation(target: Any, *args: Any, **kwargs: Any) -> Any:
            point = f"{name} {_name_of(target)}"
            passed(f"before {point}")
            result = real[name](target, *args, **kwargs)
            passed(f"after {point}")
            return result

        return operation

    def watched_start(writer: Any, path: Path, specs: Any, **how: Any) -> None:
        writer.half = len(specs) // 2
        start(writer, path, specs, **how)

    def watched_write(writer: Any, name: str, tensor: Any) -> None:
        if writer.half == 0:
            passed("half of the tensors are written")
        writer.half -= 1
        write(writer, name, tensor)

    def end() -> None:
        for name, function in real.items():
            setattr(os, name, function)
        TensorFileWriter.__init__, TensorFileWriter.write = start, write  # type: ignore[method-assign]

    for name in OPERATIONS:
        setattr(os, name, watched(name))
    TensorFileWriter.__init__, TensorFileWriter.write = watched_start, watched_write  # type: ignore[assignment,method-assign]
    return end


def _name_of(target: Any) -> str:
    path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
    return re.sub(r"_\d{8}$", "", path.name)
