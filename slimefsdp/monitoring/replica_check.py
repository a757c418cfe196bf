"""Inspects a sharded model: describes its FSDP units on this rank, and compares tensors that several ranks hold.

Units, dtypes and layouts are read from the sharded modules and tensors themselves, not from settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from slimefsdp.distributed.fsdp import parameter_groups
from slimefsdp.distributed.mesh import local_block, local_shard
from slimefsdp.results import Description, Difference, ReplicaCheck, Unit

if TYPE_CHECKING:  # only for mypy, because this package must not import models
    from slimefsdp.models.decoder import DecoderModel


def describe_model(policy: DecoderModel, axes: Mapping[str, int]) -> Description:
    """Describes the FSDP units of a policy, whose parameters must be sharded at this moment; not a collective.

    Args:
        axes: name of a mesh axis -> its size.
    """
    names = {id(parameter): name for name, parameter in policy.all_parameters()}
    modules_of: dict[int, list[str]] = {}
    groups: dict[int, tuple[Any, bool]] = {}
    for path, module in policy.named_modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                # several modules may form one unit
                modules_of.setdefault(id(group), []).append(path.removeprefix("hf.") or "(root)")
                # by default FSDP keeps the root gathered after forward; torch decides this in its first forward
                keeps = module is policy and module._get_fsdp_state()._auto_reshard_after_forward
                groups[id(group)] = group, group.post_forward_mesh_info is not None and not keeps
    return Description(
        rank=dist.get_rank(),
        mesh=dict(axes),
        attention=str(policy.attention.choice),
        units=tuple(
            _unit(", ".join(modules_of[key]), group, names, reshards=reshards)
            for key, (group, reshards) in groups.items()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.itemsize for buffer in policy.buffers()),
    )


def model_tensors(policy: DecoderModel, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields parameters as `model.*` and buffers as `buffer.*`, with `prefix` before the names."""
    yield from ((f"{prefix}model.{name}", parameter) for name, parameter in policy.all_parameters())
    yield from ((f"{prefix}buffer.{name.removeprefix('hf.')}", buffer) for name, buffer in policy.named_buffers())


def optimizer_tensors(policy: DecoderModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the optimiser's state as `optimizer.*`: moments and all other tensors that it keeps per parameter."""
    for name, parameter in policy.trained_weights():
        yield from ((f"optimizer.{name}.{key}", value) for key, value in optimizer.state[parameter].items())


def compare_replicas(
    tensors: Iterable[tuple[str, torch.Tensor]], numbers: Mapping[str, Any], group: dist.ProcessGroup
) -> ReplicaCheck:
    """Collective: compares the bits of tensors and numbers that several ranks hold.

    Args:
        tensors: named tensors; a shard is compared with the same rows on other ranks, a plain tensor with those of all
            ranks.
        numbers: plain JSON values that should be equal on all ranks.
        group: all ranks.
    """
    own = {f"state.{name}": hashlib.sha256(json.dumps(value).encode()).digest() for name, value in numbers.items()}
    for name, tensor in tensors:
        if _is_held_elsewhere(tensor):
            own[name + _rows(tensor)] = _digest(tensor)
    everyone: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    holders: dict[str, dict[bytes, list[int]]] = {}
    for rank, digests in enumerate(everyone):
        for name, digest in digests.items():
            holders.setdefault(name, {}).setdefault(digest, []).append(rank)
    return ReplicaCheck(
        checked=sum(sum(map(len, by_content.values())) > 1 for by_content in holders.values()),
        differences=tuple(
            Difference(name, tuple(sorted(map(tuple, by_content.values()), key=lambda ranks: (-len(ranks), ranks))))
            for name, by_content in holders.items()
            if len(by_content) > 1
        ),
    )


def _unit(name: str, group: Any, names: Mapping[int, str], *, reshards: bool) -> Unit:
    shards = [entry.sharded_param for entry in group.fsdp_params]
    # the trained parameters of a unit have one dtype; its frozen parameters may have another
    master = next((shard for shard in shards if shard.requires_grad), shards[0]).dtype
    compute = group.mp_policy.param_dtype or master
    return Unit(
        name=name,
        parameters=tuple(names[id(shard)] for shard in shards),
        frozen=tuple(names[id(shard)] for shard in shards if not shard.requires_grad),
        numel=sum(shard.numel() for shard in shards),
        local_bytes=sum(shard.to_local().numel() * shard.itemsize for shard in shards),
        master_dtype=_dtype_name(master),
        compute_dtype=_dtype_name(compute),
        reduce_dtype=_dtype_name(group.mp_policy.reduce_dtype or compute),
        reshard_after_forward=reshards,
        placements=" / ".join(dict.fromkeys(map(_layout, shards))),
    )


def _layout(tensor: DTensor) -> str:
    """Describes the layout of a tensor by axis, e.g. `dp_replicate 2 replicated, dp_cp 4 sharded on dim 0`."""
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    return ", ".join(
        f"{axis} {mesh.size(index)} "
        + ("replicated" if isinstance(placement, Replicate) else f"sharded on dim {placement.dim}")  # type: ignore[attr-defined]
        for index, (axis, placement) in enumerate(zip(axes, tensor.placements, strict=True))
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Returns whether another rank should hold the same content; shards with different rows may differ."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return tensor.to_local().numel() > 0 and any(
        isinstance(placement, Replicate) and mesh.size(axis) > 1 for axis, placement in enumerate(tensor.placements)
    )


def _rows(tensor: torch.Tensor) -> str:
    """Returns which part of the whole tensor a shard is, such as `[32:64]`; "" for a whole tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    block = local_block(tensor)
    if block.shape == tuple(tensor.shape):
        return ""
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in block.slices) + "]"


def _digest(tensor: torch.Tensor) -> bytes:
    """Returns the sha256 of the raw bytes; thus 0 and -0 differ, and NaNs with equal bits are equal."""
    # a copy, because numpy makes a storage non-resizable, so that a sleep could not free it
    copied = local_shard(tensor).detach().cpu().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(copied.reshape(-1).view(torch.uint8).numpy().data).digest()
