"""Defines the result types of calls on a Trainer; this module does not import torch, so that drivers can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from slimefsdp.errors import SlimeError

if TYPE_CHECKING:
    from slimefsdp.data.rollout_batch import RolloutBatch

Tag = Literal["parameters", "optimizer", "reference"]
TAGS: tuple[Tag, ...] = ("parameters", "optimizer", "reference")
"""The parts that `sleep` and `wake_up` move: parameters (with gradients and buffers), optimiser state, reference."""

MAX_LISTED = 20  # number of differences that a printed ReplicaCheck lists


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Holds the log-prob and entropy of each response token in batch order, at the sampling temperature."""

    log_probs: np.ndarray  # float32 [R]
    entropy: np.ndarray  # float32 [R], nats
    # int16 [T, layers, experts of a token], for the batch's field of this name; only under
    # loss.routing_replay=old_log_probs, and only of the policy
    routed_experts: np.ndarray | None = None

    def as_old(self, batch: RolloutBatch) -> RolloutBatch:
        """Returns the batch with these old log-probs, and with these experts if there are any."""
        experts = {} if self.routed_experts is None else {"routed_experts": self.routed_experts}
        return batch.replace(old_log_probs=self.log_probs, **experts)


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    metrics: dict[str, float]
    log_probs: LogProbs  # from the forward passes of the gradients; 0 for tokens outside the loss mask


@dataclass(frozen=True)
class FailedReceiver:
    receiver: int  # index among the receivers of the update
    error: SlimeError


@dataclass(frozen=True)
class SyncReport:
    """Describes a weight update that every receiver has committed, except those in `failed`."""

    version: int
    bytes: int  # bytes of all sent tensors; several receivers count once
    seconds: float
    failed: tuple[FailedReceiver, ...] = ()  # empty unless the update was allowed to continue without failed receivers


@dataclass(frozen=True)
class MemoryReport:
    device_bytes_before: int  # bytes of the tensors that the call moves
    device_bytes_after: int
    host_bytes: int  # bytes in host buffers after the call
    seconds: float
    # bytes of torch's CUDA allocator after the call; 0 on a CPU
    device_reserved: int = 0  # taken from the device
    device_allocated: int = 0  # the part of `device_reserved` that is in use
    largest_free_block: int = 0  # the largest contiguous piece of the unused part

    @property
    def bytes_per_s(self) -> float:
        """Returns the bytes moved between device and host per second; 0 if none were moved."""
        moved = abs(self.device_bytes_before - self.device_bytes_after)
        return moved / self.seconds if moved else 0.0


@dataclass(frozen=True)
class Memory:
    """Holds the bytes in use on one rank, by tag (`TAGS`)."""

    parameters: int  # with buffers and gradients; this and the next two fields are 0 while asleep
    optimizer: int
    reference: int
    host_buffers: int
    asleep: tuple[str, ...]  # the tags that are asleep
    # torch's CUDA allocator, as in MemoryReport
    device_reserved: int = 0
    device_allocated: int = 0
    largest_free_block: int = 0


@dataclass(frozen=True)
class AdapterInfo:
    name: str
    rank: int
    alpha: float
    updates_taken: int
    has_gradients: bool  # gradients that no update has used
    is_on_device: bool  # False if it is on the host


@dataclass(frozen=True)
class LoadReport:
    step: int
    path: str  # the checkpoint's folder
    skipped: tuple[str, ...]  # reasons why newer checkpoints were not loaded
    ranks: int  # number of ranks that wrote the checkpoint
    mesh: dict[str, int]  # the writers' mesh: axis -> size
    differences: tuple[str, ...]  # differences between the checkpoint and this run, in words


