"""Sends a sharded model's weights to receivers: all ranks gather buckets of full tensors, and rank 0 passes them on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp import heartbeat
from slimefsdp.distributed.collectives import from_first, gathered, run_on_first
from slimefsdp.distributed.mesh import Block, blocks_of_ranks, is_cut, local_shard
from slimefsdp.results import SyncReport
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest
from slimefsdp.weight_sync.receive import Receiver

_Parameters = Sequence[tuple[str, nn.Parameter]]
_RowsOf = Callable[[str, nn.Parameter], torch.Tensor]
DEFAULT_BUCKET_BYTES = 256 * 2**20
_ALONE_BYTES = 2**20  # tensors of at least this size are gathered by their own collective, without a copy

Computed = Mapping[str, Callable[[], torch.Tensor]]
"""Names of weights to replace by computed values -> a collective function that returns this rank's rows of them."""


class BeginAgain(Exception):
    """Requests that the whole update be sent again, because a receiver for several engines has lost some of them."""


def stream_weights(
    named: Sequence[tuple[str, nn.Parameter]],
    receivers: Sequence[Receiver],
    *,
    version: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    shard_group: dist.ProcessGroup,
    source: str | None = None,
    computed: Computed = MappingProxyType({}),
    adapter_scale: float | None = None,
) -> SyncReport:
    """Collective: starts, sends and commits one update on every receiver of rank 0.

    A receiver has optional attributes. `takes_device_tensors`: it gets tensors on the device. `keeps_nothing`: it does
    not use a bucket after `receive` returns, so tensors may be the parameters' own memory. `has_frozen`: see
    `actors.engines.protocol.Engine`; frozen parameters are then sent only once.

    Args:
        named: (the receivers' name, parameter sharded over `shard_group`).
        group: all ranks; if they hold several copies of the model, rank 0's copy is sent.
        dtype: dtype of the sent tensors.
        source: identifies the values of the frozen parameters; None means that all parameters are sent.
        computed: see `full_weights`; these parameters do not count as frozen.
        adapter_scale: the scale of the adapters in `named`; see `all_take_adapters`.

    Raises:
        SyncError: an update failed. This and other errors of receivers are raised on every rank. No receiver commits
            unless all receivers took every bucket.
    """
    start = time.perf_counter()
    manifest: Manifest = {name: tuple(parameter.shape) for name, parameter in named}
    frozen = [name for name, parameter in named if not parameter.requires_grad and name not in computed]
    copies = not all(getattr(receiver, "keeps_nothing", False) for receiver in receivers)
    # with several ranks, rank 0 holds four buckets: one that is gathered, two that are sent, and a copy that gloo makes
    bucket_bytes = DEFAULT_BUCKET_BYTES // (1 if dist.get_world_size(shard_group) == 1 else 4)
    while True:
        kept = frozenset(frozen if frozen and source and _have_frozen(receivers, source, group) else ())
        sent = [(name, parameter) for name, parameter in named if name not in kept]
        buckets = full_weights(
            sent, shard_group, dtype=dtype, bucket_bytes=bucket_bytes, copies=copies, computed=computed
        )
        try:
            begin_arguments: tuple[Any, ...] = (kept,) if kept else ()
            if adapter_scale is not None:
                begin_arguments = (kept, adapter_scale)
            run_on_first(lambda: _send(receivers, version, manifest, begin_arguments, buckets), group, buckets)  # noqa: B023
            break
        except BeginAgain:  # on every rank
            continue
    count = sum(parameter.numel() for _, parameter in sent) * dtype.itemsize
    failed = [failure for receiver in receivers for failure in getattr(receiver, "failed", ())]
    return SyncReport(version, count, time.perf_counter() - start, tuple(failed))


def _send(
    receivers: Sequence[Receiver],
    version: int,
    manifest: Manifest,
    begin_arguments: tuple[Any, ...],
    buckets: Iterator[Bucket],
) -> None:
    for receiver in receivers:
        receiver.begin(version, manifest, *begin_arguments)
    needs_host = not all(getattr(receiver, "takes_device_tensors", False) for receiver in receivers)
    copying: HostCopy | None = None
    while bucket := next(buckets, None):
        ready: HostCopy | None = HostCopy(bucket, is_needed=needs_host)
        if ready is not None and ready.is_under_way:
            ready, copying = copying, ready  # receivers take the previous bucket during the copy
        if ready is not None:
            _hand_over(ready, receivers)
        del bucket, ready  # freed before the next bucket is gathered
    if copying is not None:
        _hand_over(copying, receivers)
    for receiver in receivers:
        receiver.commit(version)


def all_take_adapters(receivers: Sequence[Receiver], group: dist.ProcessGroup) -> bool:
    """Collective: returns whether all of rank 0's receivers support adapters on a frozen base.

    The `begin` of these receivers takes the scale of the adapters as a fourth argument.
    """
    answer = bool(receivers) and all(getattr(receiver, "takes_adapters", False) for receiver in receivers)
    answer_of_first: bool = gathered(answer, group)[0]
    return answer_of_first


def _hand_over(copy: HostCopy, receivers: Sequence[Receiver]) -> None:
    for receiver in receivers:
        is_for_device = getattr(receiver, "takes_device_tensors", False)
        receiver.receive(copy.bucket if is_for_device else copy.result())


def _have_frozen(receivers: Sequence[Receiver], source: str, group: dist.ProcessGroup) -> bool:
    """Collective: returns whether all receivers already have the frozen parameters."""

    def ask() -> bool:
        answers = [hasattr(receiver, "has_frozen") and receiver.has_frozen(source) for receiver in receivers]
        return bool(answers) and all(answers)

    return from_first(ask, group)


