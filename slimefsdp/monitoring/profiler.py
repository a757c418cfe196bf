"""Profiles chosen updates: traces, compute, communication and idle time of every rank, and collectives by phase.

`phase` names the phases of every update, for torch's profiler and for tools that read NVTX ranges.

Updates are chosen by number, counted from the first update of the run, so all ranks profile the same updates and a
resumed run continues the count. Other updates are not recorded.
"""

from __future__ import annotations

import bisect
import gzip
import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from slimefsdp.distributed.collectives import gathered, run_on_first, run_together
from slimefsdp.distributed.mesh import Mesh

# prefixes of collectives, sends and receives on the host in a trace; GPUs run NCCL kernels instead
_HOST_COMMUNICATION = ("gloo:", "nccl:", "c10d::", "_c10d_functional::")
# prefixes of operators that only call other operators, such as hooks with collectives
_HOST_CONTAINERS = ("autograd::", "torch::")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_MEMORY_EVENTS = 1_000_000  # number of events of CUDA's allocator to keep; older events are dropped
_PHASE = "slimefsdp::"  # prefix of the annotation of a phase
_OTHER = "other"
# part of an operator's or kernel's name, without underscores -> the collective
_COLLECTIVES = {
    "reducescatter": "reduce-scatter", "allgather": "all-gather", "allreduce": "all-reduce", "alltoall": "all-to-all",
    "send": "send, receive", "recv": "send, receive", "broadcast": "broadcast",
}  # fmt: skip


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Names the block for torch's profiler, and on CUDA as an NVTX range; this takes some microseconds."""
    with record_function(_PHASE + name), torch.cuda.nvtx.range(name) if torch.cuda.is_initialized() else nullcontext():
        yield


@dataclass(frozen=True, slots=True)
class Shares:
    """Holds the wall-clock seconds of a rank in an update, and its parts; compute, exposed and idle add up to it."""

    seconds: float
    compute: float  # time with at least one running kernel (GPU) or operator (CPU)
    communication: float  # time with at least one collective or message in flight
    exposed: float  # part of `communication` without concurrent compute
    peak_bytes: int | None = None  # of all tensors (GPU) or of those made in the update (CPU); None if not recorded
    # (phase, collective) -> seconds with at least one such collective in flight that was started in the phase
    by_phase: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @property
    def idle(self) -> float:
        return self.seconds - self.compute - self.exposed


class UpdateProfiler:
    """Profiles chosen updates on one rank.

    Args:
        updates: the numbers of the updates to profile; 1 is the first update of a run.
        folder: the folder of traces and tables; the same on every rank.
        mesh: the mesh of the ranks that train.
        with_memory: whether to record every allocation, in the traces and as a snapshot of CUDA's allocator.
        record_shapes, with_stack: see `torch.profiler.profile`; whether to record the shapes of operators' inputs, and
            the calling Python frames.
    """

    def __init__(
        self,
        updates: Collection[int],
        folder: Path,
        mesh: Mesh,
        *,
        with_memory: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._updates = frozenset(updates)
        self._folder = folder
        self._mesh = mesh
        self._with_memory = with_memory
        self._recorded_too: dict[str, Any] = {
            "record_shapes": record_shapes,
            "with_stack": with_stack,
            "profile_memory": with_memory,
        }

    def profiled(self, update: int) -> AbstractContextManager[None]:
        """Returns a collective context for update number `update`, which profiles the update if it is a chosen one.

        If a rank cannot write its trace, this only warns, since training does not need the profile.
        """
        return self._recorded(update) if update in self._updates else nullcontext()

    @contextmanager
    def _recorded(self, update: int) -> Iterator[None]:
        group, on_cuda = self._mesh.group, self._mesh.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
        profiler = profile(activities=activities, **self._recorded_too)
        name = f"update {update}"
        run_together(profiler.start, group)
        with _allocator_history() if self._with_memory and on_cuda else nullcontext():
            try:
                with record_function(name):
                    yield
                    if on_cuda:
                        torch.cuda.synchronize()
            finally:
                profiler.stop()
            # an update fails on all ranks or on none, so all ranks reach this line or none does
            written = run_together(lambda: self._written(profiler, update, name), group)
        by_rank = gathered(written, group)
        run_on_first(lambda: self._report(update, name, by_rank), group)

    def _report(self, update: int, name: str, by_rank: Sequence[Shares | str]) -> None:
        failed = [f"rank {rank}: {result}" for rank, result in enumerate(by_rank) if isinstance(result, str)]
        if not failed:
            table = shares_table(name, [result for result in by_rank if isinstance(result, Shares)])
            print(table, file=sys.stderr, flush=True)
            try:
                self._stem(update).with_suffix(".txt").write_text(table + "\n")
            except OSError as error:
                failed = [str(error)]
        if failed:
            problem = f"the profile of update {update} was not written to {self._folder}: {'; '.join(failed)}"
            warnings.warn(f"{problem}; training goes on (profile.updates)", stacklevel=2)

    def _stem(self, update: int) -> Path:
        return self._folder / f"update_{update:06d}"

    def _written(self, profiler: profile, update: int, name: str) -> Shares | str:
        """Writes the rank's trace and returns its shares, or the reason if writing fails; leaves no incomplete file."""
        of_rank = f"{self._stem(update)}_rank{dist.get_rank(self._mesh.group)}"
        plain, packed, memory = (Path(f"{of_rank}{end}") for end in (".json", ".json.gz", "_memory.pickle"))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(plain))  # torch's own compression, line by line, is slower
            trace = plain.read_bytes()
            events = json.loads(trace)["traceEvents"]
            packed.write_bytes(gzip.compress(trace, compresslevel=3))
            if self._with_memory and self._mesh.device.type == "cuda":
                torch.cuda.memory._dump_snapshot(str(memory))
        except (OSError, ValueError) as error:  # ValueError: a full disk truncated the trace, which torch ignores
            for file in (packed, memory):
                with suppress(OSError):
                    file.unlink()
            return str(error)
        finally:
            with suppress(OSError):  # raised if the folder is read-only
                plain.unlink()
        return shares_of_trace(events, name)


