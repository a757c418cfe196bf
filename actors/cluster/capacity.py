"""Computes how many processes and GPUs a run needs, and checks that this machine or the cluster has them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError

RANKS_PER_CORE = 16  # limit on CPU processes per core; settings that need more are taken for a mistake
_DRIVER_S = 20.0  # timeout of nvidia-smi
# By default, glibc returns the memory of large freed tensors to the kernel, which zeroes it page by page for the next
# tensors. This takes an eighth of the CPU time of a step of SmolLM2-135M. With these settings the process keeps the
# memory, until a sleep returns it (`slimefsdp.distributed.memory_manager.give_back_free_memory`). All threads share one
# arena, since further arenas cannot hold tensors above 64 MiB.
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}


def processes_needed(config: RunConfig) -> int:
    """Returns the number of Ray actors that a run needs: actor ranks, separate reference or critic ranks, engines."""
    return config.ranks + _processes_beside_the_actor(config)


def _processes_beside_the_actor(config: RunConfig) -> int:
    return (config.rollout.engines if config.has_rollouts else 0) + _group_ranks_beside_the_actor(config)


def gpus_of_engines(config: RunConfig) -> int:
    """Returns the number of GPUs that the engines of `slimefsdp train` need for themselves.

    Colocated engines share the GPUs of ranks, and servers that are already running have their own.
    """
    rollout = config.rollout
    if not config.has_rollouts or rollout.placement == "colocated" or rollout.engine_urls is not None:
        return 0
    return rollout.engines * rollout.gpus_per_engine


def _group_ranks_beside_the_actor(config: RunConfig) -> int:
    reference = config.ranks_of("ref") if not config.reference.is_colocated else 0
    critic = config.ranks_of("critic") if not config.critic.is_colocated else 0
    return reference + critic


def with_cluster_ranks(config: RunConfig) -> RunConfig:
    """Resolves mesh.dp=auto by the connected cluster; returns other settings unchanged.

    On GPUs, the actor group takes all GPUs that engines, reference and critic groups leave. On CPUs, the group takes
    one rank per core, rounded down to a multiple of mesh.dp_replicate x mesh.cp, and at least that many ranks.

    Raises:
        ConfigError: the remaining GPUs are not a multiple of mesh.dp_replicate x mesh.cp x mesh.tp.
        ResourceError: no GPU is left.
    """
    if config.mesh.dp != "auto":
        return config
    import ray

    total = ray.cluster_resources()
    if config.mesh.device == "cpu" or (config.mesh.device == "auto" and not total.get("GPU")):
        cores = int(total["CPU"]) if config.cluster.address is not None else os.cpu_count() or 1
        copies = config.mesh.dp_replicate * config.mesh.ranks_per_pack
        resolved = config.with_ranks(max(1, cores // copies) * copies)
        check_machine(resolved)
        return resolved
    gpus, others = int(total.get("GPU", 0)), gpus_of_engines(config) + _group_ranks_beside_the_actor(config)
    if gpus <= others:
        raise ResourceError(
            f"mesh.dp=auto: engines and other groups need {others} GPUs, the cluster has {gpus}: none is left",
            field="mesh.dp",
            hint="use fewer engines, or a larger cluster",
        )
    return config.with_ranks(gpus - others)


def check_machine(config: RunConfig) -> None:
    """Checks that this machine may run as many CPU processes as the settings need; imports neither ray nor torch.

    Raises:
        ResourceError: there are more processes than RANKS_PER_CORE allows.
    """
    if config.mesh.dp == "auto":
        return  # `with_cluster_ranks` chooses the number and checks it
    if config.cluster.address is None:
        needed = processes_needed(config)
        check_cores(
            needed,
            config.mesh.device,
            asked=f"{config.mesh.product} with {needed - config.ranks} more processes",
            field="mesh.dp",
            hint="use fewer ranks or engines, or name a cluster.address",
        )


def check_cores(processes: int, device: str, *, asked: str, field: str, hint: str) -> None:
    """Checks that this machine may run this many processes, if they compute on CPUs; imports neither ray nor torch.

    Args:
        device: the value of mesh.device.
        asked: what needs the processes; the error's message begins with this text.
        field, hint: as in the error.

    Raises:
        ResourceError: there are more processes than cores x RANKS_PER_CORE.
    """
    cores = os.cpu_count() or 1
    on_cpu = device == "cpu" or (device == "auto" and not has_nvidia_driver())
    if on_cpu and processes > cores * RANKS_PER_CORE:
        raise ResourceError(
            f"{asked} needs {processes}, but {cores} cores run at most {cores * RANKS_PER_CORE} processes",
            field=field,
            hint=hint,
        )


def most_processes(config: RunConfig) -> int:
    """Returns `processes_needed`, or, if mesh.dp is auto, the most processes that this machine may run."""
    if config.mesh.dp == "auto":
        return (os.cpu_count() or 1) * RANKS_PER_CORE
    return processes_needed(config)


def check_gpus(config: RunConfig, *, engines: int, of_cluster: int | None = None) -> None:
    """Checks that there is a GPU for every process that needs one; uses neither Ray nor torch.

    The check passes if the number of GPUs is not known, or if it is 0 and mesh.device is auto.

    Args:
        engines: the number of GPUs that engines need for themselves.
        of_cluster: number of GPUs of the cluster at cluster.address; None means not known. Without cluster.address,
            this machine's GPUs are counted instead.

    Raises:
        ResourceError: there are too few GPUs; the error names mesh.dp and both numbers.
    """
    address = config.cluster.address
    available = of_cluster if address is not None else gpus_here()
    if config.mesh.device == "cpu" or available is None or (available == 0 and config.mesh.device == "auto"):
        return
    others = _group_ranks_beside_the_actor(config) + engines
    needed = others + (
        config.mesh.dp_replicate * config.mesh.ranks_per_pack if config.mesh.dp == "auto" else config.ranks
    )
    if needed > available:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "is not set")
        where = f"this machine shows {available} (CUDA_VISIBLE_DEVICES={visible})"
        raise ResourceError(
            f"{config.mesh.product} with {others} more processes needs {needed} GPUs"
            f"{' or more' * (config.mesh.dp == 'auto')}, and "
            + (where if address is None else f"the cluster at {address} has {available}"),
            field="mesh.dp",
            hint="use fewer ranks or engines, mesh.device=cpu, or name a cluster.address",
        )


def gpus_here(root: Path = Path("/")) -> int | None:
    """Returns the number of NVIDIA GPUs of this machine that CUDA_VISIBLE_DEVICES allows; None if it is not known.

    Args:
        root: the root of the file system to look at.
    """
    # either list may be too short, since device files are created at first use
    listed = max(
        sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in root.glob("dev/nvidia*")),
        sum(1 for _ in root.glob("proc/driver/nvidia/gpus/*")),
    )
    if listed == 0:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return listed
    return 0 if visible in ("", "NoDevFiles") else min(listed, len(visible.split(",")))


def compute_capabilities_here() -> list[str]:
    """Returns the compute capabilities of this machine's NVIDIA GPUs, such as 9.0, including hidden GPUs.

    This runs nvidia-smi, since a use of CUDA in this process would allocate memory on a device.
    """
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = process.stdout.split() if process.returncode == 0 else []
    # an old driver prints that it does not know the field
    return [line for line in lines if re.fullmatch(r"\d+\.\d+", line)]


def has_nvidia_driver() -> bool:
    """Returns whether this machine seems to have CUDA devices; does not import torch."""
    # Windows' subsystem for Linux has the second device instead of the first
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))
