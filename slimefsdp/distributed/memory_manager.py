"""Moves a rank's parameters (with gradients), optimiser moments and reference model between device and host memory.

The storages of tensors are copied to host buffers and freed, and later restored; the tensors stay the same objects.
`MemoryManager` has one `StorageOffloader` for each tag.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.collectives import run_together
from slimefsdp.distributed.fsdp import reshard
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError, ResourceError, StateError
from slimefsdp.results import TAGS, Memory, MemoryReport, Tag


class MemoryManager:
    """Moves a rank's memory between device and host by tag, see `results.TAGS`.

    The owner registers models in `models` under their tags, and the optimiser in `optimizer`.

    Args:
        device: the rank's device. Tensors elsewhere, such as on the host under CPU offload, are not moved.
        group: all ranks.
        pin_memory: page-lock the host buffers.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, *, pin_memory: bool = False) -> None:
        self.models: dict[Tag, nn.Module] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._device = device
        self._group = group
        self._offloaders = {tag: StorageOffloader(pin_memory=pin_memory) for tag in TAGS}

    def sleep(self, tags: Sequence[Tag]) -> MemoryReport:
        """Collective: moves the memory of the tags to the host; idempotent.

        Raises:
            ConfigError: there is no such tag.
            ResourceError, StateError: see `StorageOffloader.sleep`; raised on every rank. Each tag is then still
                entirely awake or entirely asleep.
        """
        return self._move(tags, lambda tag: self._offloaders[tag].sleep(self._tensors(tag)))

    def wake_up(self, tags: Sequence[Tag]) -> MemoryReport:
        """Collective: moves the memory of the tags back to the device; idempotent.

        Raises:
            ConfigError: there is no such tag.
            ResourceError: see `StorageOffloader.wake_up`; raised on every rank. Each tag is then still entirely awake
                or entirely asleep.
        """
        return self._move(tags, lambda tag: self._offloaders[tag].wake_up())

    def drop(self, tag: Tag) -> None:
        """Frees the device memory of a model that is no longer used, even if other objects still refer to it."""
        self._offloaders[tag].drop(self._tensors(tag))
        self.models.pop(tag, None)

    @property
    def asleep(self) -> tuple[Tag, ...]:
        return tuple(tag for tag in TAGS if self._offloaders[tag].is_asleep)

    def memory(self) -> Memory:
        parameters, optimizer, reference = (
            sum(storage.nbytes() for storage in distinct_storages(self._tensors(tag))) for tag in TAGS
        )
        return Memory(
            parameters=parameters,
            optimizer=optimizer,
            reference=reference,
            host_buffers=sum(offloader.host_bytes for offloader in self._offloaders.values()),
            asleep=self.asleep,
            **allocator_state(self._device),
        )

    def _move(self, tags: Sequence[Tag], move: Callable[[Tag], MemoryReport]) -> MemoryReport:
        known = _known(tags)
        for model in self.models.values():  # gathered parameters must not outlive their shards, as after an error
            reshard(model)
        reports = run_together(lambda: [move(tag) for tag in known], self._group)
        before, after, on_host, seconds = 0, 0, 0, 0.0
        for report in reports:
            before += report.device_bytes_before
            after += report.device_bytes_after
            on_host += report.host_bytes
            seconds += report.seconds
        return MemoryReport(before, after, on_host, seconds)

    def _tensors(self, tag: Tag) -> list[torch.Tensor]:
        """Returns a tag's tensors on the device: parameters, gradients and buffers, or moments without step counts."""
        tensors: list[torch.Tensor] = []
        if tag in self.models:
            parameters = list(self.models[tag].parameters())
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            tensors = [*parameters, *gradients, *self.models[tag].buffers()]
        elif tag == "optimizer" and self.optimizer is not None:
            states = list(self.optimizer.state.values())
            tensors = [value for state in states for value in state.values() if value.ndim > 0]
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]


