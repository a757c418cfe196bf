"""Getting hold of Ray: a local cluster on loopback by default, or a running one by its address."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError


def processes_needed(config: RunConfig) -> int:
    """Ray actors that the command line starts for these settings: trainer ranks, reference ranks, engines."""
    return config.ranks + _processes_beside_the_actor(config)


def _processes_beside_the_actor(config: RunConfig) -> int:
    if config.algorithm == "sft":
        return 0
    reference = config.reference_ranks if config.reference.placement == "group" else 0
    critic = config.critic_ranks if config.critic.placement == "group" else 0
    return config.rollout.engines + reference + critic


def with_cluster_ranks(config: RunConfig) -> RunConfig:
    """The settings with mesh.dp=auto resolved by the connected cluster, or as they are when it is a number.

    On GPUs the actor group takes all that engines, reference and critic group leave. On CPUs, where ranks share cores,
    it takes one rank a core as far as the mesh divides them, at least one data rank.

    Raises:
        ConfigError: what is left is no multiple of mesh.dp_replicate x mesh.cp. ResourceError: nothing is left.
    """
    if config.mesh.dp != "auto":
        return config
    import ray

    total = ray.cluster_resources()
    if config.mesh.device == "cpu" or (config.mesh.device == "auto" and not total.get("GPU")):
        cores = int(total["CPU"]) if config.cluster.address is not None else os.cpu_count() or 1
        copies = config.mesh.dp_replicate * config.mesh.cp
        resolved = config.with_ranks(max(1, cores // copies) * copies)
        check_machine(resolved)
        return resolved
    gpus, others = int(total.get("GPU", 0)), _processes_beside_the_actor(config)
    if gpus <= others:
        raise ResourceError(
            f"mesh.dp=auto: engines and other groups need {others} GPUs, the cluster has {gpus}: none is left",
            field="mesh.dp",
            hint="use fewer engines, or a larger cluster",
        )
    return config.with_ranks(gpus - others)


def check_machine(config: RunConfig) -> None:
    """Whether this machine may run that many CPU processes; answers without importing ray or torch.

    Raises:
        ResourceError: more processes than cluster.max_ranks_per_core allows.
    """
    if config.mesh.dp == "auto":
        return  # `with_cluster_ranks` chooses, and checks the choice
    cores = os.cpu_count() or 1
    per_core = config.cluster.max_ranks_per_core
    needed, cap = processes_needed(config), cores * per_core
    on_cpu = config.mesh.device == "cpu" or (config.mesh.device == "auto" and not _has_nvidia_driver())
    if config.cluster.address is None and on_cpu and needed > cap:
        raise ResourceError(
            f"mesh.dp_replicate={config.mesh.dp_replicate} x mesh.dp={config.mesh.dp} x mesh.cp={config.mesh.cp} with "
            f"{needed - config.ranks} more processes needs {needed}, but {cores} cores x "
            f"cluster.max_ranks_per_core={per_core} allow {cap}",
            field="mesh.dp",
            hint="use fewer ranks or engines, raise cluster.max_ranks_per_core, or name a cluster.address",
        )


def _most_processes(config: RunConfig) -> int:
    """As `processes_needed`, or as many as a machine may run while mesh.dp=auto is not resolved."""
    if config.mesh.dp == "auto":
        return (os.cpu_count() or 1) * config.cluster.max_ranks_per_core
    return processes_needed(config)


def _has_nvidia_driver() -> bool:
    return Path("/dev/nvidiactl").exists()  # asking torch would take its import


def _require_token(address: str) -> None:
    """A cluster that other machines can reach runs whatever code it is sent: it must ask for a token."""
    host = address.rpartition("://")[2].rsplit(":", 1)[0]
    if host not in ("auto", "local", "localhost", "127.0.0.1", "[::1]") and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ResourceError(
            f"cluster.address={address} is not on this machine, and RAY_AUTH_MODE is not `token`",
            field="cluster.address",
            hint="start the cluster with scripts/launch_cluster.sh and set RAY_AUTH_MODE=token here",
        )


def connect(config: RunConfig) -> None:
    """Starts or joins the Ray cluster, unless this process is connected already.

    A local cluster declares as many logical CPUs as the run needs, since on a laptop ranks may outnumber cores.

    Raises:
        ResourceError: too many processes for this machine, no cluster at `cluster.address`, or one without a token.
    """
    check_machine(config)
    address = config.cluster.address
    if address is None:
        # undocumented switch of ray's that puts a cluster's sockets on loopback; a test looks at the sockets
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    else:
        _require_token(address)
    # ray would otherwise warn that a future version stops hiding accelerators from actors that ask for none
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray
    from ray._private import ray_constants

    if ray.is_initialized():
        return
    if address is None:
        ray_constants.ENABLE_RAY_CLUSTER = False  # the same, where ray was imported before this call
    try:
        if address is not None:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            cpus = max(os.cpu_count() or 1, _most_processes(config) + 1)
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # ray raises that very class where a node does not come up
        if address is None:
            raise ResourceError(
                f"Ray did not start on this machine: {error}",
                field="cluster.address",
                hint="the machine may be overloaded or out of memory: end what else runs on it, and try again",
            ) from error
        raise ResourceError(
            f"cannot reach a Ray cluster at {address}: {error}",
            field="cluster.address",
            hint="start one with `ray start --head`, or leave cluster.address out for a local one",
        ) from error


def disconnect() -> None:
    """Leaves the cluster; a local one ends."""
    import ray

    ray.shutdown()
