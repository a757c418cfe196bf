"""Saves and loads checkpoints with the counters of training, and exports model folders."""

from __future__ import annotations

import json
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import slimefsdp
from slimefsdp.checkpoint.export import EXPORT_DTYPES, AdapterFacts, write_model_folder, write_peft_folder
from slimefsdp.checkpoint.manifest import (
    MANIFEST,
    check_identity,
    check_info,
    differences,
)
from slimefsdp.checkpoint.save_load import (
    BackgroundSave,
    Named,
    choose_checkpoint,
    generator_states,
    load_training_state,
    tensors_of,
    write_checkpoint,
)
from slimefsdp.checkpoint.store import PARTS, CheckpointStore
from slimefsdp.config import TrainerConfig
from slimefsdp.config.earlier import changed_constants, with_present_names
from slimefsdp.distributed.collectives import run_on_first, run_together
from slimefsdp.distributed.mesh import Mesh, local_shard
from slimefsdp.errors import CheckpointError, ConfigError
from slimefsdp.io.files import io_reported, json_bytes
from slimefsdp.io.safetensors_file import TensorSpec
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.lora import base_digest, merged_rows
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.results import LoadReport
from slimefsdp.rpc import JobCheckpoint, Role
from slimefsdp.training.build import is_host_memory_pinned, master_dtype
from slimefsdp.training.identity import BASE_WEIGHTS, identity_of
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.send import full_weights

EXPORT_BUCKET_BYTES = 64 << 20  # a larger tensor travels alone

# settings of `optim` that `LoadReport.differences` does not compare
_NO_SCHEDULE = {"name", "log_layer_norms"}
_VERSIONS = {
    "slimefsdp": slimefsdp.__version__,
    "torch": torch.__version__,
    "transformers": version("transformers"),
    "python": platform.python_version(),
}


