"""Getting hold of Ray: a local cluster on loopback by default, or a running one by its address."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError


def processes_needed(config: RunConfig) -> int:
    """Ray actors that the command line starts for these settings: trainer ranks, reference ranks, engines."""
    reference = 0
    if config.needs_reference and config.reference.placement == "group":
        reference = (config.reference.dp or config.mesh.dp) * config.mesh.cp
    return config.ranks + reference + (config.rollout.engines if config.algorithm != "sft" else 0)


def check_machine(config: RunConfig) -> None:
    """Whether this machine may run that many CPU processes; answers without importing ray or torch.

    Raises:
        ResourceError: more processes than cluster.max_ranks_per_core allows.
    """
    cores = os.cpu_count() or 1
    needed, cap = processes_needed(config), cores * config.cluster.max_ranks_per_core
    on_cpu = config.mesh.device == "cpu" or (config.mesh.device == "auto" and not _has_nvidia_driver())
    if config.cluster.address is None and on_cpu and needed > cap:
        raise ResourceError(
            f"mesh.dp={config.mesh.dp} x mesh.cp={config.mesh.cp} with {needed - config.ranks} more processes needs "
            f"{needed}, but {cores} cores x cluster.max_ranks_per_core={config.cluster.max_ranks_per_core} allow {cap}",
            field="mesh.dp",
            hint="use fewer ranks or engines, raise cluster.max_ranks_per_core, or name a cluster.address",
        )


def _has_nvidia_driver() -> bool:
    return Path("/dev/nvidiactl").exists()  # asking torch would take its import


def connect(config: RunConfig) -> None:
    """Starts or joins the Ray cluster, unless this process is connected already.

    A local cluster declares as many logical CPUs as the run needs, since on a laptop ranks may outnumber cores.

    Raises:
        ResourceError: too many processes for this machine, or no cluster at `cluster.address`.
    """
    check_machine(config)
    if config.cluster.address is None:
        # undocumented switch of ray's, read when ray is first imported: it puts the cluster's sockets on loopback
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    # ray would otherwise warn that a future version stops hiding accelerators from actors that ask for none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    try:
        if config.cluster.address is not None:
            ray.init(address=config.cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            cpus = max(os.cpu_count() or 1, processes_needed(config) + 1)
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ResourceError(
            f"cannot reach a Ray cluster at {config.cluster.address or 'this machine'}: {error}",
            field="cluster.address",
            hint="start one with `ray start --head`, or leave cluster.address out for a local one",
        ) from error


def disconnect() -> None:
    """Leaves the cluster; a local one ends."""
    import ray

    ray.shutdown()
