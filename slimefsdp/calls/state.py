"""Defines the calls that move, inspect, send, save, load and export the state of the ranks."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch

from slimefsdp.calls.training import Calls
from slimefsdp.checkpoint.manifest import check_loop_state
from slimefsdp.checkpoint.store import require_name
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError, StateError, SyncError
from slimefsdp.results import TAGS, GradientHealth, LoadReport, ReplicaCheck, SyncReport, Tag
from slimefsdp.rpc import ROLES, Arguments, call

if TYPE_CHECKING:
    from slimefsdp.weight_sync.receive import Receiver


def _check_path(role: str, arguments: Arguments) -> None:
    path = arguments["path"]
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")


def _check_checkpoint(role: str, arguments: Arguments) -> None:
    check_loop_state(arguments.get("loop_state"))  # first, since a very deeply nested state could not be sent
    if arguments["name"] is not None:
        require_name(arguments["name"])


def _check_receivers(role: str, arguments: Arguments) -> None:
    receivers = arguments["receivers"]
    hint = "give a list of actors that implement slimefsdp.weight_sync.receive.Receiver"
    if not isinstance(receivers, Collection):
        raise SyncError(f"receivers is a {type(receivers).__name__}, not a list", field="receivers", hint=hint)
    for receiver in receivers:
        if not all(hasattr(receiver, name) for name in ("begin", "receive", "commit")):
            raise SyncError(f"{type(receiver).__name__} has no begin, receive and commit", field="receivers", hint=hint)


# result types of calls that answer by rank: a Trainer returns one rank's result, a driver's handle a list of all
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
            ConfigError: a tag is unknown. ResourceError: a host has no room for the memory of a device.
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
            ConfigError: a tag is unknown. ResourceError: a device has no room for its memory.
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
        """Describes the sharded units of the model: sizes, dtypes and layout. This is no collective.

        Returns:
            A rank's `Description`; for a group, one per rank.
        """
        from slimefsdp.distributed.fsdp import reshard
        from slimefsdp.monitoring.replica_check import describe_model

        model, mesh = self._state.model, self._state.mesh
        reshard(model)
        return cast(Descriptions, describe_model(model, mesh.axes))

    @call(*ROLES)
    def check_sync(self) -> ReplicaCheck:
        """Compares bit by bit the shards, buffers, moments and counters that should be equal on several ranks."""
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
        """Returns the norms of the last update's gradients by layer, and the first non-finite gradient.

        Raises:
            StateError: there has been no update since the start or the last load.
        """
        health = self._state.updater.health
        if health is None:
            raise StateError(
                "no update has been tried yet",
                field="gradient_health",
                hint="call train_step or optimizer_step first",
            )
        return health


class StateCalls(Calls):
    """Calls that send, save, load and export weights and state."""

    @call("actor", "ref", needs_whole_weights=True, check=_check_receivers)
    def update_weights(self, receivers: Sequence[Receiver], *, drop_failed: bool = False) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines or a reference group; rank 0 sends.

        Adapters are merged into the weights. Under lora.sync=adapters, engines with adapters get only the adapters.

        Args:
            receivers: objects with `begin`, `receive` and `commit` as in `slimefsdp.weight_sync.receive.Receiver`; a
                driver's receivers are Ray actors.
            drop_failed: on a driver, continues without receivers that fail, and reports them. By default the first
                failure ends the update.

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s; with `drop_failed`,
                all receivers failed. A receiver that has begun the update must not sample before the next update.
            ConfigError: `drop_failed` is set in a call on a Trainer.
        """
        from slimefsdp.models.lora import merged_rows
        from slimefsdp.training.build import compute_dtype
        from slimefsdp.weight_sync.send import all_take_adapters, stream_weights

        if drop_failed:
            problem = "drop_failed=True on a Trainer, which sends to objects of this process"
            raise ConfigError(problem, field="drop_failed", hint="handle failures in the receiver")
        state = self._state
        state.memory_manager.wake_up(("parameters",))
        adapters = None
        if state.config.lora.sync == "adapters" and all_take_adapters(receivers, state.mesh.group):
            adapters = self._adapters
        return stream_weights(
            state.model.named_weights() if adapters is None else state.model.all_parameters(),
            receivers,
            version=0 if state.role == "ref" else state.updater.updates_taken,
            dtype=compute_dtype(state.config),
            group=state.mesh.group,
            shard_group=state.mesh.shard_group,
            source=self._frozen_source,
            computed=merged_rows(state.model) if adapters is None else {},
            adapter_scale=None if adapters is None else adapters.current.scale,
        )

    @call("actor", changes_state=True, needs_whole_weights=True)
    def update_ref(self) -> None:
        """Copies the actor's weights to the reference model; shard by shard if the reference is colocated.

        Raises:
            StateError: there is no reference model, or its architecture differs, or the reference is a separate group
                and the call is made on a Trainer instead of the driver's handle.
            SyncError: as in `update_weights`, for a reference group.
        """
        from slimefsdp.models.decoder import PolicyModel

        assert isinstance(self._state.model, PolicyModel)
        self._state.memory_manager.wake_up(("parameters",))
        self._state.reference.follow(self._state.model)

    @call(*ROLES, changes_state=True, needs_whole_weights=True, check=_check_checkpoint)
    def save(
        self,
        step: int,
        loop_state: dict[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes a checkpoint of everything that is needed to continue training, completely or not at all.

        On a driver the checkpoint of an actor group also contains its critic and its reference group. With
        `checkpoint.async_save` the call returns before the checkpoint is written, and `finish_save` waits for it; the
        checkpoint has the state at the time of the call. An actor's critic and reference group are written before
        the call returns.

        Args:
            loop_state: JSON-like data of the caller, which `load` returns.
            name: the checkpoint's name; None means no name. A named checkpoint is kept until its folder is removed; it
                does not count for `checkpoint.keep_last`, and is never `latest`.
            overwrite: whether the checkpoint replaces an earlier checkpoint of this name.

        Raises:
            ConfigError: `run.dir` is not set.
            CheckpointError: this or the previous save could not be written, or the name is invalid or taken.
            StateError: a driver made this call on a reference group.
        """
        state, is_reference = self._state, self._state.role == "ref"
        state.memory_manager.wake_up(("parameters", "optimizer"))
        follows = self.receiver.version is not None if is_reference else state.reference.follows
        own = state.model.saved_weights() if follows or not is_reference else []
        with state.reference.resting():
            folder = state.checkpoints.save(
                step,
                own + state.reference.saved_weights(),
                None if is_reference else state.updater,
                {
                    "reference_follows": follows,
                    "kl_coefficient": state.kl_coefficient,
                    "loop_state": loop_state or {},
                },
                name=name,
                overwrite=overwrite,
                job=self.job,
            )
            if state.reference.follows:
                state.checkpoints.wait_for_copy()  # the end of the block moves the reference model off the device
        return folder

    @call("actor", "critic")
    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns the folder, or None if there was no such save.

        Raises:
            CheckpointError: the checkpoint could not be written; earlier checkpoints remain valid.
        """
        return self._state.checkpoints.finish()

    @call(*ROLES, changes_state=True, check=_check_checkpoint)
    def load(
        self,
        step: int | Literal["latest"] = "latest",
        name: str | None = None,
        weights_only: bool = False,
    ) -> dict[str, Any]:
        """Loads a checkpoint, which may have been saved on another mesh; returns its loop state.

        On a driver, the call on an actor group also restores its critic and reference group. A load also repairs the
        state after an update that failed halfway.

        Args:
            name: the name of the checkpoint; None means the checkpoint of `step`.
            weights_only: whether only the weights are loaded, with a new optimiser and counters at zero.

        Raises:
            CheckpointError: there is no such checkpoint, or it is incomplete, changed or of another model.
            StateError: a driver made this call on a reference group.
        """
        state = self._state
        state.memory_manager.wake_up(("parameters", "optimizer"))
        self._frozen_source = uuid.uuid4().hex
        if state.role == "ref":
            return self._load_reference_group(step, name)
        with state.reference.resting():
            info = state.checkpoints.load(
                step,
                lambda info: state.model.saved_weights() + state.reference.weights_to_load(info["reference_follows"]),
                state.updater,
                name=name,
                weights_only=weights_only,
                job=self.job,
            )
            state.reference.loaded(info["reference_follows"])
            if state.config.loss.kl_target is not None:
                state.kl_coefficient = info["kl_coefficient"]
        state.checkpoints.warn_of_load()
        return dict(info["loop_state"])

    def _load_reference_group(self, step: int | Literal["latest"], name: str | None) -> dict[str, Any]:
        """Restores a reference group's weights: the checkpoint's, or the model folder's if the checkpoint has none."""
        from slimefsdp.models.decoder import PolicyModel
        from slimefsdp.training.build import model_for

        state = self._state
        info = state.checkpoints.load(
            step,
            lambda info: state.model.saved_weights() if info["reference_follows"] else [],
            None,
            name=name,
            job=self.job,
        )
        if info["reference_follows"]:
            self.receiver.version = info["weight_version"]
        elif self.receiver.version is not None:
            launched = model_for(PolicyModel, state.config, "ref", state.folder, state.mesh)
            with torch.no_grad():
                for (_, weight), (_, first) in zip(state.model.named_weights(), launched.named_weights(), strict=True):
                    local_shard(weight).copy_(local_shard(first))
            self.receiver.forget()
        return {}

    @call("actor", "critic", is_exclusive=False)
    def restored(self) -> LoadReport | None:
        """Returns what the last `load` has read and skipped; None if there was no `load` yet."""
        return self._state.checkpoints.restored

    @call(*ROLES, needs_whole_weights=True, check=_check_path)
    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, or for a critic `AutoModelForTokenClassification`.

        Adapters are merged into the weights.

        Args:
            dtype: the dtype of the tensors, e.g. `bfloat16`; None means the master dtype.

        Raises:
            ConfigError: the dtype is unknown.
            CheckpointError: the folder exists or cannot be written, or a value becomes infinite in `dtype`.
        """
        from slimefsdp.training.build import master_dtype
        from slimefsdp.training.checkpointing import export_model

        state = self._state
        state.memory_manager.wake_up(("parameters",))
        master = master_dtype(state.config)
        export_model(state.model, state.folder, Path(path), dtype=master, mesh=state.mesh, export_dtype=dtype)
        return Path(path)

    @call("actor", needs_whole_weights=True, check=_check_path)
    def export_adapter(self, path: str | Path) -> Path:
        """Writes only the adapter, as a folder for `PeftModel.from_pretrained` in the master dtype.

        Raises:
            StateError: the model has no adapters. CheckpointError: the folder exists or cannot be written.
        """
        from slimefsdp.training.checkpointing import export_adapters

        state = self._state
        state.memory_manager.wake_up(("parameters",))
        if self._adapters is None:
            raise StateError(
                "export_adapter() of a model without adapters",
                field="lora.rank",
                hint="call export_hf for its weights, or train with lora.rank",
            )
        adapter = self._adapters.current
        export_adapters(state.model, state.config, Path(path), state.mesh, rank=adapter.rank, alpha=adapter.alpha)
        return Path(path)
