"""What a run leaves on disk and comes back from: checkpoints with what training counts, and exported model folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

import slimefsdp
from slimefsdp.checkpoint.atomic import CheckpointStore
from slimefsdp.checkpoint.hugging_face import require_free_folder, write_model_folder
from slimefsdp.checkpoint.manifest import io_reported
from slimefsdp.checkpoint.training import Named, NamedFor, load_training_state, save_training_state
from slimefsdp.config import RunConfig
from slimefsdp.errors import ConfigError
from slimefsdp.models.folder import ModelFolder
from slimefsdp.models.policy import PolicyModel
from slimefsdp.optim.updater import Updater
from slimefsdp.parallel.agree import run_on_first
from slimefsdp.parallel.mesh import Mesh
from slimefsdp.weights.gather import full_weights


def save_checkpoint(
    config: RunConfig,
    step: int,
    named: Named,
    updater: Updater,
    mesh: Mesh,
    *,
    reference_follows: bool,
    loop_state: dict[str, Any] | None,
) -> Path:
    """Collective: commits a checkpoint of `step` under `run.dir`, whole or not at all; returns its folder.

    Args:
        named: the parameters it holds.
        reference_follows: whether those of the reference are among them.

    Raises:
        ConfigError: `run.dir` is not set. CheckpointError: it cannot be written.
    """
    info = {
        **updater.progress(),
        "reference_follows": reference_follows,
        "loop_state": loop_state or {},
        "config": config.model_dump(mode="json", exclude_unset=True),
        "versions": {"slimefsdp": slimefsdp.__version__, "torch": torch.__version__},
    }
    return save_training_state(
        _store(config),
        step,
        named,
        updater.optimizer,
        info,
        device=mesh.device,
        group=mesh.group,
        keep_last=config.checkpoint.keep_last,
        writes_tensors=mesh.is_first_copy,
    )


def load_checkpoint(
    config: RunConfig, step: int | Literal["latest"], named_for: NamedFor, updater: Updater, mesh: Mesh
) -> dict[str, Any]:
    """Collective: fills parameters, optimiser and counters from a checkpoint; returns its info.

    Raises:
        ConfigError: `run.dir` is not set. CheckpointError: there is none, or it is torn, altered or of another model.
    """
    info = load_training_state(_store(config), step, named_for, updater.optimizer, device=mesh.device, group=mesh.group)
    updater.restore(info)
    return info


def export_model(policy: PolicyModel, folder: ModelFolder, target: Path, *, dtype: torch.dtype, mesh: Mesh) -> None:
    """Collective: writes the full weights in `dtype` as a Hugging Face folder; rank 0 writes.

    Args:
        folder: the model's own, whose configuration and tokenizer are copied.

    Raises:
        CheckpointError: the folder exists already, or cannot be written.
    """
    buckets = full_weights(policy.named_weights(), mesh.shard_group, dtype=dtype)

    def write() -> None:
        with io_reported(target, "export_hf"):
            require_free_folder(target)
            write_model_folder(target, ([(n, t.cpu()) for n, t in bucket] for bucket in buckets), folder)

    run_on_first(write, mesh.group, buckets)


def _store(config: RunConfig) -> CheckpointStore:
    if config.run.dir is None:
        raise ConfigError("run.dir is not set", field="run.dir", hint="name the folder of the run")
    return CheckpointStore(config.run.dir / "checkpoints")