def allocator_state(device: torch.device) -> dict[str, int]:
    """Returns the state of torch's CUDA allocator under the field names of `MemoryReport`; zeros on a CPU."""
    if device.type != "cuda":
        return {"device_reserved": 0, "device_allocated": 0, "largest_free_block": 0}
    index = torch.cuda.current_device() if device.index is None else device.index
    free = [0]
    if torch.cuda.get_allocator_backend() == "native":  # other allocators cannot list their blocks
        free += [
            block["size"]
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == index
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]
    return {
        "device_reserved": torch.cuda.memory_reserved(device),
        "device_allocated": torch.cuda.memory_allocated(device),
        "largest_free_block": max(free),
    }


def memory_in_use(device: torch.device) -> tuple[int, int]:
    """Returns the bytes in use now and at their peak, as in `Health`.

    Does not wait for the device, and is safe in any thread.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    now, peak = _proc_bytes("/proc/self/status", "VmRSS", "VmHWM")
    return now, peak


def _proc_bytes(file: str, *names: str) -> list[int]:
    """Returns the values of these entries of a file in /proc, converted from kB to bytes."""
    lines = dict(line.split(":", 1) for line in Path(file).read_text().splitlines() if ":" in line)
    return [1024 * int(lines[name].split()[0]) for name in names]


def forget_peak_memory(device: torch.device) -> None:
    """Resets the peak of CUDA's allocator; the peak of a process on the CPU cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _known(tags: Sequence[Tag]) -> list[Tag]:
    for tag in tags if isinstance(tags, list | tuple) else (tags,):
        if tag not in TAGS:
            raise ConfigError(f"{tag!r} is not a tag", field="tags", hint=f"use some of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]


# ---------------------------------------------------------------------- offloading

# torch page-locks blocks of powers of two, and locks many blocks slowly; so chunks are large and powers of two
CHUNK_BYTES = 64 * 2**20
FINE_BYTES = 2**20  # upper limit of the memory that the last chunk leaves unused


class HostBuffers:
    """Holds reusable host memory, a sequence of bytes in chunks that only grows.

    Chunk sizes are powers of two, at most `chunk_bytes`.
    """

    def __init__(self, *, pin_memory: bool, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._pin_memory = pin_memory
        self._chunk_bytes = chunk_bytes
        self._chunks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def grow_to(self, nbytes: int) -> None:
        """Allocates chunks until there are `nbytes`; chunks allocated before a MemoryError or RuntimeError remain."""
        while (missing := nbytes - self.nbytes) > 0:
            last = 1 << (missing - 1).bit_length()  # the smallest chunk with all missing bytes
            size = min(self._chunk_bytes, last if last <= FINE_BYTES else 1 << (missing.bit_length() - 1))
            self._chunks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin_memory))

    def views(self, sizes: Iterable[int]) -> Iterator[list[torch.Tensor]]:
        """Yields the next `size` bytes for each size, as a list of pieces; each piece lies in one chunk."""
        rest = iter(self._chunks)
        free = torch.empty(0, dtype=torch.uint8)
        for size in sizes:
            pieces = []
            while size > 0:
                if not len(free):
                    free = next(rest)
                piece, free = free[:size], free[size:]
                pieces.append(piece)
                size -= len(piece)
            yield pieces


