"""What calls on a Trainer return, as plain frozen types; no torch, so that a driver can read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from slimefsdp.errors import SlimeError

Tag = Literal["parameters", "optimizer", "reference"]
TAGS: tuple[Tag, ...] = ("parameters", "optimizer", "reference")
"""What `sleep` and `wake_up` move: parameters with gradients and buffers, optimiser state, the colocated reference."""

MAX_LISTED = 20  # differences that a printed ReplicaCheck names


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Per response token, in the order of the batch, at the sampling temperature."""

    log_probs: np.ndarray  # float32 [R]
    entropy: np.ndarray  # float32 [R], nats


@dataclass(frozen=True, eq=False)
class ForwardBackward:
    """What a `forward_backward` says that was asked for log-probs."""

    metrics: dict[str, float]
    log_probs: LogProbs  # of the very pass that was differentiated; 0 of tokens outside the loss mask


@dataclass(frozen=True)
class FailedReceiver:
    """A receiver that did not take part in a weight update to its end."""

    receiver: int  # its place among those that were sent to
    error: SlimeError


@dataclass(frozen=True)
class SyncReport:
    """A weight update that every receiver has committed, but for those that failed."""

    version: int
    bytes: int  # of all tensors that were sent, counted once
    seconds: float
    failed: tuple[FailedReceiver, ...] = ()  # only where the update was to go on without them


@dataclass(frozen=True)
class MemoryReport:
    """What a sleep or wake-up did on one rank."""

    device_bytes_before: int  # of the tensors concerned
    device_bytes_after: int
    host_bytes: int  # held in host buffers afterwards
    seconds: float
    # of torch's CUDA allocator after the call, in bytes; 0 on a CPU
    device_reserved: int = 0  # taken from the device
    device_allocated: int = 0  # of these, in use
    largest_free_block: int = 0  # the largest single piece of the rest

    def __add__(self, other: MemoryReport) -> MemoryReport:
        """Both, one after the other."""
        return MemoryReport(
            self.device_bytes_before + other.device_bytes_before,
            self.device_bytes_after + other.device_bytes_after,
            self.host_bytes + other.host_bytes,
            self.seconds + other.seconds,
            other.device_reserved,
            other.device_allocated,
            other.largest_free_block,
        )

    @property
    def bytes_per_s(self) -> float:
        """Bytes moved between device and host in a second; 0 where none were."""
        moved = abs(self.device_bytes_before - self.device_bytes_after)
        return moved / self.seconds if moved else 0.0


@dataclass(frozen=True)
class Memory:
    """Bytes held on one rank."""

    parameters: int  # with buffers and gradients; 0 while asleep, as the others
    optimizer: int
    reference: int
    host_buffers: int
    asleep: tuple[str, ...]
    # of torch's CUDA allocator, as in MemoryReport
    device_reserved: int = 0
    device_allocated: int = 0
    largest_free_block: int = 0


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter of the group."""

    name: str
    rank: int
    alpha: float
    updates_taken: int
    has_gradients: bool  # which wait for an update
    is_on_device: bool  # or on the host, until it is asked for


@dataclass(frozen=True)
class LoadReport:
    """What the last load took, and what it passed over."""

    step: int
    path: str  # of the checkpoint's folder
    skipped: tuple[str, ...]  # why each checkpoint that would have come before it was not taken
    ranks: int  # that wrote it
    mesh: dict[str, int]  # theirs: axis -> size
    differences: tuple[str, ...]  # between what was saved and this run, in words


@dataclass(frozen=True)
class Health:
    """A rank's sign of life: its progress, and the memory that it uses."""

    rank: int
    pid: int
    updates_taken: int
    # on CUDA of tensors on its device, and the most of it since its last train_step began; on a CPU the process's
    # resident memory, and the most of it since the process began
    allocated_bytes: int = 0
    peak_bytes: int = 0


@dataclass(frozen=True)
class GradientHealth:
    """The gradients of one update, before clipping and with any loss scale taken out; the same on every rank."""

    update: int  # updates taken before it
    norm: float  # L2 over all parameters
    group_norms: dict[str, float]  # in model order: embedding, layer_0, .., final_norm, head (tied: in embedding)
    first_nonfinite: str | None  # the first parameter in model order with NaN or infinity in its gradient
    is_skipped: bool

    def __str__(self) -> str:
        rows = [(name, f"{norm:.4e}") for name, norm in [*self.group_norms.items(), ("all", self.norm)]]
        end = f"first non-finite gradient: {self.first_nonfinite}; skipped" if self.is_skipped else "all finite"
        return _table(("gradients of", "L2 norm"), rows) + f"\nupdate {self.update}: {end}"


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: parameters that are gathered and freed together."""

    name: str  # of its module; (root) for the outermost one
    parameters: tuple[str, ...]  # Hugging Face names
    frozen: tuple[str, ...]  # those of them that are not trained
    numel: int  # of the whole unit
    local_bytes: int  # of the rows that belong to this rank, awake or asleep
    master_dtype: str
    compute_dtype: str
    reduce_dtype: str
    reshard_after_forward: bool
    placements: str  # per axis of its mesh: how it is laid out over so many ranks


@dataclass(frozen=True)
class Description:
    """How one rank holds the model."""

    rank: int
    mesh: dict[str, int]  # axis -> size
    attention: str  # the strategy, and why it was chosen
    units: tuple[Unit, ...]  # in model order
    buffer_bytes: int  # every rank holds all buffers

    @property
    def numel(self) -> int:
        """Parameters of the whole model, a tied one once."""
        return sum(unit.numel for unit in self.units)

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's shards of all parameters."""
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
    """Something that several ranks should hold alike and do not."""

    name: str  # model.*, buffer.*, optimizer.*, reference.*: tensors (with the shard's rows); state.*: numbers
    ranks: tuple[tuple[int, ...], ...]  # those that agree with each other stand together; the majority first

    @property
    def deviating(self) -> tuple[int, ...]:
        """The ranks outside the majority; where there is none, those that differ from the lowest rank."""
        return tuple(sorted(rank for same in self.ranks[1:] for rank in same))

    def __str__(self) -> str:
        return f"{self.name}: ranks {' | '.join(','.join(map(str, same)) for same in self.ranks)} differ"


@dataclass(frozen=True)
class ReplicaCheck:
    """Whether ranks hold the same bits where they should; shards that one rank alone holds have nothing to equal."""

    checked: int  # tensors, shards and numbers that more than one rank holds
    differences: tuple[Difference, ...]  # in model order

    @property
    def is_in_sync(self) -> bool:
        """Whether there was no difference."""
        return not self.differences

    def __str__(self) -> str:
        listed = [str(difference) for difference in self.differences[:MAX_LISTED]]
        if len(self.differences) > MAX_LISTED:
            listed.append(f"{len(self.differences) - MAX_LISTED} more")
        return "\n".join([f"{len(self.differences)} of {self.checked} differ between ranks", *listed])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the first and the last are text, the others are set to the right."""
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
