"""Builds the parts of a Trainer from the settings."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from slimefsdp.attention.backends import flash_attn_3, flash_attn_package
from slimefsdp.attention.call_plan import KernelName
from slimefsdp.attention.context_parallel import Attention
from slimefsdp.attention.select import AttentionShape, check_kernel, choose_strategy
from slimefsdp.batching.cost import CostModel
from slimefsdp.checkpoint.manifest import check_info
from slimefsdp.checkpoint.store import CheckpointStore
from slimefsdp.config import TrainerConfig
from slimefsdp.config.sections import AdamWSettings, MuonSettings, OptimSettings, SgdSettings
from slimefsdp.distributed.collectives import all_equal, from_first, gathered, run_together
from slimefsdp.distributed.fsdp import Parallelism
from slimefsdp.distributed.memory_manager import MemoryManager, free_bytes
from slimefsdp.distributed.mesh import Mesh, build_mesh
from slimefsdp.errors import CheckpointError, ConfigError, ModelError
from slimefsdp.io.hub import HubId, reads_like_id, snapshot
from slimefsdp.model_spec import check_settings
from slimefsdp.models.build import AnyModel, Trains, load_model
from slimefsdp.models.decoder import DecoderModel, PolicyModel
from slimefsdp.models.hf_folder import ModelFolder, check_architecture, read_model_folder
from slimefsdp.models.lora import Lora
from slimefsdp.models.peft_folder import PeftFolder, read_peft_folder
from slimefsdp.monitoring.profiler import UpdateProfiler
from slimefsdp.optim.optimizer import OptimizerOptions, build_optimizer, matrix_names, undecayed_names
from slimefsdp.optim.optimizer_step import LossScale, OptimizerStep, learning_rate
from slimefsdp.rpc import Role
from slimefsdp.training.plan import cost_model_of, model_spec_of
from slimefsdp.training.reference_model import ColocatedReference, PolicyWithoutAdapters, Reference

_CUBLAS_WORKSPACES = (":4096:8", ":16:8")  # workspace settings with which cuBLAS is deterministic
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def compute_dtype(config: TrainerConfig) -> torch.dtype:
    """Returns the dtype of forward and backward."""
    return _DTYPES[config.precision.compute_dtype]


def master_dtype(config: TrainerConfig) -> torch.dtype:
    """Returns the dtype of parameters, gradient sums and optimiser state: at least float32."""
    return torch.promote_types(compute_dtype(config), torch.float32)


def mesh_for(config: TrainerConfig, role: Role, device: torch.device) -> Mesh:
    """Returns the mesh of a role.

    Raises:
        ConfigError: the mesh does not fit the ranks, or the kernels of `attention.kernel` cannot run on the device.
    """
    if config.attention.kernel == "flash_attn":
        flash_attn_package.require("attention.kernel=flash_attn", device, compute_dtype(config))
    flash_attn_3.switch(on=config.attention.kernel == "flash_attn_3", device=device, dtype=compute_dtype(config))
    dp_replicate, dp = config.mesh_of(role)
    return build_mesh(
        dp,
        config.mesh.cp,
        device,
        dp_replicate=dp_replicate,
        tp=config.mesh.tp,
        ep=config.mesh.ep,
        is_whole_on_every_rank=config.fsdp.sharding == "replicate",
        timeout_s=config.collective_timeout_s,
    )


def parallelism_of(config: TrainerConfig, device: torch.device) -> Parallelism:
    """Returns how the model is sharded, stored and computed."""
    fsdp = config.fsdp
    return Parallelism(
        compute_dtype=compute_dtype(config),
        master_dtype=master_dtype(config),
        reduce_dtype=_DTYPES.get(config.precision.reduce_dtype),  # None for auto
        keep_parameters=fsdp.sharding in ("keep_parameters", "optimizer"),
        wrap=fsdp.wrap,
        cpu_offload=fsdp.cpu_offload,
        pin_memory=is_host_memory_pinned(config, device),
        recompute=config.model.activation_checkpointing,
        compile=config.model.compile,
        float8=config.precision.float8,
    )


def lora_of(config: TrainerConfig) -> Lora | None:
    """Returns the settings of an actor's or critic's adapters; None for a run without adapters."""
    settings = config.lora
    if settings.rank is None:
        return None
    return Lora(settings.rank, settings.alpha, settings.targets, seed=config.run.seed)


def is_host_memory_pinned(config: TrainerConfig, device: torch.device) -> bool:
    """Returns whether host memory is page-locked, which makes copies to and from CUDA fast."""
    return device.type == "cuda"


def set_numerics(config: TrainerConfig) -> None:
    """Applies run.deterministic to this process permanently, and excludes TF32 from products of float32."""
    torch.set_float32_matmul_precision("highest")  # lower precision is a choice of compute_dtype
    if config.run.deterministic:
        make_deterministic()


def host_threads(config: TrainerConfig, mesh: Mesh) -> int | None:
    """Collective: returns the number of host threads for fsdp.cpu_offload; None means to leave the number unchanged.

    Launchers give a rank one thread, with which AdamW over a large model takes many seconds.
    """
    if not config.fsdp.cpu_offload:
        return None
    if mesh.device.type == "cpu":
        return None
    hosts = gathered(socket.gethostname(), mesh.group)
    return max(1, len(os.sched_getaffinity(0)) // hosts.count(socket.gethostname()))


def make_deterministic() -> None:
    """Restricts this process to deterministic kernels; an operation without such a kernel raises RuntimeError.

    Must be called at a rank's start, because cuBLAS reads its workspace setting at its first product.
    """
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _CUBLAS_WORKSPACES:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _CUBLAS_WORKSPACES[0]
    torch.use_deterministic_algorithms(True)  # under warn_only flash attention's backward would not be deterministic
    # no code here reads uninitialised memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False


class RoleModel(NamedTuple):
    """Holds the inputs from which a role's model is built, so that every folder is read only once."""

    config: TrainerConfig  # names a local folder for each model, and has the rank, alpha and targets of the adapters
    folder: ModelFolder
    adapters: PeftFolder | None  # an actor's first adapters, from lora.path