class Checkpoints:
    """Saves and loads the checkpoints of a Trainer under `run.dir`; every rank makes the same calls.

    With `checkpoint.async_save`, `save` returns at once. The caller must then call `wait_for_copy` before it changes
    the state; the next `save`, `load` or `finish` waits until the checkpoint is written.

    Args:
        role: a critic that is saved by itself has a separate folder.
        folder: the model's folder.
        model: the model on the device, with the weights of `folder`.
    """

    def __init__(self, config: TrainerConfig, role: Role, folder: ModelFolder, mesh: Mesh, model: DecoderModel) -> None:
        self.restored: LoadReport | None = None  # of the last load
        self._adapter: str | None = None  # None for the run's own adapter, or without adapters
        self._config = config
        self._role = role
        self._mesh = mesh
        self._axes = mesh.axes
        self._identity = identity_of(config, role, folder)
        # the base weights of adapters are in no checkpoint, and must be the same again
        if config.lora.rank is not None and role != "ref":
            digest = base_digest(model, mesh.shard_group)
            self._identity[BASE_WEIGHTS[role]] = f"a folder of weights {digest}"
        self._background: BackgroundSave | None = None
        if config.checkpoint.async_save and role != "ref":
            timeout = timedelta(seconds=config.collective_timeout_s)
            self._background = BackgroundSave(
                dist.new_group(backend="gloo", timeout=timeout), pin_memory=is_host_memory_pinned(config, mesh.device)
            )

    def of_adapter(self, name: str, rank: int, alpha: float) -> Checkpoints:
        """Returns the checkpoints of another adapter, in a separate folder and never saved in the background."""
        made = copy(self)
        made.restored, made._background = None, None
        made._adapter = name
        made._identity = self._identity | {"adapter.rank": rank, "lora.alpha": alpha}
        return made

    def save(
        self,
        step: int,
        named: Named,
        updater: OptimizerStep | None,
        facts: dict[str, Any],
        *,
        name: str | None = None,
        overwrite: bool = False,
        job: JobCheckpoint | None = None,
    ) -> Path:
        """Collective: writes a checkpoint of `step`, completely or not at all; returns its folder.

        Args:
            named: the parameters to save.
            facts: entries of the manifest that `check_info` requires. `reference_follows` says whether parameters of
                the reference are among `named`, `kl_coefficient` is for the next step, `loop_state` is the caller's.
            name: saves a named checkpoint, apart from the numbered ones.
            overwrite: replaces an existing checkpoint of this name.
            job: the job whose checkpoint, or part of a checkpoint, this is.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: this or the previous checkpoint cannot be written, the
                name is invalid or taken, or the weights of a named checkpoint are not finite.
            ResourceError: there is no host memory for the copy of a save in the background.
        """
        store = self._store(name, job)
        is_part, save_id = store.part is not None, None if job is None else job.save_id
        run_together(self.finish, self._mesh.group)  # a rank whose peers failed must not leave the others waiting
        if name is not None and not overwrite:
            run_on_first(lambda: store.require_empty(name, save_id), self._mesh.group)
        if name is not None:
            _require_finite(named, self._mesh.group)
        progress = {"updates_taken": 0, "skipped_in_a_row": 0} if updater is None else updater.progress()
        info = {
            **progress,
            "weight_version": progress["updates_taken"],
            **facts,
            "config": self._config.model_dump(mode="json"),
            "identity": self._identity,
            "mesh": self._axes,
            "versions": _VERSIONS,
        }
        if save_id is not None:
            info["save_id"] = save_id
        write = partial(
            write_checkpoint,
            store,
            step,
            state={"generators": generator_states(self._mesh.device)},
            parts=() if job is None or is_part else job.parts,
            keep_last=1 if name is not None else self._config.checkpoint.keep_last,
        )
        background = None if is_part else self._background  # the actor's save needs the part
        run_together(lambda: self._check_save(store, step, info, background), self._mesh.group)
        optimizer = None if updater is None else updater.optimizer
        tensors = tensors_of(named, optimizer) if self._mesh.is_first_copy else {}
        if background is None:
            return write(tensors=tensors, info=info, group=self._mesh.group)
        copies = run_together(lambda: background.buffers_for(tensors), self._mesh.group)
        info = json.loads(json_bytes(info, "info"))  # the caller may change its objects during the save

        def copy_and_write() -> Path:
            run_together(lambda: background.copy(tensors, copies), background.group)
            return write(tensors=copies, info=info, group=background.group)

        background.start(copy_and_write)
        return store.final_path(step)

    def _check_save(
        self, store: CheckpointStore, step: int, info: dict[str, Any], background: BackgroundSave | None
    ) -> None:
        """Checks on one rank that a save can begin; rank 0 becomes the writer of the store.

        Raises:
            CheckpointError: the save cannot begin.
        """
        if type(step) is not int or not 0 <= step < 2**62:
            raise CheckpointError(f"step={step!r} is not a step", field="step", hint="count steps from 0")
        json_bytes(info, "info")
        if background is not None and background.is_lost:
            raise CheckpointError(
                "no save in the background can follow one that ranks did not end together",
                field="checkpoint.async_save",
                hint="start the group anew and load, or save with checkpoint.async_save=false",
            )
        if dist.get_rank(self._mesh.group) == 0:
            store.lock()

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of the host buffers of saves in the background."""
        return 0 if self._background is None else self._background.host_bytes

    def wait_for_copy(self) -> None:
        """Waits until the save in the background has copied the state, which may then be changed, moved or freed."""
        if self._background is not None:
            self._background.wait_for_copy()

    def finish(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, or None if there was no such save.

        Raises:
            CheckpointError: the checkpoint could not be written; raised on all ranks. PeerFailed: a rank was lost.
        """
        return None if self._background is None else self._background.finish()

    def load(
        self,
        step: int | Literal["latest"],
        named_for: Callable[[dict[str, Any]], Named],
        updater: OptimizerStep | None,
        *,
        name: str | None = None,
        weights_only: bool = False,
        job: JobCheckpoint | None = None,
    ) -> dict[str, Any]:
        """Collective: fills parameters, optimiser and counters from a checkpoint; returns its info.

        The schedule follows this run's settings, not the checkpoint's. Random generators are restored only on the same
        mesh. `LoadReport.differences` names such differences.

        Args:
            named_for: returns the parameters to load from a checkpoint with this info.
            name: loads the checkpoint of this name.
            weights_only: resets the optimiser: moments and counters of updates are 0.
            job: the job whose checkpoint, or part of a checkpoint, this is.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: there is no such checkpoint; it is incomplete, changed
                or of another model; or the previous save could not be written.
        """
        store = self._store(name, job)
        run_together(self.finish, self._mesh.group)
        chosen = choose_checkpoint(store, step, self._mesh.group)
        info, file = chosen.manifest.info, chosen.folder / MANIFEST
        if store.part == PARTS["ref"] != chosen.folder.name:
            run_together(lambda: _require_reference_of_launch(info, file), self._mesh.group)
            return info | {"reference_follows": False}

        def check() -> None:
            check_info(info, file)
            check_identity(info["identity"], self._identity, file)
            if job is not None and job.save_id is not None and info.get("save_id") != job.save_id:
                problem = f"{chosen.folder} was written by another save of step {step}"
                raise CheckpointError(problem, field="step", hint="load another checkpoint")

        run_together(check, self._mesh.group)
        ranks = load_training_state(
            chosen,
            named_for(info),
            None if updater is None else updater.optimizer,
            device=self._mesh.device,
            group=self._mesh.group,
            restores_generators=info["mesh"] == self._axes,
        )
        if updater is not None:
            updater.restore(info)
            if weights_only:
                updater.begin_anew()
        self.restored = LoadReport(
            step=chosen.manifest.step,
            path=str(chosen.folder),
            skipped=tuple(map(str, chosen.skipped)),
            ranks=ranks,
            mesh=dict(info["mesh"]),
            differences=tuple(self._differences(info)),
        )
        return info

    def _differences(self, info: dict[str, Any]) -> Iterator[str]:
        yield from changed_constants(info["config"])
        saved_settings = with_present_names(info["config"])
        own = self._config.optim.model_dump(mode="json", exclude=_NO_SCHEDULE)
        if changed := differences(saved_settings.get("optim", {}), own):
            yield f"this run's settings hold, not the checkpoint's: optim.{', optim.'.join(changed)}"
        for section in ("advantage", "loss", "correction"):
            saved = saved_settings.get(section, {})
            if changed := differences(saved, self._config.model_dump(mode="json")[section]):
                yield f"this run's settings hold, not the checkpoint's: {section}.{f', {section}.'.join(changed)}"
        if changed := differences(info["mesh"], self._axes):
            yield f"random generators are not those of the checkpoint: mesh.{', mesh.'.join(changed)}"

    def warn_of_load(self) -> None:
        """Warns on rank 0 about the last load. A warning may be an error, so no collective may follow."""
        if self.restored is None or dist.get_rank(self._mesh.group) != 0:
            return
        for message in (
            *(f"checkpoint passed over: {why}" for why in self.restored.skipped),
            *self.restored.differences,
        ):
            warnings.warn(message, stacklevel=4)

    def _store(self, name: str | None, job: JobCheckpoint | None) -> CheckpointStore:
        if self._config.run.dir is None:
            raise ConfigError("run.dir is not set", field="run.dir", hint="name the folder of the run")
        if job is not None and job.is_part:
            return CheckpointStore.of_job(self._config.run.dir, self._role, name)
        store = CheckpointStore.of_run(self._config.run.dir, self._role, self._adapter)
        return store if name is None else store.named(name)


