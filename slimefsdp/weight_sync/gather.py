"""Gathers full tensors from a sharded model, in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp import heartbeat
from slimefsdp.distributed.mesh import local_shard

_Parameters = Sequence[tuple[str, nn.Parameter]]
_RowsOf = Callable[[str, nn.Parameter], torch.Tensor]
DEFAULT_BUCKET_BYTES = 256 * 2**20
_ALONE_BYTES = 2**20  # tensors of at least this size are gathered by a collective of their own, without a copy

Bucket = list[tuple[str, torch.Tensor]]
Computed = Mapping[str, Callable[[], torch.Tensor]]
"""Names of weights to replace by computed values -> a collective function that returns this rank's rows of them."""


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
        named: parameters sharded over dim 0 across `group`, in the same order on every rank; on the device, or on the
            host under CPU offload.
        dtype: dtype of the yielded tensors; shards are cast before they are gathered.
        bucket_bytes: largest size of a bucket of several tensors.
        copies: if False, tensors may be a parameter's own memory and must not be written to.
        computed: functions that compute the rows to send in place of a parameter's own; called one at a time.
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
    # small tensors share a collective, and are copied from its result
    small = [item for item in bucket if item[1].numel() * dtype.itemsize < _ALONE_BYTES]
    full = dict(_gathered_together(small, rows_of, group, dtype, device)) if small else {}
    for name, parameter in bucket:
        if name not in full:
            full[name] = _gathered_alone(parameter, rows_of(name, parameter), group, dtype, device)
    return [(name, full[name]) for name, _ in bucket]


def _gathered_alone(
    parameter: nn.Parameter, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Gathers a single tensor; the result is a view of the gathered memory without its padding."""
    world_size, (count, *rest) = dist.get_world_size(group), parameter.shape
    rows = _rows_per_rank(parameter, world_size)
    gathered = torch.empty(world_size * rows, *rest, dtype=dtype, device=device)
    rows_to_send = own.to(device, dtype).contiguous()
    if len(rows_to_send) < rows:
        padded = rows_to_send.new_zeros(rows, *rest)
        padded[: len(rows_to_send)] = rows_to_send
        rows_to_send = padded
    dist.all_gather_into_tensor(gathered, rows_to_send, group=group)
    return gathered[:count]


def _gathered_together(
    bucket: _Parameters, rows_of: _RowsOf, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> Bucket:
    world_size = dist.get_world_size(group)
    rows_per_rank = [_rows_per_rank(parameter, world_size) for _, parameter in bucket]
    sizes = [rows * p.shape[1:].numel() for (_, p), rows in zip(bucket, rows_per_rank, strict=True)]
    rows_to_send = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (name, parameter), target in zip(bucket, rows_to_send.split(sizes), strict=True):
        local = rows_of(name, parameter)
        target[: local.numel()].copy_(local.reshape(-1))
        target[local.numel() :].zero_()
    gathered = rows_to_send.new_empty(world_size, rows_to_send.numel())
    dist.all_gather_into_tensor(gathered.view(-1), rows_to_send, group=group)
    full: Bucket = []
    offset = 0
    for (name, parameter), rows, size in zip(bucket, rows_per_rank, sizes, strict=True):
        parts = gathered[:, offset : offset + size]
        full.append((name, parts.reshape(world_size * rows, *parameter.shape[1:])[: parameter.shape[0]].contiguous()))
        offset += size
    return full


def _rows_per_rank(parameter: nn.Parameter, world_size: int) -> int:
    """Returns the largest number of rows of a rank; the last ranks may have fewer or none."""
    return -(-parameter.shape[0] // world_size)
