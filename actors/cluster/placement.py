"""Where worker processes go: one placement group, one bundle a rank, in which an engine may be beside it."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from actors.cluster.allocator import ALLOCATOR
from actors.cluster.ray_errors import cluster_is_gone, require_cluster
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError
from slimefsdp.rpc import Role


def reserve(ranks: int, *, gpus_per_rank: int, timeout_s: float, guests: int = 0) -> PlacementGroup:
    """A placement group with one bundle a rank, packed onto as few nodes as possible, ready to use.

    Args:
        guests: so many of the first bundles have a CPU for one more process; it shares the rank's GPU.

    Raises:
        ResourceError: the cluster does not have that much, or not free within the time, or it is gone.
    """
    require_cluster()
    bundle: dict[str, float] = {"CPU": 1.0}
    if gpus_per_rank:
        bundle["GPU"] = float(gpus_per_rank)
    total = ray.cluster_resources()
    for kind, amount in bundle.items():
        needed = amount * ranks + (guests if kind == "CPU" else 0)
        if total.get(kind, 0.0) < needed:
            with_guests = f" with {guests} engines beside them" if guests else ""
            raise ResourceError(
                f"{ranks} ranks{with_guests} need {needed:g} {kind}, the cluster has {total.get(kind, 0.0):g}",
                field="mesh.dp",
                hint="use fewer ranks, or a larger cluster",
            )
    shared = {**bundle, "CPU": 2.0}
    group = placement_group([shared if rank < guests else bundle for rank in range(ranks)], strategy="PACK")
    deadline = time.monotonic() + timeout_s
    try:
        while not group.wait(timeout_seconds=min(1.0, timeout_s)):  # signals are handled in between
            if time.monotonic() >= deadline:
                raise ResourceError(
                    f"{ranks} ranks of {bundle} were not free within {timeout_s:g} s",
                    field="cluster.launch_timeout_s",
                    hint="end other jobs on the cluster, or raise the timeout",
                )
    except BaseException:  # else bundles that become free later would be taken for nobody
        release(group)
        raise
    return group


def release(group: PlacementGroup) -> None:
    """Gives the bundles back; processes in them end."""
    if not cluster_is_gone():
        remove_placement_group(group)


def is_alive(group: PlacementGroup) -> bool:
    """Whether processes can be started in it now: it was not removed, and no node of it was lost."""
    return bool(placement_group_table(group).get("state") == "CREATED")


class PlacementGroups:
    """The placement groups of a job by role, which stay reserved while the processes in them are replaced."""

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def reserve(
        self, role: str, ranks: int, *, gpus_per_rank: int, timeout_s: float, guests: int = 0
    ) -> PlacementGroup:
        """The role's placement group; as the function `reserve` where there is none yet, or none any more."""
        require_cluster()
        if role in self._groups and not is_alive(self._groups[role]):
            release(self._groups.pop(role))
        if role not in self._groups:
            self._groups[role] = reserve(ranks, gpus_per_rank=gpus_per_rank, timeout_s=timeout_s, guests=guests)
        return self._groups[role]

    def reserve_for_ranks(self, config: RunConfig, role: Role) -> tuple[PlacementGroup, float]:
        """Reserves places for the ranks of a role; also returns the share of a GPU that each rank asks for.

        With rollout.placement=colocated the engines are in the first places of the actor's ranks, one in each, and ask
        for one half of the GPU each.
        """
        ranks = {"actor": config.ranks, "ref": config.reference_ranks, "critic": config.critic_ranks}[role]
        is_shared = role == "actor" and config.has_rollouts and config.rollout.placement == "colocated"
        gpus, timeout_s = gpus_per_rank(config.mesh.device), config.cluster.launch_timeout_s
        guests = config.rollout.engines if is_shared else 0
        placement = self.reserve(role, ranks, gpus_per_rank=gpus, timeout_s=timeout_s, guests=guests)
        return placement, gpus / 2 if is_shared else gpus

    def release(self) -> None:
        """Gives all of them back; idempotent."""
        while self._groups:
            release(self._groups.popitem()[1])


def gpus_per_rank(device: str) -> int:
    """Accelerators a rank asks for under `mesh.device`: auto takes one where the cluster has any."""
    if device == "cpu":
        return 0
    return 1 if device == "cuda" or ray.cluster_resources().get("GPU", 0.0) > 0 else 0


def actor_options(group: PlacementGroup, bundle: int, gpus: float) -> dict[str, Any]:
    """Options that put an actor into one bundle, with no silent restart; without a GPU one thread, and `ALLOCATOR`."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,  # a restarted actor would come back without its state
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **ALLOCATOR}} if gpus == 0 else {},
    }
