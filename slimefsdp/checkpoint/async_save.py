"""Saves while training goes on: a thread copies the rank's state before it can change, and writes the copy."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from slimefsdp import heartbeat
from slimefsdp.checkpoint.shards import ShardedTensor
from slimefsdp.errors import PeerFailed, ResourceError, SlimeError


class BackgroundSave:
    """Runs one save at a time on one rank; every rank makes the same calls.

    The thread is not a daemon, so a process that ends without `finish` still waits for its save.

    Args:
        group: all ranks, over gloo. Nothing else uses it, so the thread's collectives never mix with training's.
        pin_memory: page-locks the host buffers, so that CUDA copies to them at full speed.
    """

    def __init__(self, group: dist.ProcessGroup, *, pin_memory: bool = False) -> None:
        self.group = group
        self._pin_memory = pin_memory
        self._buffers: dict[str, torch.Tensor] = {}  # reused: the first use of a page costs more than copying into it
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._running: Future[Path] | None = None
        self.is_lost = False  # the group's collectives no longer match: no save can follow
        self._is_copied = threading.Event()  # the thread reads no tensor that training changes any more
        self._is_copied.set()
        self._moment: torch.cuda.Event | None = None  # marks the call of `start` in the device's work

    def buffers_for(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Returns shares of the same shapes in host memory; the next call hands out the same memory again.

        Raises:
            ResourceError: there is no host memory for them.
        """
        assert self._running is None
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        return {name: replace(tensor, local=self._buffer(name, tensor.local)) for name, tensor in tensors.items()}

    @property
    def host_bytes(self) -> int:
        """The size of the host buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def start(self, write: Callable[[], Path]) -> None:
        """Runs `write`, which calls `copy` first, in the thread; `finish` returns its result or raises its error."""
        assert self._running is None
        if torch.cuda.is_initialized():
            self._moment = torch.cuda.Event()
            self._moment.record()
        self._is_copied.clear()
        try:
            self._running = self._thread.submit(heartbeat.aside()(write))
        except BaseException:
            self._is_copied.set()
            raise
        self._running.add_done_callback(_report_failure)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, ShardedTensor], buffers: Mapping[str, ShardedTensor]) -> None:
        """Fills the buffers with the present values of the tensors; runs in the thread."""
        try:
            device = next((t.local.device for t in tensors.values() if t.local.device.type == "cuda"), None)
            side = None if device is None else torch.cuda.Stream(device)
            with torch.cuda.stream(side):  # None: nothing
                if side is not None and self._moment is not None:
                    side.wait_event(self._moment)
                for name, tensor in tensors.items():
                    buffers[name].local.copy_(tensor.local, non_blocking=True)
            if side is not None:
                side.synchronize()
        finally:
            self._is_copied.set()

    def wait_for_copy(self) -> None:
        """Waits until the state is copied; to be called before it is changed, moved or freed."""
        self._is_copied.wait()

    def finish(self) -> Path | None:
        """Waits for the running save and returns its result; None if no save runs.

        Raises:
            PeerFailed: the ranks did not finish the save together. Also what its `write` raised, once.
        """
        running, self._running = self._running, None
        try:
            with heartbeat.joined():
                return None if running is None else running.result()
        except SlimeError:
            raise
        except Exception as error:
            self.is_lost = True
            raise PeerFailed(
                f"the save in the background did not end: {error}",
                field="checkpoint.async_save",
                hint="look at what ended another rank or held its disk up, then start the group anew",
            ) from error

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
    """Warns at once: a process that ends without `finish` would never report the error."""
    if (error := save.exception()) is not None:
        warnings.warn(f"the save in the background failed: {error}", stacklevel=2)