def resolve_model(config: TrainerConfig, role: Role, group: dist.ProcessGroup) -> RoleModel:
    """Collective: finds the models that the settings name, and reads the role's folder and the adapters at lora.path.

    For a model named by its id on the Hugging Face hub, rank 0 decides on the commit; every other rank reads it from
    its machine's cache, unless rank 0 reads for all. A driver resolves the ids before it starts ranks.

    Raises:
        ModelError, ResourceError: as in `slimefsdp.io.hub.snapshot`, `folder_for` and `read_peft_folder`.
        ConfigError: as in `TrainerConfig.with_adapters`.
    """
    config = _with_local_folders(config, group)
    adapters = _peft_folder_for(config, group)
    if adapters is not None:
        config = config.with_adapters(adapters.rank, adapters.alpha, adapters.targets)
    return RoleModel(config, folder_for(config, role, group), adapters if role == "actor" else None)


def _with_local_folders(config: TrainerConfig, group: dist.ProcessGroup) -> TrainerConfig:
    # decided by the text, because other machines may not have the same files
    asked = {field: path for field, path in config.model_paths.items() if reads_like_id(str(path))}
    if not asked:
        return config

    def fetch(ids: Mapping[str, HubId]) -> dict[str, tuple[HubId, Path]]:
        fetched = {}
        for field, hub_id in ids.items():
            with_weights = field != "model.path" or config.model.init == "folder"
            folder = snapshot(hub_id, "model", field=field, error=ModelError, with_weights=with_weights)
            fetched[field] = HubId(hub_id.name, folder.name), folder
        return fetched

    ids = {field: hub_id for field, path in asked.items() if (hub_id := HubId.of(path))}
    fetched = from_first(lambda: fetch(ids), group)
    if config.model.read == "every_rank":
        commits = {field: commit for field, (commit, _) in fetched.items()}
        fetched = run_together(lambda: fetch(commits), group)
    return config.with_model_paths({field: folder for field, (_, folder) in fetched.items()})


