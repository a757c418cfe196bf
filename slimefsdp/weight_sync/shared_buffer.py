"""Shares memory with other processes of this machine: on the host, or on a CUDA device by its IPC handles.

Workers of rollout servers, which have their own environment, import this module, so it may import only torch. Handles
are JSON values. Memory on the host has no name in any file system, so it is freed with the last process that has it
open, however that process ends.
"""

from __future__ import annotations

import mmap
import os
import uuid
from pathlib import Path
from typing import Any

import torch

Handle = dict[str, Any]


class SharedBuffer:
    """Allocates memory, [bytes] uint8 in `data`, that other processes can open by `handle` while this object lives."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data: torch.Tensor
        self.handle: Handle
        self._descriptor: int | None = None
        if device.type == "cuda":
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self.handle = _cuda_handle(self.data)
            return
        name = f"slimefsdp_{uuid.uuid4().hex}"
        self._descriptor = os.memfd_create(name)
        os.ftruncate(self._descriptor, nbytes)
        self.data = torch.frombuffer(mmap.mmap(self._descriptor, nbytes), dtype=torch.uint8)
        self.handle = {"name": name, "pid": os.getpid(), "descriptor": self._descriptor, "bytes": nbytes}

    def close(self) -> None:
        """Prevents further opening; idempotent. The memory is freed when no process uses it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def opened(handle: Handle) -> torch.Tensor:
    """Returns another process's memory, [bytes] uint8, for reading.

    Raises:
        OSError: the memory is not on this machine or GPU, or has been freed.
    """
    if "gpu" in handle:
        return _opened_on_cuda(handle)
    link = Path(f"/proc/{handle['pid']}/fd/{handle['descriptor']}")
    if not link.is_symlink() or f"/memfd:{handle['name']} " not in str(link.readlink()):
        raise OSError(f"process {handle['pid']} with memory {handle['name']} is not on this machine")
    descriptor = os.open(link, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(descriptor, handle["bytes"]), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class OpenedBuffers:
    """Caches opened memory of other processes; a sender alternates between two buffers."""

    def __init__(self) -> None:
        self._opened: dict[str, torch.Tensor] = {}

    def get(self, handle: Handle) -> torch.Tensor:
        key = repr(sorted(handle.items()))
        if key not in self._opened:
            while len(self._opened) > 1:
                del self._opened[next(iter(self._opened))]
            self._opened[key] = opened(handle)
        return self._opened[key]


def _gpu_name(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _cuda_handle(data: torch.Tensor) -> Handle:
    # the values that torch.multiprocessing sends for a tensor, without pickling
    device, *parts = data.untyped_storage()._share_cuda_()
    return {
        "gpu": _gpu_name(device),
        "bytes": data.numel(),
        "parts": [part.hex() if isinstance(part, bytes) else part for part in parts],
        "are_hex": [isinstance(part, bytes) for part in parts],
        "offset": data.storage_offset(),
    }


def _opened_on_cuda(handle: Handle) -> torch.Tensor:
    indices = [index for index in range(torch.cuda.device_count()) if _gpu_name(index) == handle["gpu"]]
    if not indices:
        raise OSError(f"GPU {handle['gpu']} of the sender is not this process's")
    parts = [
        bytes.fromhex(part) if is_hex else part for part, is_hex in zip(handle["parts"], handle["are_hex"], strict=True)
    ]
    try:
        storage = torch.UntypedStorage._new_shared_cuda(indices[0], *parts)
    except RuntimeError as error:
        raise OSError(f"the sender's memory cannot be opened: {error}") from error
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return whole[handle["offset"] : handle["offset"] + handle["bytes"]]
