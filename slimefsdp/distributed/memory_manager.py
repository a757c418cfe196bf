"""Which parts of a rank's state are on the device: parameters (with their gradients), moments, reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.consensus import run_together
from slimefsdp.distributed.fsdp import reshard
from slimefsdp.distributed.offload import StorageOffloader, distinct_storages
from slimefsdp.errors import ConfigError
from slimefsdp.results import TAGS, Memory, MemoryReport, Tag


class MemoryManager:
    """Sleep and wake-up by tag.

    What each tag stands for is set by who makes it; a tag without anything has nothing to move.

    Args:
        device: of the rank. What lies elsewhere, on the host under CPU offload, is where a sleep would put it.
        group: all ranks, which make every call together.
        pin_memory: page-lock the host buffers.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup, *, pin_memory: bool = False) -> None:
        self.models: dict[Tag, nn.Module] = {}
        self.optimizer: torch.optim.Optimizer | None = None
        self._device = device
        self._group = group
        self._offloaders = {tag: StorageOffloader(pin_memory=pin_memory) for tag in TAGS}

    def sleep(self, tags: Sequence[Tag]) -> MemoryReport:
        """Collective: frees the device memory behind the tags; idempotent.

        Raises:
            ConfigError: there is no such tag.
            ResourceError, StateError: as `StorageOffloader.sleep`, on every rank alike; a tag is awake or asleep as a
                whole.
        """
        return self._move(tags, lambda tag: self._offloaders[tag].sleep(self._tensors(tag)))

    def wake_up(self, tags: Sequence[Tag]) -> MemoryReport:
        """Collective: brings it back; idempotent.

        Raises:
            ConfigError: there is no such tag.
            ResourceError: as `StorageOffloader.wake_up`, on every rank alike; a tag is awake or asleep as a whole.
        """
        return self._move(tags, lambda tag: self._offloaders[tag].wake_up())

    def drop(self, tag: Tag) -> None:
        """Frees the device memory of a model that is of no more use, also where something still refers to it."""
        self._offloaders[tag].drop(self._tensors(tag))
        self.models.pop(tag, None)

    def memory(self) -> Memory:
        """Bytes held now."""
        parameters, optimizer, reference = (
            sum(storage.nbytes() for storage in distinct_storages(self._tensors(tag))) for tag in TAGS
        )
        return Memory(
            parameters=parameters,
            optimizer=optimizer,
            reference=reference,
            host_buffers=sum(offloader.host_bytes for offloader in self._offloaders.values()),
            asleep=tuple(tag for tag in TAGS if self._offloaders[tag].is_asleep),
            **allocator_state(self._device),
        )

    def _move(self, tags: Sequence[Tag], move: Callable[[Tag], MemoryReport]) -> MemoryReport:
        known = _known(tags)
        for model in self.models.values():  # no gathered copy, also of a call that failed, may outlive its shards
            reshard(model)
        reports: list[MemoryReport] = []
        run_together(lambda: reports.extend(map(move, known)), self._group)
        return sum(reports, MemoryReport(0, 0, 0, 0.0))

    def _tensors(self, tag: Tag) -> list[torch.Tensor]:
        """Parameters, their gradients and buffers; or moments, without the step counts, which stay where they are."""
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
    """What torch's CUDA allocator holds of the device, under the names of `MemoryReport`; zeros on a CPU."""
    if device.type != "cuda":
        return {"device_reserved": 0, "device_allocated": 0, "largest_free_block": 0}
    index = torch.cuda.current_device() if device.index is None else device.index
    free = [0]
    if torch.cuda.get_allocator_backend() == "native":  # another one, which the user chose, cannot list its blocks
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


def _known(tags: Sequence[Tag]) -> list[Tag]:
    for tag in tags if isinstance(tags, list | tuple) else (tags,):
        if tag not in TAGS:
            raise ConfigError(f"{tag!r} is not a tag", field="tags", hint=f"use some of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]
