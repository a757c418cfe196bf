"""Calls that move and count memory, and that look into the model without changing it."""

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

# What a rank answers for itself: a Trainer returns its own, a driver's handle the list of all ranks'.
MemoryReports = TypeVar("MemoryReports")
Memories = TypeVar("Memories")
Descriptions = TypeVar("Descriptions")


class InspectionCalls(Calls, Generic[MemoryReports, Memories, Descriptions]):
    """Memory, layout and health. The type arguments are what `sleep`, `memory` and `describe` return."""

    @call(*ROLES, changes_state=True, adapter="any", answers_by_rank=True)
    def sleep(self, tags: Sequence[Tag] = TAGS) -> MemoryReports:
        """Frees the device memory of parameters (with buffers), optimiser state and reference; idempotent.

        Returns:
            A `MemoryReport` of what a rank freed; of a group one for each rank.

        Raises:
            ConfigError: there is no such tag. ResourceError: a host has no room for what goes there.
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
        """Brings back what `sleep` freed; idempotent. Calls that need the model do it themselves.

        Returns:
            A `MemoryReport` of what a rank brought back; of a group one for each rank.

        Raises:
            ConfigError: there is no such tag. ResourceError: a device has no room for what comes back.
        """
        from slimefsdp.distributed.memory_manager import allocator_state

        report = self._state.memory_manager.wake_up(tags)
        return cast(MemoryReports, replace(report, **allocator_state(self._state.mesh.device)))

    @call(*ROLES, adapter="any", answers_by_rank=True, is_exclusive=False)
    def memory(self) -> Memories:
        """Returns the bytes that a rank holds, as a `Memory`; of a group one for each rank."""
        state = self._state
        found = state.memory_manager.memory()
        if state.role != "ref":
            waiting = 0 if self._adapters is None else self._adapters.host_bytes
            found = replace(found, host_buffers=found.host_buffers + state.checkpoints.host_bytes + waiting)
        return cast(Memories, found)

    @call(*ROLES, adapter="any", answers_by_rank=True)
    def describe(self) -> Descriptions:
        """Describes the sharded units of the model: sizes, dtypes and layout. No rank waits for another.

        Returns:
            A rank's `Description`; of a group one for each rank.
        """
        from slimefsdp.distributed.fsdp import reshard
        from slimefsdp.monitoring.replica_check import describe_model

        model, mesh = self._state.model, self._state.mesh
        reshard(model)
        axes = {"dp_replicate": mesh.dp_replicate, "dp": mesh.dp, "cp": mesh.cp}
        return cast(Descriptions, describe_model(model, axes))

    @call(*ROLES)
    def check_sync(self) -> ReplicaCheck:
        """Compares what ranks should hold alike, bit by bit: replicas of shards, buffers, moments, counters."""
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
        found = compare_replicas(tensors, numbers, state.mesh.group)
        state.reference.rest()
        return found

    @call("actor", "critic", is_exclusive=False)
    def gradient_health(self) -> GradientHealth:
        """Returns the norms of the last update's gradients by layer, and the first parameter that was not finite.

        Raises:
            StateError: no update has been tried since the start, or since the last load.
        """
        found = self._state.updater.health
        if found is None:
            raise StateError(
                "no update has been tried yet",
                field="gradient_health",
                hint="call train_step or optimizer_step first",
            )
        return found