def folder_for(config: TrainerConfig, role: Role, group: dist.ProcessGroup) -> ModelFolder:
    """Collective: returns the model folder of a role. Each rank reads its own copy, or rank 0 reads for all.

    If rank 0 reads, the other ranks get the names of the tensors in the folder, and read no files.

    Raises:
        ModelError: the folder is malformed, or its architecture cannot be trained here.
    """
    path, field = config.folder_of(role)

    def read() -> ModelFolder:
        with_weights = field != "model.path" or config.model.init == "folder"
        folder = read_model_folder(path, field=field, with_weights=with_weights)
        check_architecture(folder, field=field)
        check_settings(folder.config, config, field)
        return folder

    if config.model.read == "every_rank":
        return run_together(read, group)
    folder = from_first(read, group)
    return folder if dist.get_rank(group) == 0 else replace(folder, extra_files=())


def _peft_folder_for(config: TrainerConfig, group: dist.ProcessGroup) -> PeftFolder | None:
    """Collective: returns the adapters at lora.path, read by the ranks that read models; None without lora.path.

    Raises:
        ModelError: as in `read_peft_folder`, or ranks read different copies.
    """
    path = config.lora.path
    if path is None:
        return None
    if config.model.read == "first_rank":
        return from_first(lambda: read_peft_folder(path), group)
    folder = run_together(lambda: read_peft_folder(path), group)
    tensors = [(name, entry.dtype, entry.shape) for name, entry in folder.tensors.items()]
    if not all_equal(repr((folder.config, tensors, folder.metadata)), group):
        raise ModelError(
            f"ranks read different adapters from {path}", field="lora.path", hint="give every machine the same folder"
        )
    return folder


def with_sharding(config: TrainerConfig, role: Role, folder: ModelFolder, mesh: Mesh) -> TrainerConfig:
    """Collective: returns settings in which `auto` of fsdp.sharding is replaced by one level, equal on every rank.

    A resumed run keeps the level of its checkpoint if the checkpoint is of the same mesh, since another level sums the
    same gradients in another order. Otherwise the level is chosen by the memory that is free now.
    """
    if config.fsdp.sharding != "auto":
        return config
    # imported here, so that a Trainer whose settings name a level does not load the estimate
    from slimefsdp.estimate.setup import MeshShape, setup_of
    from slimefsdp.estimate.traffic import choose_sharding

    recorded = from_first(lambda: _recorded_sharding(config, role, mesh), mesh.group)
    if recorded is not None:
        return config.with_sharding(recorded)
    free = torch.tensor(free_bytes(mesh.device), dtype=torch.int64, device=mesh.device)
    dist.all_reduce(free, op=dist.ReduceOp.MIN, group=mesh.group)
    if (model := model_spec_of(folder.config)) is None:  # without the model's sizes nothing can be estimated
        return config.with_sharding("full")
    shape, on_cpu = MeshShape(mesh.dp_replicate, mesh.dp, mesh.cp), mesh.device.type == "cpu"
    # a reference and a critic are loaded after the policy, and assumed to be as large
    other = model if role == "actor" else None
    setup = setup_of(config, model, shape, on_cpu=on_cpu, reference=other, critic=other)
    return config.with_sharding(choose_sharding(setup, config.batch.max_tokens_per_rank, int(free)))


def _recorded_sharding(config: TrainerConfig, role: Role, mesh: Mesh) -> str | None:
    """Returns the level in the checkpoint that this run resumes from, if the mesh is the same; else None."""
    from slimefsdp.estimate.traffic import AUTO_LEVELS

    if not config.checkpoint.resume or config.run.dir is None or role == "ref":
        return None
    store = CheckpointStore.of_job(config.run.dir, role)
    for manifest in store.manifests():
        with suppress(CheckpointError):  # loading also skips a damaged checkpoint
            info = manifest.info
            check_info(info, store.root)
            level = info["config"].get("fsdp", {}).get("sharding")
            is_of_this_mesh = info["mesh"] == mesh.axes
            return level if is_of_this_mesh and level in AUTO_LEVELS else None
    return None