def export_model(
    model: DecoderModel,
    folder: ModelFolder,
    target: Path,
    *,
    dtype: torch.dtype,
    mesh: Mesh,
    export_dtype: str | None = None,
) -> None:
    """Collective: writes the full weights as a Hugging Face folder; rank 0 writes, and holds a bucket at a time.

    Adapters are merged into the weights.

    Args:
        folder: the model's folder, whose configuration and tokenizer are copied.
        dtype: the dtype of the master weights, in which they are sent to rank 0.
        export_dtype: the dtype of the written tensors, a name in `EXPORT_DTYPES`; None means `dtype`.

    Raises:
        ConfigError: the dtype is unknown. CheckpointError: the folder exists or cannot be written, or a value is not
            finite or becomes infinite in `export_dtype`. ModelError: transformers has no class for such a folder.
    """
    if export_dtype is not None and export_dtype not in list(EXPORT_DTYPES):
        raise ConfigError(f"dtype={export_dtype!r} is unknown", field="dtype", hint=f"use {', '.join(EXPORT_DTYPES)}")
    folder = replace(folder, config=model.exported_config(folder.config))
    named = model.named_weights()
    _require_finite([*named, *model.trained_weights()], mesh.group)  # only the second list has the adapters
    specs = [TensorSpec(name, dtype, tuple(parameter.shape)) for name, parameter in named]
    computed = merged_rows(model)
    buckets = full_weights(named, mesh.shard_group, dtype=dtype, bucket_bytes=EXPORT_BUCKET_BYTES, computed=computed)

    def write() -> None:
        with io_reported(target, "export_hf"):
            write_model_folder(target, specs, _one_by_one(buckets), folder, dtype=export_dtype)

    run_on_first(write, mesh.group, buckets)