class HostCopy:
    """Copies a bucket to the host in the background, from a CUDA device through pinned memory.

    Args:
        bucket: tensors on the host or on a device.
        is_needed: whether any receiver needs tensors on the host.
    """

    def __init__(self, bucket: Bucket, *, is_needed: bool) -> None:
        self.bucket = bucket
        self._on_host, self._copied = bucket, None
        self.is_under_way = is_needed and any(tensor.device.type != "cpu" for _, tensor in bucket)
        if self.is_under_way:
            # torch reuses freed pinned memory, so only a few buffers are allocated in total
            self._on_host = [
                (name, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True))
                for name, tensor in bucket
            ]
            self._copied = torch.cuda.current_stream(bucket[0][1].device).record_event()

    def result(self) -> Bucket:
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host


# ---------------------------------------------------------------------- gathering


def full_weights(
    named: Sequence[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    copies: bool = True,
    computed: Computed = MappingProxyType({}),
) -> Iterator[Bucket]:
    """Collective: yields buckets of (name, full tensor on the mesh's device); every rank must take every bucket.

    Args:
        named: parameters sharded across `group`, in the same order on every rank; on the device, or under CPU offload
            on the host.
        dtype: dtype of the yielded tensors; shards are cast before they are gathered.
        bucket_bytes: largest size of a bucket; a larger tensor is a bucket of its own.
        copies: if False, tensors may be a parameter's own memory, and must not be changed.
        computed: name -> function that returns this rank's rows to send instead of the parameter's; called one at a
            time.
    """

    def rows_of(name: str, parameter: nn.Parameter) -> torch.Tensor:
        return computed[name]() if name in computed else local_shard(parameter).detach()

    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        nbytes = parameter.numel() * dtype.itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield _gather(bucket, rows_of, group, dtype, copies)
            heartbeat.tick()
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += nbytes
    if bucket:
        yield _gather(bucket, rows_of, group, dtype, copies)


@torch.no_grad()
def _gather(
    bucket: _Parameters, rows_of: _RowsOf, group: dist.ProcessGroup, dtype: torch.dtype, copies: bool
) -> Bucket:
    world_size = dist.get_world_size(group)
    first = bucket[0][1]
    device = torch.device(first.device_mesh.device_type) if isinstance(first, DTensor) else first.device
    if world_size == 1:
        return [(name, rows_of(name, parameter).to(device, dtype, copy=copies)) for name, parameter in bucket]
    # small tensors are gathered by one collective, and copied from its result
    small = [item for item in bucket if item[1].numel() * dtype.itemsize < _ALONE_BYTES]
    full = dict(_gathered_together(small, rows_of, group, dtype, device)) if small else {}
    for name, parameter in bucket:
        if name not in full:
            full[name] = _gathered_alone(parameter, rows_of(name, parameter), group, dtype, device)
    return [(name, full[name]) for name, _ in bucket]


def _gathered_alone(
    parameter: nn.Parameter, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Gathers a single tensor; see `_Layout.whole`."""
    layout = _Layout.of(parameter, group)
    numbers = own.to(device, dtype).contiguous().view(-1)
    if len(numbers) < layout.size:
        numbers = F.pad(numbers, (0, layout.size - len(numbers)))
    gathered = numbers.new_empty(dist.get_world_size(group), layout.size)
    dist.all_gather_into_tensor(gathered.view(-1), numbers, group=group)
    return layout.whole(gathered)


def _gathered_together(
    bucket: _Parameters, rows_of: _RowsOf, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> Bucket:
    layouts = [_Layout.of(parameter, group) for _, parameter in bucket]
    sizes = [layout.size for layout in layouts]
    rows_to_send = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (name, parameter), target in zip(bucket, rows_to_send.split(sizes), strict=True):
        local = rows_of(name, parameter)
        target[: local.numel()].copy_(local.reshape(-1))
        target[local.numel() :].zero_()
    gathered = rows_to_send.new_empty(dist.get_world_size(group), rows_to_send.numel())
    dist.all_gather_into_tensor(gathered.view(-1), rows_to_send, group=group)
    full: Bucket = []
    offset = 0
    for (name, _), layout in zip(bucket, layouts, strict=True):
        full.append((name, layout.whole(gathered[:, offset : offset + layout.size]).contiguous()))
        offset += layout.size
    return full


@dataclass(frozen=True)
class _Layout:
    """Describes which part of a tensor each rank of a copy holds."""

    shape: torch.Size
    size: int  # numbers of the largest part; those of other ranks are padded to this length
    blocks: list[Block] | None  # by rank; None means that the ranks hold successive rows

    @classmethod
    def of(cls, parameter: nn.Parameter, group: dist.ProcessGroup) -> _Layout:
        if not is_cut(parameter):
            rows = -(-parameter.shape[0] // dist.get_world_size(group))
            return cls(parameter.shape, rows * parameter.shape[1:].numel(), None)
        assert isinstance(parameter, DTensor)
        blocks = blocks_of_ranks(parameter, group)
        return cls(parameter.shape, max(math.prod(block.shape) for block in blocks), blocks)

    def whole(self, gathered: torch.Tensor) -> torch.Tensor:
        """Returns the whole tensor from the numbers of all ranks, [ranks, size]; a view for successive rows."""
        if self.blocks is None:
            return gathered.reshape(-1)[: self.shape.numel()].view(self.shape)
        full = gathered.new_empty(self.shape)
        for block, part in zip(self.blocks, gathered, strict=True):
            full[block.slices] = part[: math.prod(block.shape)].view(block.shape)
        return full
