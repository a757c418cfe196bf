"""Places worker processes: a placement group with one bundle per rank, which may also have room for an engine."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from actors.cluster.capacity import ALLOCATOR
from actors.cluster.ray_errors import cluster_is_gone, require_cluster
from slimefsdp.config import RunConfig
from slimefsdp.errors import ResourceError
from slimefsdp.rpc import Role


def reserve(ranks: int, *, gpus_per_rank: int, timeout_s: float, guests: int = 0) -> PlacementGroup:
    """Reserves a placement group with one bundle per rank on as few nodes as possible, and waits until it is ready.

    Args:
        guests: this many of the first bundles get a CPU for one more process, which shares the rank's GPU.

    Raises:
        ResourceError: the cluster has too few resources, the resources were not free in time, or the cluster is gone.
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
        while not group.wait(timeout_seconds=min(1.0, timeout_s)):  # short waits, so that signals are handled
            if time.monotonic() >= deadline:
                raise ResourceError(
                    f"{ranks} ranks of {bundle} were not free within {timeout_s:g} s",
                    field="cluster.launch_timeout_s",
                    hint="end other jobs on the cluster, or raise the timeout",
                )
    except BaseException:  # otherwise bundles that become free later would stay reserved without a use
        release(group)
        raise
    return group


def bundles_by_node(group: PlacementGroup) -> tuple[list[int], list[str]]:
    """Returns the group's bundles in the order of the ranks, and the node of each; Ray chooses nodes in any order.

    Ranks of one node are adjacent, so ranks that communicate most (tp, then cp) are within a node where possible.
    """
    node_of = placement_group_table(group)["bundles_to_node_id"]
    nodes = list(dict.fromkeys(node_of[bundle] for bundle in sorted(node_of)))
    order = sorted(node_of, key=lambda bundle: (nodes.index(node_of[bundle]), bundle))
    return order, [node_of[bundle] for bundle in order]


def describe_nodes(nodes: Sequence[str], *, tp: int, cp: int, copies: int) -> str:
    """Returns a line about the ranks that communicate most and are on several nodes; "" if all ranks are on one node.

    Args:
        nodes: the node of each rank.
        tp, cp: sizes of the mesh.
        copies: mesh.dp_replicate of this group of ranks.
    """
    if len(set(nodes)) == 1:
        return ""
    groups = {"mesh.tp": tp, "mesh.cp": cp * tp if cp > 1 else 1}
    groups["a copy of the model"] = len(nodes) // copies if copies > 1 else 1
    where = []
    for name, size in groups.items():
        crossing = [start for start in range(0, len(nodes), size) if len(set(nodes[start : start + size])) > 1]
        if crossing:
            where.append(f"{name} has ranks on several nodes, such as ranks {crossing[0]} to {crossing[0] + size - 1}")
        elif size > 1:
            where.append(f"{name} stays within a node")
    return f"{len(nodes)} ranks on {len(set(nodes))} nodes{': ' if where else ''}{'; '.join(where)}"


def release(group: PlacementGroup) -> None:
    """Releases the bundles; the processes in them end."""
    if not cluster_is_gone():
        remove_placement_group(group)


def is_alive(group: PlacementGroup) -> bool:
    """Returns whether processes can be started in a group: it was not removed, and has lost none of its nodes."""
    return bool(placement_group_table(group).get("state") == "CREATED")


class PlacementGroups:
    """The placement groups of a job by role; they stay reserved while processes in them are replaced."""

    def __init__(self) -> None:
        self._groups: dict[str, PlacementGroup] = {}

    def reserve(
        self, role: str, ranks: int, *, gpus_per_rank: int, timeout_s: float, guests: int = 0
    ) -> PlacementGroup:
        """Returns the role's placement group; reserves it with the function `reserve` if it is missing or lost."""
        require_cluster()
        if role in self._groups and not is_alive(self._groups[role]):
            release(self._groups.pop(role))
        if role not in self._groups:
            self._groups[role] = reserve(ranks, gpus_per_rank=gpus_per_rank, timeout_s=timeout_s, guests=guests)
        return self._groups[role]

    def reserve_for_ranks(self, config: RunConfig, role: Role) -> tuple[PlacementGroup, float]:
        """Reserves bundles for the ranks of a role; also returns the share of a GPU that each rank needs.

        With rollout.placement=colocated, each engine shares a bundle and its GPU with one of the first ranks of the
        actor; both need half of the GPU.
        """
        ranks = config.ranks_of(role)
        is_shared = role == "actor" and config.has_rollouts and config.rollout.placement == "colocated"
        gpus, timeout_s = gpus_per_rank(config.mesh.device), config.cluster.launch_timeout_s
        guests = config.rollout.engines if is_shared else 0
        placement = self.reserve(role, ranks, gpus_per_rank=gpus, timeout_s=timeout_s, guests=guests)
        return placement, gpus / 2 if is_shared else gpus

    def release(self) -> None:
        """Releases all placement groups; idempotent."""
        while self._groups:
            release(self._groups.popitem()[1])


def gpus_per_rank(device: str) -> int:
    """Returns the GPUs that a rank needs under `mesh.device`; under auto, one if the cluster has any."""
    if device == "cpu":
        return 0
    return 1 if device == "cuda" or ray.cluster_resources().get("GPU", 0.0) > 0 else 0


def runtime_environment(gpus: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns Ray's runtime_env of an actor; an actor without a GPU gets one CPU thread and `ALLOCATOR`.

    Args:
        variables: more environment variables, which are cluster.environment.
    """
    own = {"OMP_NUM_THREADS": "1", **ALLOCATOR} if gpus == 0 else {}
    return {"env_vars": {**own, **variables}} if own or variables else {}


def actor_options(group: PlacementGroup, bundle: int, gpus: float, variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns Ray's options for an actor in a bundle; `variables` are as for `runtime_environment`."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": 1,
        "num_gpus": gpus,
        "max_restarts": 0,  # a restarted actor would have lost its state
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        "runtime_env": runtime_environment(gpus, variables),
    }