class StorageOffloader:
    """Moves the storages of one set of tensors between device and host.

    Args:
        pin_memory: page-lock the host memory, so that CUDA copies run at full speed and asynchronously.
        chunk_bytes: largest chunk of host memory, a power of two.
    """

    def __init__(self, *, pin_memory: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._host_buffers = HostBuffers(pin_memory=pin_memory, chunk_bytes=chunk_bytes)
        self._asleep: list[tuple[torch.UntypedStorage, int]] = []  # storages and sizes, in the host buffers' order

    @property
    def is_asleep(self) -> bool:
        return bool(self._asleep)

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of host memory, which is kept between sleeps."""
        return self._host_buffers.nbytes

    def sleep(self, tensors: Iterable[torch.Tensor]) -> MemoryReport:
        """Copies every distinct storage to the host and frees it; returns when the device memory is free.

        Does nothing if already asleep.

        Raises:
            ResourceError: the host has not enough memory; everything stays awake.
            StateError: a tensor shares its memory with another library; everything stays awake.
        """
        start = time.perf_counter()
        if self.is_asleep:
            return MemoryReport(0, 0, self.host_bytes, 0.0)
        sized = [(storage, storage.nbytes()) for storage in distinct_storages(tensors)]
        total = sum(size for _, size in sized)
        if not all(storage.resizable() for storage, _ in sized):
            raise StateError(
                "sleep() cannot free memory that is shared with numpy or another owner",
                field="tags",
                hint="clone a tensor before numpy sees it",
            )
        _allocate(
            lambda: self._host_buffers.grow_to(total), f"{total:,} bytes are needed on the host", _ROOM_ON_THE_HOST
        )
        self._copy(sized, to_host=True)
        self._asleep = sized  # set before anything is freed, so that wake_up can undo a failure from here on
        for storage, _ in sized:
            storage.resize_(0)
        give_back_free_memory()
        return MemoryReport(total, 0, self.host_bytes, time.perf_counter() - start)

    def wake_up(self) -> MemoryReport:
        """Moves everything back to the device; does nothing if awake.

        Raises:
            ResourceError: the device has not enough memory; everything stays asleep.
        """
        start = time.perf_counter()
        total = sum(size for _, size in self._asleep)

        def allocate() -> None:
            for storage, size in self._asleep:
                storage.resize_(size)

        try:
            _allocate(allocate, f"{total:,} bytes are needed on the device", _ROOM_ON_THE_DEVICE)
            self._copy(self._asleep, to_host=False)
        except Exception:
            for storage, _ in self._asleep:
                storage.resize_(0)
            give_back_free_memory()
            raise
        self._asleep = []
        return MemoryReport(0, total, self.host_bytes, time.perf_counter() - start)

    def drop(self, tensors: Iterable[torch.Tensor]) -> None:
        """Frees tensors that are no longer needed, awake or asleep; keeps the host memory for later sleeps."""
        for storage in distinct_storages(tensors):
            if storage.resizable():
                storage.resize_(0)
        self._asleep = []

    def _copy(self, sized: list[tuple[torch.UntypedStorage, int]], *, to_host: bool) -> None:
        """Copies all storages to or from the host, and returns when every copy is complete."""
        device = next((storage.device for storage, _ in sized if storage.device.type == "cuda"), None)
        side = None if device is None else torch.cuda.Stream(device)
        if side is not None:
            # pending work of the current stream may still compute the source, or read the memory that is overwritten
            side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # does nothing with None
            for (storage, _), pieces in zip(sized, self._host_buffers.views(size for _, size in sized), strict=True):
                rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                for piece in pieces:
                    device_piece, rest = rest[: len(piece)], rest[len(piece) :]
                    target, source = (piece, device_piece) if to_host else (device_piece, piece)
                    target.copy_(source, non_blocking=True)
        if device is not None:
            torch.cuda.synchronize(device)  # all streams, because gathers may still read memory that is freed next


_ROOM_ON_THE_HOST = "sleep fewer tags, start fewer ranks on this machine, or give it more memory"
_ROOM_ON_THE_DEVICE = "let what shares the device free its memory first, such as an engine, then call again"


def _allocate(action: Callable[[], None], need: str, hint: str) -> None:
    try:
        action()
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError or a subclass on a CPU and on CUDA
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ResourceError(f"{need}: {reason}", field="tags", hint=hint) from error


def prefer_expandable_segments(device: torch.device) -> None:
    """Makes CUDA's caching allocator use expandable segments, so that sleeping tags do not fragment memory.

    Must be called before a rank's first allocation. Does nothing if the environment configures the allocator.
    """
    if device.type != "cuda" or {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    # torch 2.13 deprecates the earlier function
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    configure("expandable_segments:True")


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of a rank's device, or on CPUs the machine's free memory / the number of all ranks."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return _proc_bytes("/proc/meminfo", "MemAvailable")[0] // (dist.get_world_size() if dist.is_initialized() else 1)


def distinct_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = local_shard(tensor).detach().untyped_storage()
        if storage.nbytes():
            storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def give_back_free_memory() -> None:
    """Returns unused memory of torch's and the C library's allocators to the system."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)
