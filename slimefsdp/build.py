"""From settings to the parts of a Trainer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from slimefsdp.attention import flash_attn_package
from slimefsdp.attention.choice import AttentionShape, choose_strategy
from slimefsdp.attention.strategy import Attention
from slimefsdp.config import RunConfig
from slimefsdp.data.cost import CostModel
from slimefsdp.errors import ConfigError, ModelError
from slimefsdp.loss.objective import LossName, Objective
from slimefsdp.models.folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.models.load import load_policy
from slimefsdp.models.policy import PolicyModel
from slimefsdp.optim.build import build_optimizer, undecayed_names
from slimefsdp.optim.loss_scale import LossScale
from slimefsdp.optim.schedule import learning_rate
from slimefsdp.optim.updater import Updater
from slimefsdp.parallel.agree import all_equal, run_on_first, run_together
from slimefsdp.parallel.fsdp import Parallelism
from slimefsdp.parallel.mesh import Mesh, build_mesh
from slimefsdp.parallel.residency import Residency
from slimefsdp.phase import cost_model_of
from slimefsdp.reference import ColocatedReference

Role = Literal["actor", "ref"]
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def compute_dtype(config: RunConfig) -> torch.dtype:
    """What forward and backward run in."""
    return _DTYPES[config.precision.compute_dtype]


def master_dtype(config: RunConfig) -> torch.dtype:
    """What parameters, gradients' sums and optimiser state are kept in: at least fp32."""
    return torch.promote_types(compute_dtype(config), torch.float32)


def mesh_for(config: RunConfig, role: Role, device: torch.device) -> Mesh:
    """The mesh of a role.

    Raises:
        ConfigError: it does not fit the ranks, or the kernels asked for cannot run on the device.
    """
    if config.attention.kernel == "flash_attn":
        flash_attn_package.require("attention.kernel=flash_attn", device, compute_dtype(config))
    dp_replicate, dp = config.reference_mesh if role == "ref" else config.actor_mesh
    return build_mesh(
        dp,
        config.mesh.cp,
        device,
        dp_replicate=dp_replicate,
        is_whole_on_every_rank=config.fsdp.sharding == "replicate",
    )


def parallelism_of(config: RunConfig, device: torch.device) -> Parallelism:
    """How the model is sharded, stored and computed."""
    fsdp = config.fsdp
    return Parallelism(
        compute_dtype=compute_dtype(config),
        master_dtype=master_dtype(config),
        reduce_dtype=_DTYPES.get(config.precision.reduce_dtype),  # auto is none of them
        buffer_dtype=_DTYPES.get(config.precision.buffer_dtype),
        keep_parameters=fsdp.sharding == "keep_parameters",
        wrap_layers=fsdp.wrap_layers,
        wrap_min_parameters=fsdp.wrap_min_parameters,
        prefetch_layers=fsdp.prefetch_layers,
        cpu_offload=fsdp.cpu_offload,
        pin_memory=is_host_memory_pinned(config, device),
        recompute=config.model.activation_checkpointing,
        recompute_every=config.model.checkpoint_every_n_layers,
        compile=config.model.compile,
    )


def is_host_memory_pinned(config: RunConfig, device: torch.device) -> bool:
    """Whether host memory is page-locked, which makes copies to and from CUDA fast; a CPU has nothing to pin for."""
    return config.fsdp.pin_memory and device.type == "cuda"


def set_matmul_precision(config: RunConfig) -> None:
    """Applies precision.tf32 to this process, whichever way it stood before."""
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")


def folder_for(config: RunConfig, role: Role, group: dist.ProcessGroup) -> ModelFolder:
    """Collective: the model folder of a role. Each rank reads its own copy, or rank 0 reads for all.

    Where rank 0 reads, the others know what is in the folder, and have none of its files.

    Raises:
        ModelError: it is malformed, or of an architecture that cannot be trained here.
    """
    is_other = role == "ref" and config.reference.path is not None
    path: Path | None = config.reference.path if is_other else config.model.path
    assert path is not None
    field = "reference.path" if is_other else "model.path"
    found: list[ModelFolder] = []

    def read() -> None:
        with_weights = is_other or config.model.init == "folder"
        found.append(read_model_folder(path, field=field, with_weights=with_weights))
        check_architecture(found[0], field=field)

    if config.model.read == "every_rank":
        run_together(read, group)
        return found[0]
    run_on_first(read, group)
    sent: list[ModelFolder | None] = [found[0] if found else None]
    dist.broadcast_object_list(sent, group_src=0, group=group)
    assert sent[0] is not None
    return found[0] if found else replace(sent[0], extra_files=())


