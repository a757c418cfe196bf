"""Sleep and wake: the memory behind tensors goes to host buffers and comes back, the tensors stay the same objects."""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from slimefsdp.reports import MemoryReport


class Sleeper:
    """Moves the storages of one set of tensors between device and reusable host buffers.

    Args:
        pin_memory: page-lock the buffers, so that CUDA copies to and from them at full speed, without waiting.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin_memory = pin_memory
        self._asleep: dict[int, tuple[torch.UntypedStorage, int]] = {}  # position -> storage and its size
        self._host: dict[int, torch.Tensor] = {}  # kept between sleeps: pinning memory is slow

    @property
    def is_asleep(self) -> bool:
        """Whether any storage is on the host."""
        return bool(self._asleep)

    def sleep(self, tensors: Iterable[torch.Tensor]) -> MemoryReport:
        """Copies every distinct storage to the host and frees it; returns when the memory is really free."""
        start = time.perf_counter()
        if self.is_asleep:
            return MemoryReport(0, 0, self.host_bytes, 0.0)
        storages = _distinct_storages(tensors)
        before = sum(storage.nbytes() for storage in storages)
        for position, storage in enumerate(storages):
            size = storage.nbytes()
            if size == 0:
                continue
            self._asleep[position] = (storage, size)
            self._host_buffer(position, size).copy_(_as_bytes(storage), non_blocking=True)
        _synchronize(storages)
        for storage, _ in self._asleep.values():
            storage.resize_(0)
        if any(storage.device.type == "cuda" for storage in storages):
            torch.cuda.empty_cache()
        after = sum(storage.nbytes() for storage in storages)
        return MemoryReport(before, after, self.host_bytes, time.perf_counter() - start)

    def wake_up(self) -> MemoryReport:
        """Brings everything back; nothing happens when nothing sleeps."""
        start = time.perf_counter()
        storages = [storage for storage, _ in self._asleep.values()]
        for position, (storage, size) in self._asleep.items():
            storage.resize_(size)
            _as_bytes(storage).copy_(self._host[position], non_blocking=True)
        _synchronize(storages)
        self._asleep.clear()
        after = sum(storage.nbytes() for storage in storages)
        return MemoryReport(0, after, self.host_bytes, time.perf_counter() - start)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host buffers, which stay between sleeps."""
        return sum(buffer.nbytes for buffer in self._host.values())

    def _host_buffer(self, position: int, size: int) -> torch.Tensor:
        buffer = self._host.get(position)
        if buffer is None or buffer.numel() != size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory)
            self._host[position] = buffer
        return buffer


def _distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.detach().untyped_storage()
        storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _synchronize(storages: list[torch.UntypedStorage]) -> None:
    if any(storage.device.type == "cuda" for storage in storages):
        torch.cuda.synchronize()
