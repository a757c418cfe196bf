"""Calls that send weights to engines and the reference model, and that save, load and export state."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slimefsdp.calls.base import Calls
from slimefsdp.checkpoint.manifest import check_loop_state
from slimefsdp.checkpoint.store import require_name
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.results import LoadReport, SyncReport
from slimefsdp.rpc import ROLES, Arguments, JobCheckpoint, call, check_receivers

if TYPE_CHECKING:
    from slimefsdp.weight_sync.receive import Receiver


def _check_path(role: str, arguments: Arguments) -> None:
    path = arguments["path"]
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")


def _check_checkpoint(role: str, arguments: Arguments) -> None:
    check_loop_state(arguments.get("loop_state"))  # first, since a very deeply nested one could not be sent to ranks
    if arguments["name"] is not None:
        require_name(arguments["name"])


class StateCalls(Calls):
    """Calls for weights and state that leave the ranks or are loaded."""

    @call("actor", "ref", needs_whole_weights=True, check=check_receivers)
    def update_weights(self, receivers: Sequence[Receiver], *, drop_failed: bool = False) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines or a reference group; rank 0 sends.

        Adapters are merged into the weights. Under lora.sync=adapters, engines with adapters get only the adapters.

        Args:
            receivers: objects with `begin`, `receive` and `commit` as in `slimefsdp.weight_sync.receive.Receiver`; a
                driver's receivers are Ray actors.
            drop_failed: on a driver: continues without receivers that fail, and reports them; otherwise the first
                failure ends the update.

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s; with `drop_failed`,
                all of them. Receivers that had begun must not be used for sampling until the next update.
            ConfigError: `drop_failed` without a driver.
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
        """Copies the actor's weights to the reference model; shard by shard if it is colocated.

        Raises:
            StateError: there is no reference model, or it has another architecture; on a Trainer also if it is a group
                of its own.
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
        job: JobCheckpoint | None = None,
    ) -> Path:
        """Writes a checkpoint of everything that is needed to continue training; atomically.

        On a driver the checkpoint of an actor group also holds its critic and its reference group. With
        `checkpoint.async_save` the call returns at once with a snapshot of this moment, and `finish_save` waits for it;
        critic and reference group are written before it returns.

        Args:
            loop_state: the caller's own JSON, which `load` returns.
            name: keeps the checkpoint until its folder is removed; it counts neither for `checkpoint.keep_last` nor as
                `latest`.
            overwrite: replaces an existing checkpoint of this name.
            job: given by a driver.

        Raises:
            ConfigError: `run.dir` is not set.
            CheckpointError: this or the previous save could not be written, or the name is invalid or taken.
            StateError: on a driver, of a reference group.
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
                job=job,
            )
            if state.reference.follows:
                state.checkpoints.wait_for_copy()  # the reference model is about to be moved off the device
        return folder

    @call("actor", "critic")
    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, or None if there was none.

        Raises:
            CheckpointError: it could not be written; earlier checkpoints remain valid.
        """
        return self._state.checkpoints.finish()

    @call(*ROLES, changes_state=True, check=_check_checkpoint)
    def load(
        self,
        step: int | Literal["latest"] = "latest",
        name: str | None = None,
        weights_only: bool = False,
        job: JobCheckpoint | None = None,
    ) -> dict[str, Any]:
        """Loads a checkpoint, from whatever mesh it was saved on; returns its loop state.

        On a driver an actor group's critic and reference group are restored with it. It also repairs the state after an
        update that failed halfway.

        Args:
            name: loads the checkpoint of this name.
            weights_only: loads only the weights, with a new optimiser and counters at zero.
            job: given by a driver.

        Raises:
            CheckpointError: there is no such checkpoint, or it is incomplete, changed or of another model.
            StateError: on a driver, of a reference group.
        """
        state = self._state
        state.memory_manager.wake_up(("parameters", "optimizer"))
        self._frozen_source = uuid.uuid4().hex
        if state.role == "ref":
            return self._load_reference_group(step, name, job)
        with state.reference.resting():
            info = state.checkpoints.load(
                step,
                lambda info: state.model.saved_weights() + state.reference.weights_to_load(info["reference_follows"]),
                state.updater,
                name=name,
                weights_only=weights_only,
                job=job,
            )
            state.reference.loaded(info["reference_follows"])
            if state.config.loss.kl_target is not None:
                state.kl_coefficient = info["kl_coefficient"]
        state.checkpoints.warn_of_load()
        return dict(info["loop_state"])

    def _load_reference_group(
        self, step: int | Literal["latest"], name: str | None, job: JobCheckpoint | None
    ) -> dict[str, Any]:
        """Restores the weights of a reference group, or those of its folder where it had not been updated."""
        from slimefsdp.models.decoder import PolicyModel
        from slimefsdp.training.build import model_for

        state = self._state
        info = state.checkpoints.load(
            step,
            lambda info: state.model.saved_weights() if info["reference_follows"] else [],
            None,
            name=name,
            job=job,
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
        """Returns what the last `load` has read and skipped; None before the first one."""
        return self._state.checkpoints.restored

    @call(*ROLES, needs_whole_weights=True, check=_check_path)
    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, or of a critic `AutoModelForTokenClassification`.

        Adapters are merged into the weights.

        Args:
            dtype: the dtype of the tensors, e.g. `bfloat16`; None: the master dtype.

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
