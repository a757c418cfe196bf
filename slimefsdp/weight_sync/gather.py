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
_ALONE_BYTES = 2**20  # of a tensor that is gathered by itself, straight into its place

Bucket = list[tuple[str, torch.Tensor]]
Computed = Mapping[str, Callable[[], torch.Tensor]]
"""Names of weights that are not handed out as they are stored -> this rank's rows of what is; a collective."""


def full_weights(
    named: Sequence[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    copies: bool = True,
    computed: Computed = MappingProxyType({}),
) -> Iterator[Bucket]:
    """Yields buckets of (name, full tensor on the mesh's device); collective: every rank must take every bucket.

    Args:
        named: parameters sharded over dim 0 across `group`, in the same order on every rank; on the device, or on the
            host where FSDP keeps them there.
        dtype: of the tensors handed out; shards are cast before they travel.
        bucket_bytes: a bucket is at most this large, or one tensor.
        copies: tensors are copies; if not, they may be a parameter's own memory and must not be written to.
        computed: functions that make the rows to send in place of a parameter's own, called when its turn comes.
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
        return [(name, rows_of(name, one).to(device, dtype, copy=copies)) for name, one in bucket]
    # those of few bytes share a collective, and are copied out of what it gathered
    small = [one for one in bucket if one[1].numel() * dtype.itemsize < _ALONE_BYTES]
    full = dict(_gathered_together(small, rows_of, group, dtype, device)) if small else {}
    for name, parameter in bucket:
        if name not in full:
            full[name] = _gathered_alone(parameter, rows_of(name, parameter), group, dtype, device)
    return [(name, full[name]) for name, _ in bucket]


def _gathered_alone(
    parameter: nn.Parameter, own: torch.Tensor, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A full tensor, at the beginning of the memory that it was gathered into."""
    world_size, (count, *rest) = dist.get_world_size(group), parameter.shape
    rows = _rows_per_rank(parameter, world_size)
    everyone = torch.empty(world_size * rows, *rest, dtype=dtype, device=device)
    mine = own.to(device, dtype).contiguous()
    if len(mine) < rows:
        padded = mine.new_zeros(rows, *rest)
        padded[: len(mine)] = mine
        mine = padded
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return everyone[:count]


def _gathered_together(
    bucket: _Parameters, rows_of: _RowsOf, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> Bucket:
    world_size = dist.get_world_size(group)
    rows_per_rank = [_rows_per_rank(parameter, world_size) for _, parameter in bucket]
    sizes = [rows * p.shape[1:].numel() for (_, p), rows in zip(bucket, rows_per_rank, strict=True)]
    mine = torch.empty(sum(sizes), dtype=dtype, device=device)
    for (name, parameter), place in zip(bucket, mine.split(sizes), strict=True):
        local = rows_of(name, parameter)
        place[: local.numel()].copy_(local.reshape(-1))
        place[local.numel() :].zero_()
    everyone = mine.new_empty(world_size, mine.numel())
    dist.all_gather_into_tensor(everyone.view(-1), mine, group=group)
    full: Bucket = []
    offset = 0
    for (name, parameter), rows, size in zip(bucket, rows_per_rank, sizes, strict=True):
        parts = everyone[:, offset : offset + size]
        full.append((name, parts.reshape(world_size * rows, *parameter.shape[1:])[: parameter.shape[0]].contiguous()))
        offset += size
    return full


def _rows_per_rank(parameter: nn.Parameter, world_size: int) -> int:
    """The last ranks may hold fewer, or none."""
    return -(-parameter.shape[0] // world_size)