def model_for(
    kind: type[AnyModel],
    config: TrainerConfig,
    role: Role,
    folder: ModelFolder,
    mesh: Mesh,
    *,
    adapters: PeftFolder | None = None,
    cpu_offload: bool = False,
) -> AnyModel:
    """Collective: returns the folder's model, sharded over all ranks of the mesh, with loaded or random weights.

    Weights that do not train are frozen: all weights of a reference, and the weights of an actor that model.frozen
    names. With lora.rank, an actor trains only its adapters, and a critic its adapters and its head.

    Args:
        kind: PolicyModel or ValueModel.
        adapters: the first adapters; None means random adapters if lora.rank is set.
        cpu_offload: keep the shards on the host, even without fsdp.cpu_offload.

    Raises:
        ModelError: the model cannot be loaded; raised on every rank.
        ConfigError: fsdp.wrap, model.frozen or lora.targets names nothing in the model, or there is no compiler for
            model.compile.
    """
    cost = cost_for(config, folder, mesh.group)
    how = parallelism_of(config, mesh.device)
    model = load_model(
        kind,
        folder,
        mesh,
        replace(how, cpu_offload=how.cpu_offload or cpu_offload),
        attention_for=partial(attention_for, config, mesh, cost),
        random_seed=None if folder.has_weights else config.run.seed,
        trains=Trains(
            frozen=(config.model.frozen or ()) if role == "actor" else (),
            lora=None if role == "ref" else lora_of(config),
            adapters=adapters,
        ),
        read_by=config.model.read,
    )
    return model.requires_grad_(False) if role == "ref" else model


def cost_for(config: TrainerConfig, folder: ModelFolder, group: dist.ProcessGroup) -> CostModel:
    """Collective: returns the cost model, equal on every rank, because plans and layouts depend on it.

    Raises:
        ModelError: ranks read different copies of config.json.
        ConfigError: `batch.cost_model` is no calibration, or ranks read different calibrations.
    """
    cost_model = run_together(lambda: cost_model_of(config, folder.config), group)
    if not all_equal(repr(cost_model), group):
        hint = "give every machine the same file"
        if all_equal(repr(model_spec_of(folder.config)), group):
            problem = f"ranks read different rates from {config.batch.cost_model}"
            raise ConfigError(problem, field="batch.cost_model", hint=hint)
        problem = f"ranks read different sizes from {folder.path / 'config.json'}"
        raise ModelError(problem, field="model.path", hint=hint)
    return cost_model


def attention_for(config: TrainerConfig, mesh: Mesh, cost: CostModel, shape: AttentionShape) -> Attention:
    """Returns the object that computes the attention of a model of this shape on the mesh.

    Raises:
        ConfigError: the strategy or the kernels of the settings do not support the model, or need a missing package.
    """
    shape = shape.over(config.mesh.tp)
    check_kernel(config.attention.kernel, shape, deterministic=config.run.deterministic)
    choice = choose_strategy(config.attention.strategy, shape, mesh.cp)
    if choice.name == "ring_flash_attn":
        flash_attn_package.require("attention.strategy=ring_flash_attn", mesh.device, compute_dtype(config))
    # `mesh_for` has already replaced torch's kernels by FlashAttention 3 in the whole process, if the settings say so
    kernel: KernelName = "flash_attn" if config.attention.kernel == "flash_attn" else "torch"
    return Attention(choice, mesh.cp_group, kernel, cost)


def reference_for(
    config: TrainerConfig, policy_folder: ModelFolder, policy: nn.Module, mesh: Mesh, memory_manager: MemoryManager
) -> Reference:
    """Returns the colocated reference of a policy, without loading it."""
    if config.reference_is_policy and isinstance(policy, PolicyModel):
        if config.kl_estimator == "full":
            register_fsdp_forward_method(policy, "head_inputs")
        return PolicyWithoutAdapters(policy, memory_manager)

    def load() -> PolicyModel:
        if not config.reference.is_colocated:
            raise ConfigError(
                f"reference.dp={config.reference.dp} is a group of its own, and this Trainer has none",
                field="reference.dp",
                hint="give ref_log_probs in the batch, use a WorkerGroup, or remove reference.dp",
            )
        folder = folder_for(config, "ref", mesh.group)
        if folder.vocab_size != policy_folder.vocab_size:
            raise ModelError(
                f"the reference has a vocabulary of {folder.vocab_size}, the policy of {policy_folder.vocab_size}",
                field="reference.path",
                hint="choose a reference with the policy's vocabulary",
            )
        cpu_offload = config.reference.offload == "fsdp"
        reference = model_for(PolicyModel, config, "ref", folder, mesh, cpu_offload=cpu_offload)
        if config.kl_estimator == "full":
            if not isinstance(policy, PolicyModel) or not policy.is_like(reference):
                raise ConfigError(
                    f"reference.path={config.reference.path} is of another architecture than the policy, and "
                    "loss.kl_estimator=full has it compute the policy's own packs",
                    field="reference.path",
                    hint="name a model of the policy's configuration, or remove loss.kl_estimator",
                )
            register_fsdp_forward_method(reference, "head_inputs")
        return reference

    return ColocatedReference(load, memory_manager, sleeps=config.reference.offload in ("sleep", "swap"))