def export_adapters(
    model: DecoderModel, config: TrainerConfig, target: Path, mesh: Mesh, *, rank: int, alpha: float
) -> None:
    """Collective: writes all A and B of the adapter in the model as a PEFT folder, in the master dtype; rank 0 writes.

    Args:
        rank, alpha: rank and alpha of this adapter.

    Raises:
        CheckpointError: the folder exists or cannot be written, or a value is not finite.
    """
    named, dtype = model.trained_weights(), master_dtype(config)
    _require_finite(named, mesh.group)
    specs = [TensorSpec(name, dtype, tuple(parameter.shape)) for name, parameter in named]
    digest = base_digest(model, mesh.shard_group)
    facts = AdapterFacts(rank, alpha, config.model.path, digest, config.precision.compute_dtype)
    buckets = full_weights(named, mesh.shard_group, dtype=dtype, bucket_bytes=EXPORT_BUCKET_BYTES)

    def write() -> None:
        with io_reported(target, "export_adapter"):
            write_peft_folder(target, specs, _one_by_one(buckets), facts)

    run_on_first(write, mesh.group, buckets)


def _require_reference_of_launch(info: dict[str, Any], file: Path) -> None:
    """Refuses a checkpoint without a reference group's part if the reference may have been updated.

    Raises:
        CheckpointError: the reference may have been updated; earlier versions did not save such a reference.
    """
    saved = with_present_names(info.get("config", {})).get("reference", {})
    if saved.get("dp") is None or saved.get("update_interval_steps") is not None:
        raise CheckpointError(
            f"{file} has no part of a reference group, and is of reference.dp={saved.get('dp')}, "
            f"reference.update_interval_steps={saved.get('update_interval_steps')}",
            field="reference.dp",
            hint="resume with the reference.dp of the run that wrote it, or start a new run from its exported weights",
            call="load",
        )


def _require_finite(named: Named, group: dist.ProcessGroup) -> None:
    """Collective: refuses weights that are not finite.

    Raises:
        CheckpointError: a weight has NaN or infinity; the message names the first such parameter.
    """

    def check() -> None:
        for name, parameter in named:
            values = local_shard(parameter.detach())
            # minimum and maximum propagate NaN without extra memory; isfinite would need a tensor of the same shape
            if values.numel() and not all(torch.isfinite(bound) for bound in values.aminmax()):
                problem = f"{name} holds NaN or infinity, and is not written"
                raise CheckpointError(problem, field="weights", hint="load an earlier checkpoint, lower optim.lr")

    run_together(check, group)


def _one_by_one(buckets: Iterable[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of all buckets, and keeps no tensor of a bucket when it takes the next bucket."""
    for bucket in buckets:
        while bucket:
            yield bucket.pop(0)
