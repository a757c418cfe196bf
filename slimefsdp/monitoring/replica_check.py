"""Looking inside a sharded model: what its units are on this rank, and whether ranks agree on what they hold in common.

Nothing here trusts a setting: units, dtypes and layouts are read from the sharded modules and tensors themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.distributed.fsdp import parameter_groups
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.results import Description, Difference, ReplicaCheck, Unit

if TYPE_CHECKING:  # a name for mypy only: models lie above this package
    from slimefsdp.models.decoder import DecoderModel


def describe_model(policy: DecoderModel, axes: Mapping[str, int]) -> Description:
    """The sharded units of a policy, whose parameters must be sharded at the moment; no collective.

    Args:
        axes: of the mesh, with their sizes.
    """
    names = {id(parameter): name for name, parameter in policy.all_parameters()}
    modules_of: dict[int, list[str]] = {}
    groups: dict[int, tuple[Any, bool]] = {}
    for path, module in policy.named_modules():
        if isinstance(module, FSDPModule):
            for group in parameter_groups(module):
                # several modules may have been wrapped as one unit
                modules_of.setdefault(id(group), []).append(path.removeprefix("hf.") or "(root)")
                # left alone, the outermost unit stays gathered, which torch settles at its first forward
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
    """Parameters as `model.*` and buffers as `buffer.*`, each after `prefix`."""
    yield from ((f"{prefix}model.{name}", parameter) for name, parameter in policy.all_parameters())
    yield from ((f"{prefix}buffer.{name.removeprefix('hf.')}", buffer) for name, buffer in policy.named_buffers())


def optimizer_tensors(policy: DecoderModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The optimiser's state as `optimizer.*`: moments, and whatever else it keeps for each parameter."""
    for name, parameter in policy.trained_weights():
        yield from ((f"optimizer.{name}.{key}", value) for key, value in optimizer.state[parameter].items())


def compare_replicas(
    tensors: Iterable[tuple[str, torch.Tensor]], numbers: Mapping[str, Any], group: dist.ProcessGroup
) -> ReplicaCheck:
    """Collective: whether all ranks that hold the same thing hold the same bits of it.

    Args:
        tensors: named; a shard is compared with the same rows on other ranks, a plain tensor with that of every rank.
        numbers: plain JSON values that all ranks should hold alike.
        group: all ranks.
    """
    own = {f"state.{name}": hashlib.sha256(json.dumps(value).encode()).digest() for name, value in numbers.items()}
    for name, tensor in tensors:
        if _is_held_elsewhere(tensor):
            own[name + _rows(tensor)] = _digest(tensor)
    everyone: list[dict[str, bytes]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, own, group=group)
    holders: dict[str, dict[bytes, list[int]]] = {}
    for rank, held in enumerate(everyone):
        for name, digest in held.items():
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
    # what is trained has one dtype; what is frozen beside it may be stored in another
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
    """Per axis: `dp_replicate 2 replicated, dp_cp 4 sharded on dim 0`."""
    mesh = tensor.device_mesh
    axes = mesh.mesh_dim_names or [f"axis {axis}" for axis in range(mesh.ndim)]
    return ", ".join(
        f"{axis} {mesh.size(index)} " + (f"sharded on dim {place.dim}" if isinstance(place, Shard) else "replicated")
        for index, (axis, place) in enumerate(zip(axes, tensor.placements, strict=True))
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_held_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether another rank should hold the same; a healthy shard differs from those of other rows."""
    if not isinstance(tensor, DTensor):
        return True
    mesh = tensor.device_mesh
    return tensor.to_local().numel() > 0 and any(
        isinstance(placement, Replicate) and mesh.size(axis) > 1 for axis, placement in enumerate(tensor.placements)
    )


def _rows(tensor: torch.Tensor) -> str:
    """Returns which part of the whole tensor a shard is, as an index: `[32:64]`; nothing for the whole."""
    if not isinstance(tensor, DTensor):
        return ""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) == tuple(tensor.shape):
        return ""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True)) + "]"


def _digest(tensor: torch.Tensor) -> bytes:
    """sha256 of the raw bytes: two zeros of different sign differ, two equal NaNs do not."""
    # a copy, since memory that numpy has seen could never be freed by a sleep
    copied = local_shard(tensor).detach().cpu().clone(memory_format=torch.contiguous_format)
    return hashlib.sha256(copied.reshape(-1).view(torch.uint8).numpy().data).digest()
