"""An embedded engine whose process ends in the middle of an update, when a file says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from typing import Any

from actors.engines.embedded import EmbeddedEngine
from actors.engines.protocol import Manifest, TensorInfo


class TroubledEngine(EmbeddedEngine):
    """One whose index and call are in the file `trouble` of `run.dir` takes them from there, and is killed."""

    def begin(self, version: int, manifest: Manifest, kept: Collection[str] = ()) -> None:
        super().begin(version, manifest, kept)
        self._end_if_told("begin")

    def receive(self, bucket: Any) -> None:
        self._end_if_told("receive")
        super().receive(bucket)

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        self._end_if_told("receive")
        super().receive_broadcast(tensors, digest)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        self._end_if_told("receive")
        super().receive_ipc(handle, tensors, digest)

    def receive_disk(self, path: str) -> None:
        self._end_if_told("receive")
        super().receive_disk(path)

    def commit(self, version: int) -> None:
        self._end_if_told("commit")
        super().commit(version)

    def _end_if_told(self, call: str) -> None:
        assert self.config.run.dir is not None
        file = self.config.run.dir / "trouble"
        if file.exists() and file.read_text() == f"{self.index} {call}":
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
