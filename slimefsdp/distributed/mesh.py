"""Starts the process group and builds the (dp_replicate, dp, cp) device mesh."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp import heartbeat
from slimefsdp.distributed.collectives import collectives_begun
from slimefsdp.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Holds the axes of a group of ranks, row-major, with cp ranks adjacent.

    A batch is split over dp_replicate x dp data ranks, and a pack over cp ranks. Parameters are sharded over dp x cp
    ranks; dp_replicate is the number of copies of the model. Gradients are summed over all ranks.
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

    @property
    def data_ranks(self) -> int:
        """Returns the number of ranks that get packs of their own, dp_replicate x dp."""
        return self.dp_replicate * self.dp

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
    is_whole_on_every_rank: bool = False,
    timeout_s: float | None = None,
) -> Mesh:
    """Returns the (dp_replicate, dp, cp) mesh over the ranks of the process group.

    Meshes are cached by arguments: torch frees the threads and connections of a mesh's groups only with the process
    group of all ranks, so a process with many Trainers in turn would accumulate them.

    Args:
        is_whole_on_every_rank: do not shard parameters; every rank has a copy of the model.
        timeout_s: timeout of collectives in the groups made here; None means torch's default.

    Raises:
        ConfigError: dp_replicate x dp x cp is not the number of ranks.
    """
    world_size, needed = dist.get_world_size(), dp_replicate * dp * cp
    if needed != world_size:
        copies = dp_replicate * cp
        way_out = f"set mesh.dp={world_size // copies}, or " if world_size % copies == 0 else ""
        raise ConfigError(
            f"mesh.dp_replicate={dp_replicate} x mesh.dp={dp} x mesh.cp={cp} needs {needed} ranks, but {world_size} "
            "were started",
            field="mesh.dp",
            hint=f"{way_out}start {needed} ranks",
        )
    world = dist.group.WORLD
    if any(mesh_world is not world for mesh_world, *_ in _meshes):  # meshes of a destroyed process group
        _meshes.clear()
    key = (world, dp, cp, device, dp_replicate, is_whole_on_every_rank, timeout_s)
    if key not in _meshes:
        _meshes[key] = _new_mesh(dp, cp, device, dp_replicate, is_whole_on_every_rank, timeout_s)
    return _meshes[key]


_meshes: dict[tuple[Any, ...], Mesh] = {}  # (process group of all ranks, arguments of `build_mesh`) -> mesh


def _new_mesh(
    dp: int, cp: int, device: torch.device, dp_replicate: int, is_whole_on_every_rank: bool, timeout_s: float | None
) -> Mesh:
    world_size = dist.get_world_size()
    axes = init_device_mesh(device.type, (dp_replicate, dp, cp), mesh_dim_names=("dp_replicate", "dp", "cp"))
    copies = world_size if is_whole_on_every_rank else dp_replicate
    flat = axes._flatten("dp_cp" if copies == 1 else "all_ranks")
    fsdp = flat
    if copies > 1:
        fsdp = init_device_mesh(device.type, (copies, world_size // copies), mesh_dim_names=("dp_replicate", "dp_cp"))
    cp_group = axes["cp"].get_group()
    if timeout_s is not None:  # a mesh gives its groups torch's default timeout, not that of the process group
        for mesh in (axes, flat, fsdp):
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


def local_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns the range [start, end) of dim 0 in this rank's shard; an empty range starts at the tensor's end."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.shape[0] if tensor.ndim else 1
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]