def policy_for(
    config: RunConfig, role: Role, folder: ModelFolder, mesh: Mesh, *, cpu_offload: bool = False
) -> PolicyModel:
    """Collective: the folder's model, sharded over all ranks of the mesh, its weights loaded or drawn.

    What does not train is frozen: model.frozen of an actor, all of a reference.

    Args:
        cpu_offload: keep the shards on the host, whatever fsdp.cpu_offload says.

    Raises:
        ModelError: on every rank alike.
        ConfigError: fsdp.wrap_layers or model.frozen names nothing in it, or model.compile lacks a compiler.
    """
    cost = cost_for(config, folder, mesh.group)
    how = parallelism_of(config, mesh.device)
    policy = load_policy(
        folder,
        mesh,
        replace(how, cpu_offload=how.cpu_offload or cpu_offload),
        attention_for=partial(attention_for, config, mesh, cost),
        random_seed=None if folder.has_weights else config.run.seed,
        frozen=(config.model.frozen or ()) if role == "actor" else (),
        read_by=config.model.read,
    )
    return policy.requires_grad_(False) if role == "ref" else policy


def cost_for(config: RunConfig, folder: ModelFolder, group: dist.ProcessGroup) -> CostModel:
    """Collective: what the model's tokens cost, the same on every rank: plans and layouts follow from it.

    Raises:
        ModelError: ranks read different copies of config.json.
    """
    cost = cost_model_of(config, folder.config)
    if not all_equal(repr(cost), group):
        raise ModelError(
            f"ranks read different sizes from {folder.path / 'config.json'}",
            field="model.path",
            hint="give every machine the same folder",
        )
    return cost


def attention_for(config: RunConfig, mesh: Mesh, cost: CostModel, shape: AttentionShape) -> Attention:
    """How a model of this shape computes its attention on the mesh.

    Raises:
        ConfigError: the strategy asked for cannot serve it, or needs a package that is missing.
    """
    choice = choose_strategy(config.attention.strategy, shape, mesh.cp)
    if choice.name == "ring_flash_attn":
        flash_attn_package.require("attention.strategy=ring_flash_attn", mesh.device, compute_dtype(config))
    return Attention(choice, mesh.cp_group, config.attention.kernel, cost)


def reference_for(config: RunConfig, vocab_size: int, mesh: Mesh, residency: Residency) -> ColocatedReference:
    """The colocated reference, not loaded yet.

    Args:
        vocab_size: of the policy.
    """

    def load() -> PolicyModel:
        if config.reference.placement == "group":
            raise ConfigError(
                "reference.placement=group, and this Trainer has no such group",
                field="reference.placement",
                hint="give ref_log_probs in the batch, use a WorkerGroup, or set reference.placement=colocated",
            )
        folder = folder_for(config, "ref", mesh.group)
        if folder.vocab_size != vocab_size:
            raise ModelError(
                f"the reference has a vocabulary of {folder.vocab_size}, the policy of {vocab_size}",
                field="reference.path",
                hint="choose a reference with the policy's vocabulary",
            )
        return policy_for(config, "ref", folder, mesh, cpu_offload=config.reference.offload == "fsdp")

    return ColocatedReference(load, residency, sleeps=config.reference.offload == "sleep")


def updater_for(config: RunConfig, policy: PolicyModel) -> Updater:
    """The optimiser with its schedule, at update 0."""
    settings = config.optim
    optimizer = build_optimizer(
        policy.trained_weights(),
        settings.name,
        settings.implementation,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        undecayed=undecayed_names(policy.hf),
    )
    schedule = partial(
        learning_rate,
        peak=settings.lr,
        schedule=settings.schedule,
        warmup_updates=settings.warmup_updates,
        total_updates=settings.total_updates,
        min_ratio=settings.min_lr_ratio,
    )
    precision = config.precision
    scaling = LossScale(precision.loss_scale_init, precision.loss_scale_growth_interval)
    return Updater(
        optimizer,
        policy.trained_weights(),
        schedule,
        max_grad_norm=settings.max_grad_norm,
        max_skipped=settings.max_skipped_updates,
        loss_scaling=scaling if precision.compute_dtype == "float16" else None,
        with_layer_norms=settings.log_layer_norms,
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
