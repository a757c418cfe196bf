"""Saving while training goes on: a copy of the rank's state is taken at once, a thread writes it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from slimefsdp.checkpoint.sharded import ShardedTensor
from slimefsdp.errors import ResourceError


class BackgroundSave:
    """One save at a time on one rank; every rank makes the same calls.

    The thread is no daemon: a process that ends without `finish` still waits for its save.

    Args:
        group: all ranks, over gloo, used by nothing else: the thread's collectives never mix with training's.
        pin_memory: page-lock the host buffers, so that CUDA copies to them at full speed.
    """

    def __init__(self, group: dist.ProcessGroup, *, pin_memory: bool = False) -> None:
        self.group = group
        self._pin_memory = pin_memory
        self._buffers: dict[str, torch.Tensor] = {}  # kept: a page's first use costs more than copying into it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._running: Future[Path] | None = None

    def copies(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """The same shares in host buffers, which the next call overwrites.

        Raises:
            ResourceError: there is no host memory for them.
        """
        assert self._running is None
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        copies = {
            name: replace(tensor, local=self._buffer(name, tensor.local).copy_(tensor.local, non_blocking=True))
            for name, tensor in tensors.items()
        }
        if any(tensor.local.device.type == "cuda" for tensor in tensors.values()):
            torch.cuda.synchronize()
        return copies

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def start(self, write: Callable[[], Path]) -> None:
        """Runs `write` in the thread; `finish` has its result or error."""
        assert self._running is None
        self._running = self._thread.submit(write)
        self._running.add_done_callback(_report_failure)

    def finish(self) -> Path | None:
        """Waits for the save that runs; what it returned, None if there is none. Its error is raised, once."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            try:
                buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pin_memory)
            except RuntimeError as error:
                raise ResourceError(
                    f"there is no host memory for a copy of {name} ({like.nbytes} bytes): {error}",
                    field="checkpoint.async_save",
                    hint="set checkpoint.async_save=false, or spread the state over more ranks",
                ) from error
            self._buffers[name] = buffer
        return buffer


def _report_failure(save: Future[Path]) -> None:
    """Said at once, because a process that ends without `finish` would not say it at all."""
    if (error := save.exception()) is not None:
        warnings.warn(f"the save in the background failed: {error}", stacklevel=2)
