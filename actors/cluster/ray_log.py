"""Writes Ray's messages, and the output of ranks and engines, to a file instead of the terminal."""

from __future__ import annotations

import importlib
import logging
import re
import time
from pathlib import Path
from typing import Any, TextIO

RAY_LOG = "ray.log"
_PRINT = "print_to_stdstream"  # not public, but Ray prints all output of other processes through it
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RayMessages:
    """Receives what Ray would print in this process, until `close`; make it before `ray.init`.

    Output of the job's processes is included if Ray is started with log_to_driver=True.

    Args:
        path: the file to append to; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._worker: Any = importlib.import_module("ray._private.worker")
        self._printed_before = getattr(self._worker, _PRINT)
        setattr(self._worker, _PRINT, self._write)
        self._logger = logging.getLogger("ray")
        self._handlers_before = list(self._logger.handlers)
        handler = logging.StreamHandler(self._file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._logger.handlers[:] = [handler]

    def close(self) -> None:
        """Lets Ray print again."""
        setattr(self._worker, _PRINT, self._printed_before)
        self._logger.handlers[:] = self._handlers_before
        self._file.close()

    def _write(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        """Writes a message of Ray: the lines, and the process that printed them."""
        if data["pid"] == "autoscaler":  # prints a table of nodes every few seconds
            return
        name = data.get("actor_name") or data.get("task_name") or ""
        who = f"{name} pid={data['pid']}".strip() if isinstance(data["pid"], int) else str(data["pid"])
        now = time.strftime("%H:%M:%S")
        text = "".join(f"{now} ({who}) {_COLOURS.sub('', line)}\n" for line in data["lines"])
        try:
            self._file.write(text)
        except (OSError, ValueError):  # the disk is full or the file closed, which must not end Ray's thread
            return
