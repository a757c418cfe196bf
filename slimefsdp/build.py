"""From settings to the parts of a Trainer: the one place below the command line that reads config sections."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from slimefsdp.attention.kernels import check_kernel
from slimefsdp.config import RunConfig
from slimefsdp.loss.objective import LossName, Objective
from slimefsdp.models.folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.models.load import load_policy
from slimefsdp.models.policy import PolicyModel
from slimefsdp.optim.build import build_optimizer
from slimefsdp.optim.schedule import learning_rate
from slimefsdp.optim.updater import Updater
from slimefsdp.parallel.agree import run_together
from slimefsdp.parallel.mesh import Mesh, build_mesh

Role = Literal["actor", "ref"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What forward and backward run in."""
    return _DTYPES[config.precision.compute_dtype]


def master_dtype(config: RunConfig) -> torch.dtype:
    """What parameters, gradients' sums and optimiser state are kept in: at least fp32."""
    return torch.promote_types(compute_dtype(config), torch.float32)


def mesh_for(config: RunConfig, role: Role, device: torch.device) -> Mesh:
    """The mesh of a role.

    Raises:
        ConfigError: it does not fit the ranks, or the device has no kernel for the compute dtype.
    """
    check_kernel(device, compute_dtype(config))
    dp = (config.reference.dp or config.mesh.dp) if role == "ref" else config.mesh.dp
    return build_mesh(dp, config.mesh.cp, device)


def folder_for(config: RunConfig, role: Role, group: dist.ProcessGroup) -> ModelFolder:
    """Collective: the model folder of a role. Each rank reads its own copy, and all refuse it or none.

    Raises:
        ModelError: it is malformed, or of an architecture that cannot be trained here.
    """
    is_other = role == "ref" and config.reference.path is not None
    path: Path | None = config.reference.path if is_other else config.model.path
    assert path is not None
    field = "reference.path" if is_other else "model.path"
    found: list[ModelFolder] = []

    def read() -> None:
        found.append(read_model_folder(path, field=field))
        check_architecture(found[0], field=field)

    run_together(read, group)
    return found[0]


def policy_for(config: RunConfig, folder: ModelFolder, mesh: Mesh) -> PolicyModel:
    """Collective: the folder's model, sharded over all ranks of the mesh and loaded.

    Raises:
        ModelError: on every rank alike.
    """
    return load_policy(
        folder,
        mesh.flat,
        compute_dtype=compute_dtype(config),
        master_dtype=master_dtype(config),
        device=mesh.device,
        activation_checkpointing=config.model.activation_checkpointing,
    )


def updater_for(config: RunConfig, policy: PolicyModel) -> Updater:
    """The optimiser with its schedule, at update 0."""
    settings = config.optim
    optimizer = build_optimizer(
        policy.named_weights(),
        settings.name,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    schedule = partial(
        learning_rate,
        peak=settings.lr,
        schedule=settings.schedule,
        warmup_updates=settings.warmup_updates,
        total_updates=settings.total_updates,
        min_ratio=settings.min_lr_ratio,
    )
    return Updater(
        optimizer,
        list(policy.parameters()),
        schedule,
        max_grad_norm=settings.max_grad_norm,
        max_skipped=settings.max_skipped_updates,
    )


def objective_for(config: RunConfig, loss: LossName) -> Objective:
    """The training loss."""
    settings = config.loss
    return Objective(
        loss=loss,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        kl_coefficient=settings.kl_coefficient,
        kl_estimator=settings.kl_estimator,
        entropy_coefficient=settings.entropy_coefficient,
        old_is_rollout=settings.old_log_probs == "rollout",
    )
