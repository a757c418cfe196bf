"""Starts the process group, builds the (dp_replicate, dp, cp, tp) device mesh, and locates shards in global tensors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from slimefsdp import heartbeat
from slimefsdp.distributed.collectives import collectives_begun
from slimefsdp.errors import ConfigError


@dataclass(frozen=True)
class CutMesh:
    """Holds two axes for parameters that are cut over tp or ep ranks, and sharded by FSDP over the other ranks."""

    size: int
    rank: int
    axis: DeviceMesh  # the tp or ep ranks, which have one part each
    fsdp: DeviceMesh  # mesh for FSDP over the ranks with the same part: one axis, or (replicate, shard)

    @property
    def group(self) -> dist.ProcessGroup:
        return self.axis.get_group()


@dataclass(frozen=True)
class Mesh:
    """Holds the axes of a group of ranks, row-major, with tp ranks adjacent.

    A batch is split over dp_replicate x dp data ranks, and a pack over cp ranks. A cp rank's tokens are split over its
    tp ranks. Each block, and the head, first gathers these tokens, so that every tp rank computes its part of the
    matrices for all of them (see `slimefsdp.distributed.tensor_parallel`).

    Parameters are sharded over dp x cp x tp ranks; dp_replicate is the number of copies of the model. Gradients are
    summed over all ranks.
    """

    dp_replicate: int
    dp: int
    cp: int
    data_rank: int  # this rank's index among the data ranks
    cp_rank: int
    device: torch.device
    group: dist.ProcessGroup  # all ranks
    fsdp: DeviceMesh  # mesh for FSDP: one axis to shard over, or (replicate, shard)
    cp_group: dist.ProcessGroup  # a real group even for one rank, because None means all ranks in torch
    tp: CutMesh | None = None  # None for one tp rank
    ep: CutMesh | None = None  # None for one ep rank

    @property
    def data_ranks(self) -> int:
        """Returns the number of ranks that get packs of their own, dp_replicate x dp."""
        return self.dp_replicate * self.dp

    @property
    def axes(self) -> dict[str, int]:
        """Returns the size of each axis by its name in the settings; tp and ep are left out if they are 1."""
        axes = {"dp_replicate": self.dp_replicate, "dp": self.dp, "cp": self.cp}
        axes |= {} if self.tp is None else {"tp": self.tp.size}
        return axes | ({} if self.ep is None else {"ep": self.ep.size})

    @property
    def is_first_of_pack(self) -> bool:
        """Returns whether this rank counts its pack's outputs; all ranks that share a pack hold the same outputs."""
        return self.cp_rank == 0 and (self.tp is None or self.tp.rank == 0)

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """Returns the group of ranks whose shards make up this rank's copy of the model."""
        return self.fsdp.get_group(self.fsdp.ndim - 1)

    @property
    def is_first_copy(self) -> bool:
        """Returns whether this rank belongs to the copy of the model that is written to disk; all copies are equal."""
        return self.fsdp.ndim == 1 or self.fsdp.get_local_rank(0) == 0