def updater_for(config: TrainerConfig, role: Role, model: DecoderModel) -> OptimizerStep:
    """Returns the optimiser step with its schedule, at update 0; a critic may have its own learning rate.

    Raises:
        ConfigError: settings of Muon would have no effect on an actor; raised on every rank.
    """
    settings = config.optim
    matrices = matrix_names(model.hf, model.decoder_layers())
    if role == "actor" and isinstance(settings, MuonSettings):
        _check_muon(config, settings, {name for name, _ in model.trained_weights()}, matrices)
    peak = (config.critic.lr if role == "critic" else None) or settings.lr
    optimizer = build_optimizer(
        model.trained_weights(),
        optimizer_options(settings, peak, seed=config.run.seed),
        undecayed=undecayed_names(model.hf),
        matrices=matrices,
    )
    schedule = partial(
        learning_rate,
        peak=peak,
        schedule=settings.schedule,
        warmup_updates=config.warmup_updates,
        total_updates=config.total_updates or 1,  # a constant schedule has no total, and does not read this value
        min_ratio=settings.min_lr_ratio,
    )
    return OptimizerStep(
        optimizer,
        model.trained_weights(),
        schedule,
        max_grad_norm=settings.max_grad_norm,
        loss_scaling=LossScale(config.precision.loss_scale_init)
        if config.precision.compute_dtype == "float16"
        else None,
        with_layer_norms=settings.log_layer_norms,
    )


def optimizer_options(settings: OptimSettings, peak: float, *, seed: int = 0) -> OptimizerOptions:
    """Returns the options of the optimiser that the settings name.

    Args:
        peak: the learning rate that the schedule scales.
        seed: the seed of stochastic rounding.
    """
    decay = settings.weight_decay
    match settings:
        case AdamWSettings():
            state = {"auto": None, "bfloat16": torch.bfloat16, "8bit": torch.uint8}[settings.state_dtype]
            return OptimizerOptions("adamw", peak, decay, settings.betas, settings.eps, state_dtype=state, seed=seed)
        case MuonSettings():
            ratio = 1.0 if settings.adamw_lr is None else settings.adamw_lr / settings.lr
            momentum = settings.momentum
            return OptimizerOptions("muon", peak, decay, settings.betas, settings.eps, momentum, adamw_lr_ratio=ratio)
        case SgdSettings():
            return OptimizerOptions("sgd", peak, decay, momentum=settings.momentum)


def _check_muon(config: TrainerConfig, settings: MuonSettings, trained: Set[str], matrices: Set[str]) -> None:
    """Checks that Muon has parameters to update, and so has AdamW if the settings give it a learning rate."""
    lora = config.lora
    which = (
        f"model.frozen={list(config.model.frozen or ())}" if lora.rank is None else f"lora.targets={list(lora.targets)}"
    )
    if not trained & matrices:
        raise ConfigError(
            f"optim.name=muon updates matrices of the decoder layers, and {which} trains none of them",
            field="optim.name",
            hint="use adamw, or train some",
        )
    # under ppo AdamW updates the head of the critic, which has the same settings
    if settings.adamw_lr is not None and trained <= matrices and config.algorithm != "ppo":
        raise ConfigError(
            f"optim.adamw_lr={settings.adamw_lr} is for what AdamW updates beside Muon, and {which} trains matrices of "
            "the decoder layers alone",
            field="optim.adamw_lr",
            hint="remove it, or train others too",
        )


def profiler_for(config: TrainerConfig, role: Role, mesh: Mesh) -> UpdateProfiler:
    """Returns the profiler of a group's updates; a critic writes to a separate folder."""
    folder = Path(config.run.dir or ".") / "profile"
    return UpdateProfiler(
        config.profile.updates or (),
        folder / "critic" if role == "critic" else folder,
        mesh,
        with_memory="memory" in config.profile.details,
        record_shapes="shapes" in config.profile.details,
        with_stack="stacks" in config.profile.details,
    )