@dataclass(frozen=True)
class Health:
    rank: int
    pid: int
    updates_taken: int
    # on CUDA: bytes of tensors on the rank's device, and their peak since the last train_step began; on a CPU: the
    # resident memory of the process, and its peak since the process began
    allocated_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class GradientHealth:
    """Describes the gradients of one update before clipping, divided by the loss scale; equal on every rank."""

    update: int  # number of updates taken before this one
    norm: float  # L2 norm over all parameters
    group_norms: dict[str, float]  # in model order: embedding, layer_0, .., final_norm, head (tied: in embedding)
    first_nonfinite: str | None  # the first parameter, in model order, whose gradient has NaN or infinity
    is_skipped: bool

    def __str__(self) -> str:
        rows = [(name, f"{norm:.4e}") for name, norm in [*self.group_norms.items(), ("all", self.norm)]]
        end = f"first non-finite gradient: {self.first_nonfinite}; skipped" if self.is_skipped else "all finite"
        return _table(("gradients of", "L2 norm"), rows) + f"\nupdate {self.update}: {end}"


@dataclass(frozen=True)
class Unit:
    """Describes one FSDP unit: parameters that are gathered and freed together."""

    name: str  # name of its module; (root) for the outermost one
    parameters: tuple[str, ...]  # Hugging Face names
    frozen: tuple[str, ...]  # names of the frozen parameters
    numel: int  # elements of the whole unit
    local_bytes: int  # bytes of this rank's rows, awake or asleep
    master_dtype: str
    compute_dtype: str
    reduce_dtype: str
    reshard_after_forward: bool
    placements: str  # placement and number of ranks for each axis of its mesh


@dataclass(frozen=True)
class Description:
    rank: int
    mesh: dict[str, int]  # axis -> size
    attention: str  # the strategy and the reason for choosing it
    units: tuple[Unit, ...]  # in model order
    buffer_bytes: int  # every rank holds all buffers

    @property
    def numel(self) -> int:
        """Returns the number of parameters of the whole model, counting tied parameters once."""
        return sum(unit.numel for unit in self.units)

    @property
    def local_bytes(self) -> int:
        return sum(unit.local_bytes for unit in self.units)

    def __str__(self) -> str:
        header = ("unit", "tensors", "parameters", "local bytes", "master", "compute", "reduce", "reshard", "placement")
        rows = [
            (
                unit.name, f"{len(unit.parameters)}", f"{unit.numel:,}", f"{unit.local_bytes:,}", unit.master_dtype,
                unit.compute_dtype, unit.reduce_dtype, "yes" if unit.reshard_after_forward else "no", unit.placements,
            )
            for unit in self.units
        ]  # fmt: skip
        tensors = sum(len(unit.parameters) for unit in self.units)
        rows.append(("total", f"{tensors}", f"{self.numel:,}", f"{self.local_bytes:,}", "", "", "", "", ""))
        axes = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        where = f"rank {self.rank} of mesh {axes}; buffers {self.buffer_bytes:,} bytes; attention {self.attention}"
        if frozen := sum(len(unit.frozen) for unit in self.units):
            where += f"; {frozen} of {tensors} tensors frozen"
        return f"{_table(header, rows)}\n{where}"


@dataclass(frozen=True)
class Difference:
    """Describes a tensor or number that should be equal on several ranks and is not."""

    name: str  # model.*, buffer.*, optimizer.*, reference.*: tensors (with the shard's rows); state.*: numbers
    ranks: tuple[tuple[int, ...], ...]  # groups of ranks with equal values, the largest group first

    @property
    def deviating(self) -> tuple[int, ...]:
        """Returns the ranks whose value is not that of the largest group."""
        return tuple(sorted(rank for same in self.ranks[1:] for rank in same))

    def __str__(self) -> str:
        return f"{self.name}: ranks {' | '.join(','.join(map(str, same)) for same in self.ranks)} differ"


@dataclass(frozen=True)
class ReplicaCheck:
    """Holds the result of comparing tensors, shards and numbers that should be equal on several ranks."""

    checked: int  # number of compared tensors, shards and numbers
    differences: tuple[Difference, ...]  # in model order

    @property
    def is_in_sync(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        listed = [str(difference) for difference in self.differences[:MAX_LISTED]]
        if len(self.differences) > MAX_LISTED:
            listed.append(f"{len(self.differences) - MAX_LISTED} more")
        return "\n".join([f"{len(self.differences)} of {self.checked} differ between ranks", *listed])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a text table; the first and last column are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    last = len(header) - 1
    lines = []
    for row in (header, *rows):
        cells = [
            cell.ljust(width) if column == 0 or (column == last and last > 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
