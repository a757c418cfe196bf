"""Calls that send weights to engines and to the reference, and that write and read checkpoints and model folders."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slimefsdp.calls.base import Calls
from slimefsdp.checkpoint.compatibility import check_loop_state
from slimefsdp.checkpoint.store import require_name
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.results import LoadReport, SyncReport
from slimefsdp.rpc import ROLES, Arguments, call, check_receivers

if TYPE_CHECKING:
    from slimefsdp.weight_sync.receive import Receiver


def _check_path(role: str, arguments: Arguments) -> None:
    path = arguments["path"]
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")


def _check_checkpoint(role: str, arguments: Arguments) -> None:
    check_loop_state(arguments.get("loop_state"))  # too deeply nested, it could not even be sent to the ranks
    if arguments["name"] is not None:
        require_name(arguments["name"])


class StateCalls(Calls):
    """Weights and state that leave the ranks or come back."""

    @call("actor", "ref", needs_whole_weights=True, check=check_receivers)
    def update_weights(self, receivers: Sequence[Receiver], *, drop_failed: bool = False) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines or a reference group; rank 0 sends.

        Adapters are added to the weights that they change. Under lora.sync=adapters, engines that have adapters of
        their own get these alone.

        Args:
            receivers: have `begin`, `receive` and `commit` as `slimefsdp.weight_sync.receive.Receiver`; those of a
                driver are Ray actors.
            drop_failed: on a driver: goes on without receivers that fail, which the report names. Else the first
                failure ends the update.

        Raises:
            SyncError: a receiver refused, died, or did not answer within cluster.sync_timeout_s; under `drop_failed`,
                all of them. None that had begun must be sampled from until the next update.
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
        """Makes the reference model equal to the actor; shard to shard where it is colocated.

        Raises:
            StateError: there is none, or it is of another architecture; on a Trainer also: it is a group of its own.
            SyncError: as `update_weights`, of a reference group.
        """
        from slimefsdp.models.decoder import PolicyModel

        assert isinstance(self._state.model, PolicyModel)
        self._state.memory_manager.wake_up(("parameters",))
        self._state.reference.follow(self._state.model)

    @call("actor", "critic", changes_state=True, needs_whole_weights=True, check=_check_checkpoint)
    def save(
        self,
        step: int,
        loop_state: dict[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes a checkpoint of everything that training continues from; committed whole or not at all.

        With `checkpoint.async_save` it returns at once and still saves this moment: `finish_save` waits for it.

        Args:
            loop_state: JSON of the caller's own, which `load` returns.
            name: keeps the checkpoint until somebody removes its folder: it does not count as one of the
                `checkpoint.keep_last`, nor as `latest`.
            overwrite: replaces a checkpoint that has the name already.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: it cannot be written, or the save before could not; or
                the name cannot be one, or is taken.
        """
        state = self._state
        state.memory_manager.wake_up(("parameters", "optimizer"))
        with state.reference.resting():
            folder = state.checkpoints.save(
                step,
                state.model.saved_weights() + state.reference.saved_weights(),
                state.updater,
                reference_follows=state.reference.follows,
                kl_coefficient=state.kl_coefficient,
                loop_state=loop_state,
                name=name,
                overwrite=overwrite,
            )
            if state.reference.follows:
                state.checkpoints.wait_for_copy()  # of the reference, which goes to rest
        return folder

    @call("actor", "critic")
    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, None if there was none.

        Raises:
            CheckpointError: it could not be written; the earlier checkpoints stand.
        """
        return self._state.checkpoints.finish()

    @call("actor", "critic", changes_state=True, check=_check_checkpoint)
    def load(
        self, step: int | Literal["latest"] = "latest", name: str | None = None, weights_only: bool = False
    ) -> dict[str, Any]:
        """Restores a checkpoint, on whatever mesh wrote it; returns its loop state.

        It also repairs the state that an update left which failed halfway.

        Args:
            name: loads the checkpoint that was saved under this name.
            weights_only: begins from its weights, with an optimiser and counters that have taken no update.

        Raises:
            CheckpointError: there is none, or it is torn, altered, or of another model.
        """
        state = self._state
        state.memory_manager.wake_up(("parameters", "optimizer"))
        self._frozen_source = uuid.uuid4().hex
        with state.reference.resting():
            info = state.checkpoints.load(
                step,
                lambda info: state.model.saved_weights() + state.reference.weights_to_load(info["reference_follows"]),
                state.updater,
                name=name,
                weights_only=weights_only,
            )
            state.reference.loaded(info["reference_follows"])
            if state.config.loss.kl_target is not None:
                state.kl_coefficient = info["kl_coefficient"]
        state.checkpoints.warn_of_load()
        return dict(info["loop_state"])

    @call("actor", "critic", is_exclusive=False)
    def restored(self) -> LoadReport | None:
        """Returns what the last `load` took and passed over; None before the first one."""
        return self._state.checkpoints.restored

    @call(*ROLES, needs_whole_weights=True, check=_check_path)
    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, of a critic for `AutoModelForTokenClassification`.

        Adapters are added to what they change.

        Args:
            dtype: of the tensors, e.g. `bfloat16`; None: the master dtype.

        Raises:
            ConfigError: no such dtype. CheckpointError: the folder exists already, cannot be written, or a value is
                infinite in `dtype`.
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
        """Writes the adapter alone as a folder for `PeftModel.from_pretrained`, in the master dtype.

        Raises:
            StateError: nothing has adapters. CheckpointError: the folder exists already, or cannot be written.
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
