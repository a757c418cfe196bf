"""The process group and the (dp, cp) device mesh: built once, passed on, never global."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slimefsdp.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """The axes of a group of ranks, row-major with cp ranks adjacent. Parameters are sharded over all of them."""

    dp: int
    cp: int
    dp_rank: int
    cp_rank: int
    device: torch.device
    flat: DeviceMesh  # all ranks: what parameters are sharded over
    cp_group: dist.ProcessGroup  # a real group also for one rank, since torch takes None for the whole world

    @property
    def group(self) -> dist.ProcessGroup:
        """All ranks."""
        return self.flat.get_group()


def choose_device(setting: str) -> torch.device:
    """The device of this rank for `mesh.device`: auto takes CUDA where there is one.

    Raises:
        ConfigError: cuda is asked for and there is none.
    """
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "mesh.device=cuda, but torch sees no CUDA device", field="mesh.device", hint="use auto or cpu"
        )
    if setting == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def start_process_group(
    device: torch.device, *, rank: int, world_size: int, address: str, port: int, timeout_s: float
) -> None:
    """Joins the ranks; rank 0 listens on `address` alone.

    torch's own `tcp://` rendezvous listens on every interface, so rank 0 hands its store a bound socket.
    """
    timeout = timedelta(seconds=timeout_s)
    if rank == 0:
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


def start_process_group_from_environment(device: torch.device, *, timeout_s: float) -> None:
    """Joins the ranks that torchrun started, or makes a group of one where no launcher did."""
    if "RANK" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        start_process_group(device, rank=0, world_size=1, address="127.0.0.1", port=port, timeout_s=timeout_s)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))


def build_mesh(dp: int, cp: int, device: torch.device) -> Mesh:
    """The (dp, cp) mesh over the ranks of the process group.

    Raises:
        ConfigError: dp x cp is not the number of ranks.
    """
    world_size = dist.get_world_size()
    if dp * cp != world_size:
        raise ConfigError(
            f"mesh.dp={dp} x mesh.cp={cp} needs {dp * cp} ranks, but {world_size} were started",
            field="mesh.dp",
            hint=f"set mesh.dp={max(1, world_size // cp)}, or start {dp * cp} ranks",
        )
    mesh = init_device_mesh(device.type, (dp, cp), mesh_dim_names=("dp", "cp"))
    return Mesh(
        dp=dp,
        cp=cp,
        dp_rank=mesh.get_local_rank("dp"),
        cp_rank=mesh.get_local_rank("cp"),
        device=device,
        flat=mesh._flatten("dp_cp"),
        cp_group=mesh["cp"].get_group(),
    )


def gather_pairs(local: torch.Tensor, pairs: torch.Tensor, num_pairs: int, mesh: Mesh) -> torch.Tensor:
    """Per-token values of the whole pack on every cp rank, differentiable through this rank's own ones.

    Args:
        local: [local_pairs] of this rank.
        pairs: [local_pairs] int64, their places in the pack; over the cp ranks they partition range(num_pairs).

    Returns:
        [num_pairs]; every rank evaluates the same loss on it, and each backpropagates its own share.
    """
    if mesh.cp == 1:
        return local
    own = local.new_zeros(num_pairs).index_put((pairs,), local)
    everyone = own.detach().clone()
    dist.all_reduce(everyone, group=mesh.cp_group)
    return own + (everyone - own.detach())
