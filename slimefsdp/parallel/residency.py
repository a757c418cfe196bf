"""Which parts of a rank's state are on the device: parameters (with buffers), optimiser state, reference model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.errors import ConfigError
from slimefsdp.parallel.offload import Sleeper
from slimefsdp.reports import Memory, MemoryReport

Tag = Literal["parameters", "optimizer", "reference"]
TAGS: tuple[Tag, ...] = ("parameters", "optimizer", "reference")


def tensors_of_model(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, in the model's order."""
    return [*model.parameters(), *model.buffers()]


def tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Moments; Adam's step scalars stay on the host: moved, they would cost a synchronisation per parameter."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]


class Residency:
    """Sleep and wake-up by tag.

    Args:
        tensors: what a tag stands for now; the same tensors in the same order while the tag sleeps.
        pin_memory: page-lock the host buffers.
    """

    def __init__(self, tensors: Callable[[Tag], list[torch.Tensor]], *, pin_memory: bool = False) -> None:
        self._tensors = tensors
        self._sleepers = {tag: Sleeper(pin_memory=pin_memory) for tag in TAGS}

    def sleep(self, tags: Sequence[Tag]) -> MemoryReport:
        """Frees the device memory behind the tags; idempotent."""
        return sum((self._sleepers[tag].sleep(self._tensors(tag)) for tag in _known(tags)), MemoryReport(0, 0, 0, 0.0))

    def wake_up(self, tags: Sequence[Tag]) -> MemoryReport:
        """Brings it back; idempotent."""
        return sum((self._sleepers[tag].wake_up() for tag in _known(tags)), MemoryReport(0, 0, 0, 0.0))

    def memory(self, device: torch.device) -> Memory:
        """Bytes held now."""
        parameters, optimizer, reference = (sum(map(_nbytes, self._tensors(tag))) for tag in TAGS)
        return Memory(
            parameters=parameters,
            optimizer=optimizer,
            reference=reference,
            host_buffers=sum(sleeper.host_bytes for sleeper in self._sleepers.values()),
            device_allocated=torch.cuda.memory_allocated(device) if device.type == "cuda" else 0,
            asleep=tuple(tag for tag in TAGS if self._sleepers[tag].is_asleep),
        )


def _known(tags: Sequence[Tag]) -> list[Tag]:
    for tag in tags if isinstance(tags, list | tuple) else (tags,):
        if tag not in TAGS:
            raise ConfigError(f"{tag!r} is not a tag", field="tags", hint=f"use some of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]


def _nbytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()
