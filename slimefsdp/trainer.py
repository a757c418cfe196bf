"""Trainer: one rank's model, optimiser and mesh, and the calls that a training loop makes. It composes, no more.

Every rank calls the same method with the same batch and gets the same result: under torchrun, under Ray, or alone.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp.algorithms.registry import LossName
from slimefsdp.batching.plan import Plan
from slimefsdp.config import RunConfig
from slimefsdp.data.rollout_batch import RolloutBatch
from slimefsdp.distributed.consensus import run_together
from slimefsdp.distributed.fsdp import reshard
from slimefsdp.distributed.memory_manager import (
    MemoryManager,
    allocator_state,
    memory_in_use,
    prefer_expandable_segments,
)
from slimefsdp.distributed.mesh import Mesh
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.models.decoder import DecoderModel, PolicyModel, ValueModel
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.lora import merged_rows
from slimefsdp.monitoring.replica_check import compare_replicas, describe_model, model_tensors, optimizer_tensors
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.results import (
    TAGS,
    AdapterInfo,
    Description,
    ForwardBackward,
    GradientHealth,
    Health,
    LoadReport,
    LogProbs,
    Memory,
    MemoryReport,
    ReplicaCheck,
    SyncReport,
    Tag,
)
from slimefsdp.rpc import (
    ROLES,
    CallLock,
    Role,
    UpdateSettings,
    require_adapter_name,
    require_adapter_settings,
    require_log_probs,
    require_receivers,
    require_role,
    require_update_settings,
    rpc,
    serialized,
)
from slimefsdp.training import build, step
from slimefsdp.training.adapters import Adapters, make_adapters
from slimefsdp.training.checkpointing import Checkpoints, export_adapters, export_model
from slimefsdp.training.metrics import throughput_for
from slimefsdp.training.packs import check_policy_loss
from slimefsdp.training.plan import model_spec_of
from slimefsdp.training.prepare import BatchPlanner, Planning, PreparedBatch
from slimefsdp.weight_sync.receive import Receiver, WeightReceiver
from slimefsdp.weight_sync.send import all_take_adapters, stream_weights


class Trainer:
    """One rank. The process group must exist (`slimefsdp.distributed.mesh.start_process_group*`).

    Raises:
        ConfigError: the mesh does not fit the ranks, or there is no such role.
        ModelError: the model folder cannot be loaded faithfully.
    """

    def __init__(self, config: RunConfig, role: Role = "actor", *, device: torch.device) -> None:
        if not isinstance(config, RunConfig):
            problem = f"config is a {type(config).__name__}, not settings"
            raise ConfigError(problem, field="config", hint="give those of load_config or config_from_dict")
        if role not in ROLES:
            raise ConfigError(f"role={role!r} is no role", field="role", hint=f"use {', '.join(ROLES)}")
        prefer_expandable_segments(device)
        torch.manual_seed(config.run.seed + dist.get_rank())
        build.set_numerics(config)
        if role == "actor" or (role == "critic" and config.critic.dp is None):
            config = config.with_ranks(dist.get_world_size())
        self.call_lock = CallLock()
        mesh = build.mesh_for(config, role, device)
        if (threads := build.host_threads(config, mesh)) is not None:
            torch.set_num_threads(threads)
        run_together(lambda: check_policy_loss(config), mesh.group)
        config, folder, adapters = build.resolve_model(config, role, mesh.group)
        config = build.with_sharding(config, role, folder, mesh)
        kind: type[DecoderModel] = ValueModel if role == "critic" else PolicyModel
        model: DecoderModel = build.model_for(kind, config, role, folder, mesh, adapters=adapters)
        memory_manager = MemoryManager(device, mesh.group, pin_memory=build.is_host_memory_pinned(config, device))
        memory_manager.models["parameters"] = model
        reference = build.reference_for(config, folder, model, mesh, memory_manager)
        self._state = step.RankState(
            config, role, folder, mesh, model, memory_manager, reference, config.loss.kl_coefficient
        )
        self._frozen_source = uuid.uuid4().hex  # what is not trained, as it is now
        self._adapters: Adapters | None = None
        self.receiver = WeightReceiver(model.named_weights())  # of another group's weights, in a reference group
        if role == "ref":
            return
        self._state.updater = build.updater_for(config, role, model)
        memory_manager.optimizer = self.updater.optimizer
        self._state.checkpoints = Checkpoints(config, role, folder, mesh, model)
        self._state.throughput = throughput_for(
            model,
            model_spec_of(folder.config),
            mesh,
            compute_dtype=build.compute_dtype(config),
            stated_tflops=config.profile.peak_tflops,
        )
        self._state.profiler = build.profiler_for(config, role, mesh)
        if role == "actor" and config.lora.rank is not None:
            self._adapters = make_adapters(
                config, model, mesh, self.updater, self._state.checkpoints, self._state.kl_coefficient
            )
        if role == "actor" and config.needs_reference and config.reference.placement == "colocated":
            reference.load()

    @property
    def config(self) -> RunConfig:
        """The settings, with everything that was left to this machine as it was chosen."""
        return self._state.config

    @property
    def role(self) -> Role:
        """What this rank's model is for."""
        return self._state.role

    @property
    def mesh(self) -> Mesh:
        """This rank's place among all."""
        return self._state.mesh

    @property
    def folder(self) -> ModelFolder:
        """The model folder that it began with."""
        return self._state.folder

    @property
    def policy(self) -> DecoderModel:
        """The role's own model: a policy, or a critic's value model."""
        return self._state.model

    @property
    def updater(self) -> OptimizerStep:
        """The optimiser, of a role that trains."""
        return self._state.updater

    @property
    def reference(self) -> PolicyModel | None:
        """The colocated reference model; None while nobody has needed it."""
        return self._state.reference.model

    @property
    def updates_taken(self) -> int:
        """Optimiser updates since the first one of the run; the version of the weights."""
        return 0 if self.role == "ref" else self.updater.updates_taken

    # ------------------------------------------------------------------ log-probs and training

    @rpc
    def compute_log_probs(
        self, batch: RolloutBatch | PreparedBatch, model: Literal["actor", "ref"] = "actor"
    ) -> LogProbs:
        """Log-probs and entropies of every response token, masked ones too.

        Args:
            batch: or what a `BatchPlanner` prepared of it for this call; then it is not looked at again.
            model: the actor's weights now, or the frozen reference (loaded on first use).

        Raises:
            BatchError: the batch does not fit the settings.
        """
        if model == "actor":
            self._require_whole_weights("compute_log_probs")
        work = self._prepared(batch, ("log_probs", model), lambda planner, given: planner.for_forward(given, model))
        state = self._state
        if model == "ref" and self.role == "actor":
            with step.reference_in_use(state) as reference:
                values = step.token_outputs(state, reference, work, trained_only=False)
        else:
            state.memory_manager.wake_up(("parameters",))
            values = step.token_outputs(state, state.model, work, trained_only=False)
        log_probs, entropy = values.float().numpy()
        return LogProbs(log_probs, entropy)

    @rpc
    def compute_values(self, batch: RolloutBatch | PreparedBatch) -> np.ndarray:
        """The critic's value of every response token, masked ones too: float32 [R], in the order of the batch.

        Args:
            batch: as in `compute_log_probs`.

        Raises:
            BatchError: the batch does not fit the settings.
        """
        self._require_whole_weights("compute_values")
        work = self._prepared(batch, "values", BatchPlanner.for_forward)
        self._state.memory_manager.wake_up(("parameters",))
        (values,) = step.token_outputs(self._state, self._state.model, work, trained_only=False).float().numpy()
        return values

    @rpc
    def train_step(
        self,
        batch: RolloutBatch | PreparedBatch,
        plan: Plan | None = None,
        *,
        gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, float]:
        """All updates over one rollout batch; returns metrics averaged over them.

        Args:
            batch: as in `compute_log_probs`; prepared, it has the plan and the options.
            plan: of `slimefsdp.training.plan.plan_training`; made here when not given.
            gae_lambda, kl_coefficient: of a critic's targets, instead of those in the settings.

        An error on the way, or an end by loss.max_kl, leaves no gradients.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            StateError: forward_backward has gathered gradients, which stay; or too many non-finite gradient norms in
                a row; or an update before failed halfway.
        """
        self._require_whole_weights("train_step")
        began, has_gradients = time.perf_counter(), self.updater.has_gradients
        options = (gae_lambda, kl_coefficient)
        work = self._prepared(
            batch,
            (*options, has_gradients),
            lambda planner, given: planner.for_training(given, plan, *options),
            has_more=plan is not None or options != (None, None),
        )
        if has_gradients:
            raise StateError(
                "train_step() with gradients of forward_backward that no optimizer_step has used",
                field="train_step",
                hint="call optimizer_step to use them, or zero_grad to drop them",
            )
        return step.train_step(self._state, work, began)

    @rpc
    def forward_backward(
        self,
        batch: RolloutBatch | PreparedBatch,
        loss: LossName = "policy",
        denominator: float | None = None,
        settings: Mapping[str, Any] | None = None,
        with_log_probs: bool = False,
    ) -> dict[str, float] | ForwardBackward:
        """Adds the gradients of one batch as (part of) one update; nothing is dropped. Returns its metrics.

        Args:
            loss: `policy` (needs advantages or what they are computed from) or `sft`; of a critic `value`.
            batch: as in `compute_log_probs`; without `old_log_probs` the current ones serve, and the ratio is 1.
            denominator: what the loss is divided by; default: this call's own count. Halves called with the whole's
                denominator (`slimefsdp.algorithms.reduction.update_denominator`) equal one call with the whole.
            settings: of `loss`, for this call alone: see `RunConfig.with_loss`.
            with_log_probs: returns what this very pass said of each token beside the metrics, of a policy.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added.
            ConfigError: no such loss, or `settings` that a call cannot choose.
        """
        require_log_probs(with_log_probs, self.role)
        self._require_whole_weights("forward_backward")
        work = self._prepared(
            batch,
            (loss, denominator, settings),
            lambda planner, given: planner.for_gradients(given, loss, denominator, settings),
            has_more=(loss, denominator, settings) != ("policy", None, None),
        )
        state = self._state
        state.memory_manager.wake_up(("parameters",))
        inputs = step.token_inputs(state, work)
        with step.reference_on_device(state, work):
            if not with_log_probs:
                return step.forward_backward(state, work, 0, inputs)
            return step.forward_backward_with_log_probs(state, work, inputs)

    @rpc
    def optimizer_step(self, settings: UpdateSettings | None = None) -> dict[str, float]:
        """One optimiser update with the gradients gathered so far; clips by global norm, skips a non-finite one.

        Args:
            settings: of this update alone, in place of those of `optim`.

        Raises:
            StateError: there are no gradients, optim.max_skipped_updates were skipped in a row, or an update before
                failed halfway.
            ConfigError: `settings` are none, or have an `eps` under SGD.
        """
        require_update_settings(settings)
        return step.optimizer_step(self._state, settings)

    @rpc
    def zero_grad(self) -> None:
        """Drops the gradients that forward_backward has gathered; idempotent."""
        self._state.memory_manager.wake_up(("parameters",))  # asleep, they have nothing to drop
        step.drop_gradients(self._state)

    # ------------------------------------------------------------------ sleep and memory

    @rpc
    def sleep(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Frees the device memory of parameters (with buffers), optimiser state and reference; idempotent."""
        if self.role != "ref":
            self._state.checkpoints.wait_for_copy()
        report = self._state.memory_manager.sleep(tags)
        if self._adapters is not None and "optimizer" in tags:
            self._adapters.to_host()
        return replace(report, **allocator_state(self.mesh.device))

    @rpc
    def wake_up(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Brings them back; idempotent. Calls that need the model do it themselves."""
        return replace(self._state.memory_manager.wake_up(tags), **allocator_state(self.mesh.device))

    def memory(self) -> Memory:
        """Bytes held on this rank."""
        memory = self._state.memory_manager.memory()
        if self.role == "ref":
            return memory
        waiting = 0 if self._adapters is None else self._adapters.host_bytes
        return replace(memory, host_buffers=memory.host_buffers + self._state.checkpoints.host_bytes + waiting)

    # ------------------------------------------------------------------ adapters

    @rpc
    def create_adapter(
        self, name: str, rank: int | None = None, alpha: float | None = None, seed: int | None = None
    ) -> None:
        """Makes another adapter beside the same base, at its beginning, and has it in the model.

        Args:
            rank: at most lora.rank, which is the default.
            alpha: default: lora.alpha.
            seed: that A is drawn from; default: run.seed.

        Raises:
            ConfigError: the run has no adapters, or a value is not in its range. StateError: the name is taken.
            ResourceError: there is no memory for the adapter that was in the model.
        """
        settings = self.config.lora
        require_adapter_settings(name, rank, alpha, seed)
        adapters = self._require_adapters("create_adapter")
        assert settings.rank is not None
        if rank is not None and rank > settings.rank:
            problem = f"rank={rank} of an adapter is more than lora.rank={settings.rank}, for which there is room"
            raise ConfigError(
                problem, field="rank", hint="choose a smaller one, or start the run with a larger lora.rank"
            )
        optim = self.config.optim
        if rank not in (None, settings.rank) and (optim.name, optim.adjust_lr_fn) == ("muon", "original"):
            raise ConfigError(
                f"rank={rank} of an adapter, and optim.adjust_lr_fn=original has the rate of B depend on "
                f"lora.rank={settings.rank}, for which there is room",
                field="rank",
                hint="leave it out, or start the run with optim.adjust_lr_fn=match_rms_adamw",
            )
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.create(
                name, rank or settings.rank, alpha or settings.alpha, self.config.run.seed if seed is None else seed
            )

    @rpc
    def delete_adapter(self, name: str) -> None:
        """Forgets an adapter, but for what it left on the disk.

        Raises:
            StateError: there is none of this name, or it is the run's own. ConfigError: the run has no adapters, or it
                cannot be a name.
        """
        require_adapter_name(name)
        adapters = self._require_adapters("delete_adapter")
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.delete(name)

    @rpc
    def adapters(self) -> list[AdapterInfo]:
        """All adapters beside the base, in the order of their making.

        Raises:
            ConfigError: the run has none.
        """
        return self._require_adapters("adapters").listed()

    @serialized
    def use_adapter(self, name: str) -> None:
        """Has an adapter in the model: all calls are for it, until another one is used or made.

        Raises:
            StateError: there is none of this name. ConfigError: the run has no adapters, or it cannot be a name.
            ResourceError: there is no memory for two at once.
        """
        require_adapter_name(name)
        adapters = self._require_adapters("use_adapter")
        adapters.require(name)
        if name == adapters.current.name:
            return
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.exchanging(adapters):
            adapters.select(name)

    def _require_adapters(self, call: str) -> Adapters:
        if self.role != "actor" or self._adapters is None:
            problem = f"{call}() on a run without adapters"
            raise ConfigError(problem, field="lora.rank", hint="set lora.rank")
        return self._adapters

    def health(self) -> Health:
        """That this rank answers; takes no lock and joins no collective."""
        return Health(dist.get_rank(), os.getpid(), self.updates_taken, *memory_in_use(self.mesh.device))

    # ------------------------------------------------------------------ looking inside

    @rpc
    def describe(self) -> Description:
        """The sharded units of the model: sizes, dtypes and layout, as this rank holds them; no collective."""
        reshard(self.policy)
        axes = {"dp_replicate": self.mesh.dp_replicate, "dp": self.mesh.dp, "cp": self.mesh.cp}
        return describe_model(self.policy, axes)

    @rpc
    def check_sync(self) -> ReplicaCheck:
        """Whether ranks hold the same bits where they should: replicas of shards, buffers, moments, counters."""
        self._state.memory_manager.wake_up(TAGS)
        models = {"": self.policy} | ({} if self.reference is None else {"reference.": self.reference})
        tensors: list[tuple[str, torch.Tensor]] = []
        for prefix, model in models.items():
            reshard(model)
            tensors += model_tensors(model, prefix)
        numbers: dict[str, float] = {}
        if self.role != "ref":
            tensors += optimizer_tensors(self.policy, self.updater.optimizer)
            numbers = {**self.updater.progress(), "next_lr": self.updater.next_lr}
            numbers["kl_coefficient"] = self._state.kl_coefficient
        found = compare_replicas(tensors, numbers, self.mesh.group)
        self._state.reference.rest()
        return found

    def gradient_health(self) -> GradientHealth:
        """The gradients of the last update: their norm by layer, and the first parameter that was not finite.

        Raises:
            StateError: no update has been tried since the start, or since the last load.
        """
        require_role("gradient_health", self.role)
        if self.updater.health is None:
            raise StateError(
                "no update has been tried yet",
                field="gradient_health",
                hint="call train_step or optimizer_step first",
            )
        return self.updater.health

    # ------------------------------------------------------------------ weights and state

    @rpc
    def update_weights(self, receivers: Sequence[Receiver]) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines or a reference group; rank 0 sends.

        Adapters are added to what they change, so that a receiver knows nothing of them; under lora.sync=adapters
        engines that have adapters of their own get these alone.

        Raises:
            SyncError: a receiver refused or did not answer; it must not be sampled from until the next update.
        """
        require_receivers(receivers)
        self._require_whole_weights("update_weights")
        self._state.memory_manager.wake_up(("parameters",))
        adapters = None
        if self.config.lora.sync == "adapters" and all_take_adapters(receivers, self.mesh.group):
            adapters = self._adapters
        return stream_weights(
            self.policy.named_weights() if adapters is None else self.policy.all_parameters(),
            receivers,
            version=self.updates_taken,
            dtype=build.compute_dtype(self.config),
            group=self.mesh.group,
            shard_group=self.mesh.shard_group,
            source=self._frozen_source,
            computed=merged_rows(self.policy) if adapters is None else {},
            adapter_scale=None if adapters is None else adapters.current.scale,
        )

    @rpc
    def update_ref(self) -> None:
        """Makes the colocated reference model equal to the actor, shard to shard.

        Raises:
            StateError: the reference is a group of its own, which is a receiver of `update_weights`, or of another
                architecture.
        """
        assert isinstance(self.policy, PolicyModel)
        self._require_whole_weights("update_ref")
        self._state.memory_manager.wake_up(("parameters",))
        self._state.reference.follow(self.policy)

    @rpc
    def save(
        self,
        step: int,
        loop_state: dict[str, Any] | None = None,
        name: str | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Writes a checkpoint of everything that training continues from; committed whole or not at all.

        With `checkpoint.async_save` it returns at once, and holds this moment all the same: `finish_save` waits for it.

        Args:
            name: keeps it beside the numbered ones, until somebody removes its folder.
            overwrite: in place of one that has the name already.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: it cannot be written, or the save before could not; or
                the name cannot be one, or is taken.
        """
        self._require_whole_weights("save")
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        with self._state.reference.resting():
            folder = self._state.checkpoints.save(
                step,
                self.policy.saved_weights() + self._state.reference.saved_weights(),
                self.updater,
                reference_follows=self._state.reference.follows,
                kl_coefficient=self._state.kl_coefficient,
                loop_state=loop_state,
                name=name,
                overwrite=overwrite,
            )
            if self._state.reference.follows:
                self._state.checkpoints.wait_for_copy()  # of the reference, which goes to rest
        return folder

    @rpc
    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, None if there was none.

        Raises:
            CheckpointError: it could not be written; the earlier checkpoints stand.
        """
        return self._state.checkpoints.finish()

    def restored(self) -> LoadReport | None:
        """What the last `load` took and passed over; None before the first one."""
        require_role("restored", self.role)
        return self._state.checkpoints.restored

    @rpc
    def load(
        self, step: int | Literal["latest"] = "latest", name: str | None = None, weights_only: bool = False
    ) -> dict[str, Any]:
        """Restores a checkpoint, on whatever mesh wrote it; returns its loop state.

        An update that failed halfway is undone by it.

        Args:
            name: of the one that was saved under it.
            weights_only: begin from its weights, with an optimiser and counters that have taken no update.

        Raises:
            CheckpointError: there is none, or it is torn, altered, or of another model.
        """
        self._state.memory_manager.wake_up(("parameters", "optimizer"))
        self._frozen_source = uuid.uuid4().hex
        reference = self._state.reference
        with reference.resting():
            info = self._state.checkpoints.load(
                step,
                lambda info: (
                    self.policy.saved_weights() + self._state.reference.weights_to_load(info["reference_follows"])
                ),
                self.updater,
                name=name,
                weights_only=weights_only,
            )
            reference.loaded(info["reference_follows"])
            if self.config.loss.kl_target is not None:
                self._state.kl_coefficient = info["kl_coefficient"]
        self._state.checkpoints.warn_of_load()
        return dict(info["loop_state"])

    @rpc
    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, of a critic for `AutoModelForTokenClassification`.

        Adapters are added to what they change.

        Args:
            dtype: of the tensors, e.g. `bfloat16`; None: the master dtype.

        Raises:
            ConfigError: no such dtype. CheckpointError: the folder exists already, cannot be written, or a value is
                infinite in `dtype`.
        """
        target = _folder_argument(path)
        self._require_whole_weights("export_hf")
        self._state.memory_manager.wake_up(("parameters",))
        master = build.master_dtype(self.config)
        export_model(self.policy, self.folder, target, dtype=master, mesh=self.mesh, export_dtype=dtype)
        return target

    @rpc
    def export_adapter(self, path: str | Path) -> Path:
        """Writes the adapters alone as a folder for `PeftModel.from_pretrained`, in the master dtype.

        Raises:
            StateError: nothing has adapters. CheckpointError: the folder exists already, or cannot be written.
        """
        target = _folder_argument(path)
        self._require_whole_weights("export_adapter")
        self._state.memory_manager.wake_up(("parameters",))
        if self._adapters is None:
            raise StateError(
                "export_adapter() of a model without adapters",
                field="lora.rank",
                hint="call export_hf for its weights, or train with lora.rank",
            )
        one = self._adapters.current
        export_adapters(self.policy, self.config, target, self.mesh, rank=one.rank, alpha=one.alpha)
        return target

    # ------------------------------------------------------------------ inside

    def _require_whole_weights(self, call: str) -> None:
        """For whatever reads weights or moments: an update that failed halfway has left those of none."""
        if self.role != "ref":
            self.updater.require_whole(call)

    def _prepared(
        self,
        batch: RolloutBatch | PreparedBatch,
        given: object,
        check: Callable[[BatchPlanner, RolloutBatch], Planning],
        has_more: bool = False,
    ) -> PreparedBatch:
        if isinstance(batch, PreparedBatch):
            if has_more:
                problem = "a prepared batch has its plan and options already"
                raise ConfigError(problem, field="batch", hint="give them where it is prepared")
            return batch
        folder = self.folder
        planner = BatchPlanner(
            self.config, self.role, folder.vocab_size, folder.max_sample_tokens, self.policy.attention.cost
        )
        return step.prepared_together(self._state, batch, lambda: check(planner, batch)(), given)


def _folder_argument(path: str | Path) -> Path:
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")
    return Path(path)
