"""Calls that free, restore and measure memory, and that inspect the model without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from slimefsdp.calls.base import Calls
from slimefsdp.errors import StateError
from slimefsdp.results import TAGS, GradientHealth, ReplicaCheck, Tag
from slimefsdp.rpc import ROLES, call

if TYPE_CHECKING:
    import torch

# Each rank has its own result: a Trainer returns its own, and a driver's handle a list with one per rank.
MemoryReports = TypeVar("MemoryReports")
Memories = TypeVar("Memories")
Descriptions = TypeVar("Descriptions")


class InspectionCalls(Calls, Generic[MemoryReports, Memories, Descriptions]):
    """Calls for memory, layout and health. The type arguments are the results of `sleep`, `memory` and `describe`."""

    @call(*ROLES, changes_state=True, adapter="any", answers_by_rank=True)
    def sleep(self, tags: Sequence[Tag] = TAGS) -> MemoryReports:
        """Frees the device memory of parameters (with buffers), optimiser state and reference model; idempotent.

        Returns:
            A `MemoryReport` of what a rank freed; for a group, one per rank.

        Raises:
            ConfigError: a tag is unknown. ResourceError: a host has no room for what is moved there.
        """
        from slimefsdp.distributed.memory_manager import allocator_state

        state = self._state
        if state.role != "ref":
            state.checkpoints.wait_for_copy()
        report = state.memory_manager.sleep(tags)
        if self._adapters is not None and "optimizer" in tags:
            self._adapters.to_host()
        return cast(MemoryReports, replace(report, **allocator_state(state.mesh.device)))

    @call(*ROLES, changes_state=True, adapter="any", answers_by_rank=True)
    def wake_up(self, tags: Sequence[Tag] = TAGS) -> MemoryReports:
        """Restores what `sleep` freed; idempotent. Calls that need the model do this themselves.

        Returns:
            A `MemoryReport` of what a rank restored; for a group, one per rank.

        Raises:
            ConfigError: a tag is unknown. ResourceError: a device has no room for what is restored.
        """
        from slimefsdp.distributed.memory_manager import allocator_state

        report = self._state.memory_manager.wake_up(tags)
        return cast(MemoryReports, replace(report, **allocator_state(self._state.mesh.device)))

    @call(*ROLES, adapter="any", answers_by_rank=True, is_exclusive=False)
    def memory(self) -> Memories:
        """Returns the bytes that a rank uses, as a `Memory`; for a group, one per rank."""
        state = self._state
        usage = state.memory_manager.memory()
        if state.role != "ref":
            waiting = 0 if self._adapters is None else self._adapters.host_bytes
            usage = replace(usage, host_buffers=usage.host_buffers + state.checkpoints.host_bytes + waiting)
        return cast(Memories, usage)

    @call(*ROLES, adapter="any", answers_by_rank=True)
    def describe(self) -> Descriptions:
        """Describes the sharded units of the model: sizes, dtypes and layout. Not a collective.

        Returns:
            A rank's `Description`; for a group, one per rank.
        """
        from slimefsdp.distributed.fsdp import reshard
        from slimefsdp.monitoring.replica_check import describe_model

        model, mesh = self._state.model, self._state.mesh
        reshard(model)
        axes = {"dp_replicate": mesh.dp_replicate, "dp": mesh.dp, "cp": mesh.cp}
        return cast(Descriptions, describe_model(model, axes))

    @call(*ROLES)
    def check_sync(self) -> ReplicaCheck:
        """Compares bit by bit what ranks should have in common: replicas of shards, buffers, moments, counters."""
        from slimefsdp.distributed.fsdp import reshard
        from slimefsdp.monitoring.replica_check import compare_replicas, model_tensors, optimizer_tensors

        state = self._state
        state.memory_manager.wake_up(TAGS)
        reference = state.reference.model
        tensors: list[tuple[str, torch.Tensor]] = []
        for prefix, model in {"": state.model, "reference.": reference}.items():
            if model is not None:
                reshard(model)
                tensors += model_tensors(model, prefix)
        numbers: dict[str, float] = {}
        if state.role != "ref":
            tensors += optimizer_tensors(state.model, state.updater.optimizer)
            numbers = {**state.updater.progress(), "next_lr": state.updater.next_lr}
            numbers["kl_coefficient"] = state.kl_coefficient
        report = compare_replicas(tensors, numbers, state.mesh.group)
        state.reference.rest()
        return report

    @call("actor", "critic", is_exclusive=False)
    def gradient_health(self) -> GradientHealth:
        """Returns the norms of the last update's gradients by layer, and the first parameter that was not finite.

        Raises:
            StateError: there was no update since the start or the last load.
        """
        health = self._state.updater.health
        if health is None:
            raise StateError(
                "no update has been tried yet",
                field="gradient_health",
                hint="call train_step or optimizer_step first",
            )
        return health