def choose_device(setting: str) -> torch.device:
    """Returns this rank's device for the setting `mesh.device`; auto selects CUDA if available.

    Raises:
        ConfigError: the setting is cuda, and there is no CUDA device.
    """
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "mesh.device=cuda, but torch sees no CUDA device", field="mesh.device", hint="use auto or cpu"
        )
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def start_process_group(
    device: torch.device,
    *,
    rank: int,
    world_size: int,
    address: str,
    port: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> None:
    """Joins the process group of all ranks; rank 0 listens on `address` only.

    torch's own `tcp://` rendezvous would listen on every interface, so rank 0 passes a bound socket to its store.

    Args:
        listener: rank 0's socket, if it already listens at address and port; the store takes it over. If None, rank 0
            binds a socket, which fails if another process has taken the port.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
        if listener is None:
            listener = socket.create_server((address, port), backlog=max(128, world_size))
        store = dist.TCPStore(
            address, listener.getsockname()[1], world_size, is_master=True, timeout=timeout,
            wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True,
        )  # fmt: skip
    else:
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    heartbeat.count_collectives(partial(collectives_begun, device.type))


def start_process_group_from_environment(device: torch.device, *, timeout_s: float) -> None:
    """Joins the process group of ranks that torchrun started, or makes a group of one rank without a launcher."""
    if "RANK" not in os.environ:
        start_process_group(device, rank=0, world_size=1, address="127.0.0.1", port=0, timeout_s=timeout_s)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def build_mesh(
    dp: int,
    cp: int,
    device: torch.device,
    *,
    dp_replicate: int = 1,
    tp: int = 1,
    ep: int = 1,
    is_whole_on_every_rank: bool = False,
    timeout_s: float | None = None,
) -> Mesh:
    """Returns the (dp_replicate, dp, cp, tp) mesh over the ranks of the process group.

    Meshes are cached by arguments: torch frees the threads and connections of a mesh's groups only with the process
    group of all ranks, so a process with many Trainers in turn would accumulate them.

    Args:
        ep: the number of adjacent ranks, among the dp x cp x tp ranks of a copy, over which experts are divided.
        is_whole_on_every_rank: do not shard parameters; every rank has a copy of the model.
        timeout_s: timeout of collectives in the groups made here; None means torch's default.

    Raises:
        ConfigError: dp_replicate x dp x cp x tp is not the number of ranks, or ep does not divide the ranks of a copy.
    """
    world_size, needed = dist.get_world_size(), dp_replicate * dp * cp * tp
    if needed != world_size:
        copies = dp_replicate * cp * tp
        way_out = f"set mesh.dp={world_size // copies}, or " if world_size % copies == 0 else ""
        raise ConfigError(
            f"mesh.dp_replicate={dp_replicate} x mesh.dp={dp} x mesh.cp={cp}{f' x mesh.tp={tp}' if tp > 1 else ''} "
            f"needs {needed} ranks, but {world_size} were started",
            field="mesh.dp",
            hint=f"{way_out}start {needed} ranks",
        )
    if (world_size // dp_replicate) % ep:
        raise ConfigError(
            f"mesh.ep={ep} does not divide the {world_size // dp_replicate} ranks of a copy of the model",
            field="mesh.ep",
            hint="set it to a divisor of dp x cp x tp",
        )
    world = dist.group.WORLD
    if any(mesh_world is not world for mesh_world, *_ in _meshes):  # meshes of a destroyed process group
        _meshes.clear()
    key = (world, dp, cp, device, dp_replicate, tp, ep, is_whole_on_every_rank, timeout_s)
    if key not in _meshes:
        _meshes[key] = _new_mesh((dp_replicate, dp, cp, tp), ep, device, is_whole_on_every_rank, timeout_s)
    return _meshes[key]


_meshes: dict[tuple[Any, ...], Mesh] = {}  # (process group of all ranks, arguments of `build_mesh`) -> mesh


def _new_mesh(
    sizes: tuple[int, int, int, int],
    ep: int,
    device: torch.device,
    is_whole_on_every_rank: bool,
    timeout_s: float | None,
) -> Mesh:
    world_size = dist.get_world_size()
    dp_replicate, dp, cp, tp = sizes
    axes = init_device_mesh(device.type, sizes, mesh_dim_names=("dp_replicate", "dp", "cp", "tp"))
    copies = world_size if is_whole_on_every_rank else dp_replicate
    shard_name = "dp_cp" if tp == 1 else "dp_cp_tp"
    flat = axes._flatten(shard_name if copies == 1 else "all_ranks")
    fsdp = flat
    if copies > 1:
        fsdp = init_device_mesh(
            device.type, (copies, world_size // copies), mesh_dim_names=("dp_replicate", shard_name)
        )
    meshes = [axes, flat, fsdp]
    cut: dict[int, CutMesh] = {}  # size -> mesh; if tp == ep both have the same ranks, and share a mesh, as FSDP needs
    for size in sorted({tp, ep} - {1}):  # every rank creates the meshes in the same order
        # one root, because FSDP concatenates the two meshes of a parameter
        root = init_device_mesh(
            device.type,
            (dp_replicate, world_size // dp_replicate // size, size),
            mesh_dim_names=("dp_replicate", "rest", "cut"),
        )
        meshes.append(root)
        rest = root["rest"] if copies == 1 else root["dp_replicate", "rest"]
        cut[size] = CutMesh(size, root.get_local_rank("cut"), root["cut"], rest)
    cp_group = axes["cp"].get_group()
    if timeout_s is not None:  # a mesh gives its groups torch's default timeout, not that of the process group
        for mesh in meshes:
            for axis in range(mesh.ndim):
                _set_pg_timeout(timedelta(seconds=timeout_s), mesh.get_group(axis))
    if cp > 1 and device.type == "cuda":
        # NCCL creates a group's communicator in the first collective; point-to-point messages would not create it
        dist.all_reduce(torch.zeros(1, device=device), group=cp_group)
    return Mesh(
        dp_replicate=dp_replicate,
        dp=dp,
        cp=cp,
        data_rank=axes.get_local_rank("dp_replicate") * dp + axes.get_local_rank("dp"),
        cp_rank=axes.get_local_rank("cp"),
        device=device,
        group=flat.get_group(),
        fsdp=fsdp,
        cp_group=cp_group,
        tp=cut.get(tp),
        ep=cut.get(ep),
    )


def gather_pairs(local: torch.Tensor, pairs: torch.Tensor, num_pairs: int, mesh: Mesh) -> torch.Tensor:
    """Returns values for all pairs of a pack on every cp rank, differentiable through this rank's own values.

    Args:
        local: [..., local_pairs], this rank's values.
        pairs: [local_pairs] int64, indices of these pairs in the pack. Each pair of the pack is on exactly one cp rank.

    Returns:
        [..., num_pairs]. Every rank computes the same loss from these values, and backpropagates through its own.
    """
    if mesh.cp == 1:
        return local
    values = local.new_zeros(*local.shape[:-1], num_pairs)
    values[..., pairs] = local.detach()
    dist.all_reduce(values, group=mesh.cp_group)
    return values.index_copy(-1, pairs, local)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's rows of a sharded tensor, or the whole tensor; the result shares memory with it."""
    if not isinstance(tensor, DTensor):
        return tensor
    # without autograd the shard itself suffices; to_local() of a parameter makes a view, at ten times the cost
    return tensor.to_local() if torch.is_grad_enabled() else tensor._local_tensor


@dataclass(frozen=True, slots=True)
class Block:
    """Locates a part of a global tensor: in each dimension d the indices [start[d], start[d] + shape[d])."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    @property
    def rows(self) -> tuple[int, int]:
        """Returns the range [start, end) of dim 0; a 0-d tensor counts as one row."""
        return (self.start[0], self.start[0] + self.shape[0]) if self.shape else (0, 1)

    def is_rows_of(self, shape: Sequence[int]) -> bool:
        """Returns whether the block consists of whole rows of dim 0, so that its numbers follow each other."""
        return tuple(self.shape[1:]) == tuple(shape[1:])


def local_block(tensor: torch.Tensor) -> Block:
    """Returns this rank's part of a sharded tensor, or the whole tensor; an empty part starts at the end of dim 0."""
    if not isinstance(tensor, DTensor):
        return Block((0,) * tensor.ndim, tuple(tensor.shape))
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a tensor on ranks outside its mesh"
    return _block_at(tensor, coordinate)


def is_cut(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is not only sharded, but also cut over tp or ep.

    Then successive ranks need not hold successive rows.
    """
    return isinstance(tensor, DTensor) and sum(not isinstance(placed, Replicate) for placed in tensor.placements) > 1


def blocks_of_ranks(tensor: DTensor, group: dist.ProcessGroup) -> list[Block]:
    """Returns the part of a sharded tensor that each rank of `group` holds, in the order of the group's ranks."""
    mesh = tensor.device_mesh.mesh
    return [_block_at(tensor, (mesh == rank).nonzero()[0].tolist()) for rank in dist.get_process_group_ranks(group)]


def _block_at(tensor: DTensor, coordinate: Sequence[int]) -> Block:
    """Returns the part of a tensor at a coordinate of its mesh.

    The tp or ep axis is the last one of a mesh, and FSDP shards dim 0 of what a rank of this axis holds; so axes are
    applied from last to first. Torch's `compute_local_shape_and_global_offset` returns the same, but lists every row.
    """
    start, shape = [0] * tensor.ndim, list(tensor.shape)
    for axis in reversed(range(len(tensor.placements))):
        placement = tensor.placements[axis]
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard | _StridedShard), placement
        dim, count = placement.dim, tensor.device_mesh.size(axis)
        chunk = -(-shape[dim] // count)
        offset = min(coordinate[axis] * chunk, shape[dim])
        start[dim], shape[dim] = start[dim] + offset, min(chunk, shape[dim] - offset)
    return Block(tuple(start), tuple(shape))
