"""Trainer: one rank's model, optimiser and mesh, and the calls that a training loop makes. It composes, no more.

Every rank calls the same method with the same batch and gets the same result: under torchrun, under Ray, or alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from slimefsdp import build, phase
from slimefsdp.config import RunConfig
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.exclusive import Turn
from slimefsdp.inputs import agreed_plan, check_together
from slimefsdp.learner import Learner
from slimefsdp.loss.objective import LossName, TokenInputs
from slimefsdp.metrics import mean_over_updates
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.policy import PolicyModel
from slimefsdp.models.value import ValueModel
from slimefsdp.parallel.agree import run_together
from slimefsdp.parallel.fsdp import reshard
from slimefsdp.parallel.inspect import compare_replicas, describe_model, model_tensors, optimizer_tensors
from slimefsdp.parallel.mesh import Mesh
from slimefsdp.parallel.offload import prefer_expandable_segments
from slimefsdp.parallel.residency import TAGS, Residency, Tag, allocator_state
from slimefsdp.reports import (
    Description,
    GradientHealth,
    Health,
    LogProbs,
    Memory,
    MemoryReport,
    ReplicaCheck,
    Restored,
    SyncReport,
)
from slimefsdp.state import Checkpoints, export_model
from slimefsdp.surface import ROLES, Role, require_loss, require_receivers, require_role, rpc
from slimefsdp.weights.receive import Receiver, WeightReceiver
from slimefsdp.weights.stream import stream_weights


class Trainer:
    """One rank. The process group must exist (`slimefsdp.parallel.mesh.start_process_group*`).

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
        self.turn = Turn()
        self.role = role
        self.mesh: Mesh = build.mesh_for(config, role, device)
        run_together(lambda: build.check_policy_loss(config), self.mesh.group)
        self.folder = build.folder_for(config, role, self.mesh.group)
        self.config = config = build.with_sharding(config, role, self.folder, self.mesh)
        kind: type[DecoderModel] = ValueModel if role == "critic" else PolicyModel
        self.policy: DecoderModel = build.model_for(kind, config, role, self.folder, self.mesh)
        self._residency = Residency(device, self.mesh.group, pin_memory=build.is_host_memory_pinned(config, device))
        self._residency.models["parameters"] = self.policy
        self._reference = build.reference_for(config, self.folder, self.policy, self.mesh, self._residency)
        self._learner = Learner(config, role, self.policy, self.mesh, self._reference)
        self.receiver = WeightReceiver(self.policy.named_weights())  # of another group's weights, in a reference group
        if role == "ref":
            return
        self.updater = build.updater_for(config, role, self.policy)
        self._residency.optimizer = self.updater.optimizer
        self._checkpoints = Checkpoints(config, role, self.folder, self.mesh)
        self._throughput = build.throughput_for(config, self.folder, self.policy, self.mesh)
        self._profiler = build.profiler_for(config, role, self.mesh)
        if role == "actor" and config.needs_reference and config.reference.placement == "colocated":
            self._reference.load()

    @property
    def reference(self) -> PolicyModel | None:
        """The colocated reference model; None while nobody has needed it."""
        return self._reference.model

    @property
    def updates_taken(self) -> int:
        """Optimiser updates since the first one of the run; the version of the weights."""
        return 0 if self.role == "ref" else self.updater.updates_taken

    # ------------------------------------------------------------------ log-probs and training

    @rpc
    def compute_log_probs(self, batch: RolloutBatch, model: Literal["actor", "ref"] = "actor") -> LogProbs:
        """Log-probs and entropies of every response token, masked ones too.

        Args:
            model: the actor's weights now, or the frozen reference (loaded on first use).

        Raises:
            BatchError: the batch does not fit the settings.
        """
        if model not in ("actor", "ref") or (model == "actor" and self.role == "ref"):
            problem = f"model={model!r} on a group of role {self.role!r}"
            raise ConfigError(problem, field="model", hint="use ref, or actor on an actor")
        self._check(batch, None)
        plan = self._learner.plan_everything(batch)
        if model == "ref" and self.role == "actor":
            values = self._learner.reference_outputs(batch, plan, trained_only=False)
        else:
            self._residency.wake_up(("parameters",))
            values = self._learner.outputs(batch, plan, trained_only=False)
        log_probs, entropy = values.float().numpy()
        return LogProbs(log_probs, entropy)

    @rpc
    def compute_values(self, batch: RolloutBatch) -> np.ndarray:
        """The critic's value of every response token, masked ones too: float32 [R], in the order of the batch.

        Raises:
            BatchError: the batch does not fit the settings.
        """
        self._check(batch, None)
        self._residency.wake_up(("parameters",))
        plan = self._learner.plan_everything(batch)
        (values,) = self._learner.outputs(batch, plan, trained_only=False).float().numpy()
        return values

    @rpc
    def train_step(
        self, batch: RolloutBatch, plan: Plan | None = None, *, gae_lambda: float | None = None,
        kl_coefficient: float | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """The whole update phase over one rollout batch; returns metrics averaged over its updates.

        Args:
            plan: of `slimefsdp.phase.plan_training`; made here when not given.
            gae_lambda, kl_coefficient: of a critic's targets, instead of those in the settings.

        An error on the way, or an end by loss.max_kl, leaves no gradients.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            StateError: forward_backward has gathered gradients, which stay; or too many non-finite gradient norms in
                a row.
        """
        start = time.perf_counter()
        loss: LossName = "value" if self.role == "critic" else self.config.loss_name
        has_gradients = self.updater.has_gradients
        known = self._check(batch, loss, (gae_lambda, kl_coefficient, has_gradients))
        if has_gradients:
            raise StateError(
                "train_step() with gradients of forward_backward that no optimizer_step has used",
                field="train_step",
                hint="call optimizer_step to use them, or zero_grad to drop them",
            )
        cost = self.policy.attention.cost  # what plans are balanced by
        if plan is None:
            plan = phase.plan_training(self.config, batch, cost, loss=loss, advantages=known)
        plan = agreed_plan(self.config, plan, batch, loss, self.mesh.group, data_ranks=self.mesh.data_ranks)
        self._residency.wake_up(("parameters",))
        self._learner.seed_phase(self.updates_taken)
        inputs = self._learner.inputs(
            batch, plan, loss, advantages=known, gae_lambda=gae_lambda, kl_coefficient=kl_coefficient
        )
        reports: list[dict[str, float]] = []
        stopped: dict[str, float] = {}
        try:
            with self._learner.beside_reference(loss):
                for update in range(len(plan.updates)):
                    with self._profiler.profiled(self.updates_taken + 1):
                        weights = phase.update_weights_of_tokens(self.config, batch, plan.counted_of(update))
                        metrics = self._accumulate(batch, plan, update, inputs, weights, loss)
                        if self.config.loss.max_kl is not None and metrics.get("kl_old", 0.0) > self.config.loss.max_kl:
                            stopped = {"kl_old_stopped": metrics["kl_old"]}
                            break
                        reports.append(metrics | self.optimizer_step())
        finally:
            self._forget_gradients()  # of an update that did not come to its end
        taken = [update for update, report in enumerate(reports) if not report["skipped_update"]]
        speed = self._throughput.metrics(plan, batch, time.perf_counter() - start, taken)
        advantages = None if inputs.advantages is None else inputs.advantages.numpy()
        metrics = phase.phase_metrics(self.config, plan, batch, cost, advantages=advantages)
        metrics = mean_over_updates(reports) | metrics | speed | {"updates": float(len(taken))}
        metrics |= self._learner.follow_kl_target(metrics, batch.num_samples)
        return metrics | stopped | {"early_stopped_updates": float(len(plan.updates) - len(reports))}

    @rpc
    def forward_backward(
        self, batch: RolloutBatch, loss: LossName = "policy", denominator: float | None = None
    ) -> dict[str, float]:
        """Adds the gradients of one batch as (part of) one update; nothing is dropped.

        Args:
            loss: `policy` (needs advantages or what they are computed from) or `sft`; of a critic `value`.
            batch: without `old_log_probs` the current ones serve, and the ratio is 1.
            denominator: what the loss is divided by; default: this call's own count. Halves called with the whole's
                denominator (`slimefsdp.loss.reduce.update_denominator`) equal one call with the whole.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added.
        """
        require_loss(loss, self.role)
        known = self._check(batch, loss, denominator)
        self._residency.wake_up(("parameters",))
        plan = self._learner.plan_everything(batch, loss)
        weights = phase.update_weights_of_tokens(self.config, batch, np.arange(batch.num_samples), denominator)
        inputs = self._learner.inputs(batch, plan, loss, advantages=known)
        with self._learner.beside_reference(loss):
            return self._accumulate(batch, plan, 0, inputs, weights, loss)

    @rpc
    def optimizer_step(self) -> dict[str, float]:
        """One optimiser update with the gradients gathered so far; clips by global norm, skips a non-finite one.

        Raises:
            StateError: there are no gradients, or optim.max_skipped_updates were skipped in a row.
        """
        self._residency.wake_up(("parameters", "optimizer"))
        self._checkpoints.wait_for_copy()
        return self.updater.step(self.mesh.group)

    @rpc
    def zero_grad(self) -> None:
        """Drops the gradients that forward_backward has gathered; idempotent."""
        self._residency.wake_up(("parameters",))  # asleep, they have nothing to drop
        self._forget_gradients()

    # ------------------------------------------------------------------ residency

    @rpc
    def sleep(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Frees the device memory of parameters (with buffers), optimiser state and reference; idempotent."""
        if self.role != "ref":
            self._checkpoints.wait_for_copy()
        return replace(self._residency.sleep(tags), **allocator_state(self.mesh.device))

    @rpc
    def wake_up(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Brings them back; idempotent. Calls that need the model do it themselves."""
        return replace(self._residency.wake_up(tags), **allocator_state(self.mesh.device))

    def memory(self) -> Memory:
        """Bytes held on this rank."""
        memory = self._residency.memory()
        if self.role == "ref":
            return memory
        return replace(memory, host_buffers=memory.host_buffers + self._checkpoints.host_bytes)

    def health(self) -> Health:
        """That this rank answers; takes no lock and joins no collective."""
        return Health(dist.get_rank(), os.getpid(), self.updates_taken)

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
        self._residency.wake_up(TAGS)
        models = {"": self.policy} | ({} if self.reference is None else {"reference.": self.reference})
        tensors: list[tuple[str, torch.Tensor]] = []
        for prefix, model in models.items():
            reshard(model)
            tensors += model_tensors(model, prefix)
        numbers: dict[str, float] = {}
        if self.role != "ref":
            tensors += optimizer_tensors(self.policy, self.updater.optimizer)
            numbers = {**self.updater.progress(), "next_lr": self.updater.next_lr}
            numbers["kl_coefficient"] = self._learner.kl_coefficient
        found = compare_replicas(tensors, numbers, self.mesh.group)
        self._reference.rest()
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

        Raises:
            SyncError: a receiver refused or did not answer; it must not be sampled from until the next update.
        """
        require_receivers(receivers)
        self._residency.wake_up(("parameters",))
        return stream_weights(
            self.policy.named_weights(),
            receivers,
            version=self.updates_taken,
            dtype=build.compute_dtype(self.config),
            group=self.mesh.group,
            shard_group=self.mesh.shard_group,
        )

    @rpc
    def update_ref(self) -> None:
        """Makes the colocated reference model equal to the actor, shard to shard.

        Raises:
            StateError: the reference is a group of its own, which is a receiver of `update_weights`, or of another
                architecture.
        """
        assert isinstance(self.policy, PolicyModel)
        self._residency.wake_up(("parameters",))
        self._reference.follow(self.policy)

    @rpc
    def save(self, step: int, loop_state: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint of everything that training continues from; committed whole or not at all.

        With `checkpoint.async_save` it returns at once, and holds this moment all the same: `finish_save` waits for it.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: it cannot be written, or the save before could not.
        """
        self._residency.wake_up(("parameters", "optimizer"))
        with self._reference.resting():
            folder = self._checkpoints.save(
                step,
                self.policy.named_weights() + self._reference.saved_weights(),
                self.updater,
                reference_follows=self._reference.follows,
                kl_coefficient=self._learner.kl_coefficient,
                loop_state=loop_state,
            )
            if self._reference.follows:
                self._checkpoints.wait_for_copy()  # of the reference, which goes to rest
        return folder

    @rpc
    def finish_save(self) -> Path | None:
        """Waits until the save in the background is on disk; returns its folder, None if there was none.

        Raises:
            CheckpointError: it could not be written; the earlier checkpoints stand.
        """
        return self._checkpoints.finish()

    def restored(self) -> Restored | None:
        """What the last `load` took and passed over; None before the first one."""
        require_role("restored", self.role)
        return self._checkpoints.restored

    @rpc
    def load(self, step: int | Literal["latest"] = "latest") -> dict[str, Any]:
        """Restores a checkpoint, on whatever mesh wrote it; returns its loop state.

        Raises:
            CheckpointError: there is none, or it is torn, altered, or of another model.
        """
        self._residency.wake_up(("parameters", "optimizer"))
        with self._reference.resting():
            info = self._checkpoints.load(
                step,
                lambda info: self.policy.named_weights() + self._reference.weights_to_load(info["reference_follows"]),
                self.updater,
            )
            self._reference.loaded(info["reference_follows"])
            self._learner.restore_kl_coefficient(info.get("kl_coefficient"))
        self._checkpoints.warn_of_load()
        return dict(info["loop_state"])

    @rpc
    def export_hf(self, path: str | Path, dtype: str | None = None) -> Path:
        """Writes the weights as a folder for `AutoModelForCausalLM`, of a critic for `AutoModelForTokenClassification`.

        Args:
            dtype: of the tensors, e.g. `bfloat16`; None: the master dtype.

        Raises:
            ConfigError: no such dtype. CheckpointError: the folder exists already, cannot be written, or a value is
                infinite in `dtype`.
        """
        if not isinstance(path, str | Path):
            raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")
        self._residency.wake_up(("parameters",))
        master = build.master_dtype(self.config)
        export_model(self.policy, self.folder, Path(path), dtype=master, mesh=self.mesh, export_dtype=dtype)
        return Path(path)

    # ------------------------------------------------------------------ inside

    def _check(self, batch: RolloutBatch, loss: LossName | None, given: object = None) -> np.ndarray | None:
        return check_together(self.config, batch, self.folder, loss, self.mesh.group, given=given)

    def _forget_gradients(self) -> None:
        self.updater.optimizer.zero_grad(set_to_none=True)

    def _accumulate(
        self, batch: RolloutBatch, plan: Plan, update: int, inputs: TokenInputs, weights: np.ndarray, loss: LossName
    ) -> dict[str, float]:  # fmt: skip
        scale = self.updater.loss_scale
        return self._learner.accumulate(batch, plan, update, inputs, weights, loss, loss_scale=scale)
