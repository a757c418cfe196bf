"""One system in a process of its own, asked for one step at a time: JSON lines in, JSON lines out.

Needs torch and numpy alone, for it also runs in the peers' environments. A system is a class that is given the model's
folder, the batch and a device; `micro_batches` lists what its user could choose, and `step` takes one update.

    <- {"versions": {...}, "parameters": 851840, "device": "cpu", "micro_batches": [4, 8]}
    -> {"micro_batch": 4, "with_memory": true}
    <- {"loss": ..., "grad_norm": ..., "user_s": ..., "system_s": ..., "wall_s": ..., "device_s": null, ...}
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

ADAMW = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
MAX_GRAD_NORM = 1.0
CLIP = 0.2


class System(Protocol):
    """What is measured."""

    micro_batches: list[int]  # sizes to choose from, in the system's own unit
    parameters: int  # that are trained

    def step(self, micro_batch: int) -> tuple[float, float]: ...  # loss and gradient norm of one update


@dataclass(frozen=True)
class Sample:
    """One sampled sequence."""

    tokens: torch.Tensor  # [length] int64
    response_length: int
    advantage: float

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.tokens)


def read_samples(path: Path, device: torch.device) -> list[Sample]:
    """The samples of a file of `RolloutBatch.save`; all response tokens of a sample have its advantage."""
    from safetensors.numpy import load_file

    fields = load_file(path)
    ends, response_ends = np.cumsum(fields["lengths"]), np.cumsum(fields["response_lengths"])
    return [
        Sample(torch.from_numpy(fields["tokens"][end - length : end]).to(device), int(response), float(advantage))
        for end, length, response, advantage in zip(
            ends, fields["lengths"], fields["response_lengths"], fields["advantages"][response_ends - 1], strict=True
        )
    ]


def fill_packs(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Samples in packs of at most `max_tokens`, longest first, each into the first pack that has room."""
    packs: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda sample: -sample.length):
        room = (pack for pack in packs if sum(one.length for one in pack) + sample.length <= max_tokens)
        pack = next(room, None)
        if pack is None:
            packs.append([sample])
        else:
            pack.append(sample)
    return packs


def pack_sizes(samples: Sequence[Sample], *sizes: int) -> list[int]:
    """Those of some pack sizes that the longest sample and the batch leave a choice of."""
    longest, total = max(sample.length for sample in samples), sum(sample.length for sample in samples)
    return sorted({min(max(size, longest), total) for size in sizes})


def clipped_loss(log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, denominator: int) -> Any:
    """GRPO's clipped loss, summed over tokens and divided by the trained tokens of the whole update."""
    ratio = torch.exp(log_probs - old)
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).sum() / denominator


def take_update(model: Any, optimizer: Any) -> float:
    """Clips, updates, forgets the gradients; returns their norm before clipping."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def serve(build: Callable[[Path, Path, torch.device], System], *packages: str) -> None:
    """Runs a system named on the command line until its standard input ends.

    Args:
        build: makes it of the model's folder, the batch's file and the device.
        packages: whose versions are reported besides torch's.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=Path, required=True)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    options, _ = parser.parse_known_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(options.threads)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    kind = found if options.device == "auto" else options.device
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    system = build(options.model, options.batch, device)

    def answer(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    versions = {name: version(name) for name in ("torch", *packages)}
    ready = {"versions": versions, "parameters": system.parameters, "micro_batches": system.micro_batches}
    answer(ready | {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"})
    for line in sys.stdin:
        request = json.loads(line)
        answer(measured(system, request["micro_batch"], device, with_memory=request["with_memory"]))


def measured(system: System, micro_batch: int, device: torch.device, *, with_memory: bool) -> dict[str, Any]:
    """One step: loss, gradient norm, seconds of several clocks, and the peak of its memory over that before it."""
    watch = _CudaWatch(device) if device.type == "cuda" else _CpuWatch(with_memory)
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    loss, norm = system.step(micro_batch)
    device_s = watch.seconds()
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "loss": loss,
        "grad_norm": norm,
        "user_s": after.ru_utime - before.ru_utime,
        "system_s": after.ru_stime - before.ru_stime,
        "wall_s": wall_s,
        "device_s": device_s,
        "peak_extra_bytes": watch.peak_extra_bytes(),
    }


class _CpuWatch:
    """Resets the kernel's record of the largest resident set.

    Garbage is collected and freed pages are given back first: either would hide what the step takes, if it went during
    the step.
    """

    def __init__(self, with_memory: bool) -> None:
        self._before: int | None = None
        if with_memory:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")
            self._before = _status_bytes("VmRSS")

    def seconds(self) -> None:
        return None

    def peak_extra_bytes(self) -> int | None:
        return None if self._before is None else _status_bytes("VmHWM") - self._before


class _CudaWatch:
    """CUDA events around a step, and the allocator's own peak."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._start.record()

    def seconds(self) -> float:
        self._end.record()
        torch.cuda.synchronize(self._device)
        return float(self._start.elapsed_time(self._end)) / 1e3

    def peak_extra_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device)) - self._before


def _status_bytes(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