@contextmanager
def _allocator_history() -> Iterator[None]:
    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def shares_of_trace(events: Iterable[Mapping[str, Any]], name: str) -> Shares:
    """Returns the shares of compute and communication in the time of one annotated span.

    Args:
        events: `traceEvents` of a Chrome trace of torch's profiler; times are in microseconds.
        name: the name of the annotation, which occurs once in the trace.
    """
    events = list(events)
    timed = [event for event in events if event.get("ph") == "X"]
    (span,) = [event for event in timed if event.get("cat") == "user_annotation" and event["name"] == name]
    begin, end = span["ts"], span["ts"] + span["dur"]
    on_device = any(event.get("cat") == "kernel" for event in timed)
    kind_of = _device_kind if on_device else _host_kind
    spans: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": []}
    in_phases: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    phase_of = _phase_finder(timed)
    for event in timed:
        kind = kind_of(event.get("cat", ""), event["name"])
        start, stop = max(event["ts"], begin), min(event["ts"] + event["dur"], end)
        if kind is None or start >= stop:
            continue
        spans[kind].append((start, stop))
        if kind == "communication":
            in_phases[phase_of(event), _collective(event["name"])].append((start, stop))
    compute, communication = (_covered(spans[kind]) for kind in ("compute", "communication"))
    either = _covered(spans["compute"] + spans["communication"])
    seconds = (span["dur"] / 1e6, compute / 1e6, communication / 1e6, (either - compute) / 1e6)
    by_phase = {key: _covered(intervals) / 1e6 for key, intervals in in_phases.items()}
    return Shares(*seconds, peak_bytes=_peak_bytes(events, on_device), by_phase=by_phase)


def _phase_finder(timed: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """Returns a function event -> phase of the update in which the host launched the event."""
    named = [event for event in timed if event.get("cat") == "user_annotation" and event["name"].startswith(_PHASE)]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(_PHASE)) for event in named)
    # a kernel runs later than its launch on the host; the two events have the same correlation number
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in timed
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }

    def phase_of(event: Mapping[str, Any]) -> str:
        began = launches.get(event.get("args", {}).get("correlation"), event["ts"])
        index = bisect.bisect_right(spans, began, key=lambda span: span[0]) - 1
        return spans[index][2] if index >= 0 and began < spans[index][1] else _OTHER

    return phase_of


def _collective(name: str) -> str:
    plain = name.lower().replace("_", "")
    return next((collective for part, collective in _COLLECTIVES.items() if part in plain), _OTHER)


def shares_table(title: str, by_rank: Sequence[Shares]) -> str:
    """Returns the shares of all ranks as a table; compute, exposed and idle add up to 100 %."""
    lines = [title, "rank   seconds  compute  communication  of it exposed     idle   peak MB"]
    for rank, shares in enumerate(by_rank):
        parts = [shares.compute, shares.communication, shares.exposed, shares.idle]
        compute, communication, exposed, idle = (f"{100 * part / shares.seconds:.1f} %" for part in parts)
        peak = "-" if shares.peak_bytes is None else f"{shares.peak_bytes / 1e6:.1f}"
        times = f"{rank:>4} {shares.seconds:>9.3f} {compute:>8} {communication:>14} {exposed:>14} {idle:>8}"
        lines.append(f"{times} {peak:>9}")
    return "\n".join([*lines, *_phase_lines(by_rank)])


def _phase_lines(by_rank: Sequence[Shares]) -> list[str]:
    """Returns a title and a line with the communication of each phase, as means over ranks; [] if there was none."""
    by_phase: dict[str, list[str]] = defaultdict(list)
    for name, collective in dict.fromkeys(key for shares in by_rank for key in shares.by_phase):
        share = fmean(shares.by_phase.get((name, collective), 0.0) / shares.seconds for shares in by_rank)
        by_phase[name].append(f"{collective} {100 * share:.1f} %")
    title = "communication begun in each phase, % of the update, mean over ranks; what is under way at once overlaps"
    return [title, *(f"  {name}: {', '.join(cells)}" for name, cells in by_phase.items())] if by_phase else []


def _device_kind(category: str, name: str) -> str | None:
    if category not in _DEVICE_WORK:
        return None
    return "communication" if name.startswith("nccl") else "compute"


def _host_kind(category: str, name: str) -> str | None:
    if name.startswith(_HOST_COMMUNICATION):
        return "communication"
    is_operator = category == "cpu_op" and "::" in name and not name.startswith(_HOST_CONTAINERS)
    return "compute" if is_operator else None


def _peak_bytes(events: Iterable[Mapping[str, Any]], on_device: bool) -> int | None:
    changes = [event for event in events if event["name"] == "[memory]"]
    changes = [event for event in changes if (event["args"]["Device Type"] != 0) == on_device]
    if not changes:
        return None
    first = min(changes, key=lambda event: float(event["ts"]))["args"]
    # a CPU's total includes tensors from earlier profiles, so only differences from the first value are valid
    before = 0 if on_device else first["Total Allocated"] - first["Bytes"]
    return max(int(event["args"]["Total Allocated"]) for event in changes) - int(before)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length of the union of spans [start, end)."""
    if not spans:
        return 0.0
    starts, ends = np.array(sorted(spans)).T
    reached = np.maximum.accumulate(ends)
    before = np.concatenate([[-np.inf], reached[:-1]])
    return float(np.maximum(ends - np.maximum(starts, before), 0).sum())
