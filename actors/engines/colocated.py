"""Engines in the places of ranks: what the trainer does when the devices change hands.

The engines' side, and when a turn begins and ends: actors/engines/pool.py.

While engines sample, nothing of the trainer is on the devices; while it trains, nothing of the engines. In between, the
weights are sent: then a device holds the parameters of its rank and the weights of its engine, and neither optimiser
state nor reference nor cache. What an engine loses in its sleep it is sent again at its next turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from actors.cluster.placement import PlacementGroups
from actors.fault_tolerance.supervisor import SupervisedGroup
from actors.workers.worker_group import WorkerGroup
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError, StateError


class RanksBeside:
    """The trainer's side of the devices that engines share.

    Args:
        group: of the actor, in whose places the engines are.
    """

    def __init__(self, group: WorkerGroup | SupervisedGroup) -> None:
        self.group = group
        self.sending_s = 0.0  # of all turns so far, what sending weights took

    @property
    def places(self) -> PlacementGroups:
        """The placement groups of the ranks, and so of the engines."""
        return self.group.places

    @property
    def config(self) -> RunConfig:
        """The group's settings, with mesh.dp as a number."""
        return self.group.config

    def sleep(self) -> None:
        """Nothing of the trainer is on the devices; idempotent. Calls on the group wake what they need."""
        self.keep_parameters_only()
        self.free_parameters()

    def keep_parameters_only(self) -> None:
        """Lets the ranks sleep except for what is needed to send weights. A second call does nothing."""
        critic = self.group.critic
        if critic is not None and self.config.critic.placement == "colocated":
            critic.sleep()
        self.group.sleep(("optimizer", "reference"))

    def free_parameters(self) -> None:
        """The weights have been sent; idempotent."""
        self.group.sleep(("parameters",))

    def wake_up(self) -> None:
        """The trainer has its turn: what it trains is there. Reference and critic come when they are asked."""
        self.group.wake_up(("parameters", "optimizer"))

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Weights are sent inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.sending_s += time.perf_counter() - began


def ranks_beside(config: RunConfig, group: Any) -> RanksBeside | None:
    """The ranks that engines of these settings share devices with; None: engines have devices of their own.

    Raises:
        StateError: the settings ask for a group and there is none, or the other way round.
        ConfigError: there are more engines than ranks.
    """
    is_colocated = config.rollout.placement == "colocated"
    if is_colocated != (group is not None):
        raise StateError(
            f"rollout.placement={config.rollout.placement} and {'no' if group is None else 'a'} trainer group for the "
            "engines to be beside",
            field="beside",
            hint="give the actor's group with rollout.placement=colocated, and with it alone",
        )
    if group is None:
        return None
    if config.rollout.engines > group.config.ranks:
        raise ConfigError(
            f"rollout.engines={config.rollout.engines} are more than the {group.config.ranks} ranks of the group that "
            "they are to be beside",
            field="rollout.engines",
            hint="start fewer, or launch a larger group",
        )
    return RanksBeside(group)
