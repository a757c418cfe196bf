"""What calls on a Trainer return, as plain frozen types; no torch, so that a driver can read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class LogProbs:
    """Per response token, in the order of the batch, at the sampling temperature."""

    log_probs: np.ndarray  # float32 [R]
    entropy: np.ndarray  # float32 [R], nats


@dataclass(frozen=True)
class SyncReport:
    """A weight update that every receiver has committed."""

    version: int
    bytes: int  # of all tensors, counted once
    seconds: float


@dataclass(frozen=True)
class MemoryReport:
    """What a sleep or wake-up did on one rank."""

    device_bytes_before: int  # of the tensors concerned
    device_bytes_after: int
    host_bytes: int  # held in host buffers afterwards
    seconds: float

    def __add__(self, other: MemoryReport) -> MemoryReport:
        return MemoryReport(
            self.device_bytes_before + other.device_bytes_before,
            self.device_bytes_after + other.device_bytes_after,
            self.host_bytes + other.host_bytes,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes held on one rank."""

    parameters: int  # with buffers; 0 while asleep, as the others
    optimizer: int
    reference: int
    host_buffers: int
    device_allocated: int  # by torch on CUDA; 0 on a CPU
    asleep: tuple[str, ...]


@dataclass(frozen=True)
class Health:
    """That a rank is there, and how far it is."""

    rank: int
    pid: int
    updates_taken: int
