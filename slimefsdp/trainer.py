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
from slimefsdp.build import Role
from slimefsdp.config import RunConfig
from slimefsdp.data.plan import Plan
from slimefsdp.data.rollout import RolloutBatch
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.inputs import agreed_plan, check_together, first_epoch_packs, training_inputs
from slimefsdp.loss.objective import LossName, TokenInputs
from slimefsdp.metrics import MetricSums, mean_over_updates
from slimefsdp.models.policy import PolicyModel
from slimefsdp.parallel.fsdp import reshard
from slimefsdp.parallel.inspect import compare_replicas, describe_model, model_tensors, optimizer_tensors
from slimefsdp.parallel.mesh import Mesh
from slimefsdp.parallel.residency import TAGS, Residency, Tag, tensors_of_model, tensors_of_optimizer
from slimefsdp.reports import (
    Description,
    GradientHealth,
    Health,
    LogProbs,
    Memory,
    MemoryReport,
    ReplicaCheck,
    SyncReport,
)
from slimefsdp.state import export_model, load_checkpoint, save_checkpoint
from slimefsdp.update import accumulate_gradients, log_probs_of_packs
from slimefsdp.weights.receive import Receiver, WeightReceiver
from slimefsdp.weights.stream import stream_weights


class Trainer:
    """One rank. The process group must exist (`slimefsdp.parallel.mesh.start_process_group*`).

    Raises:
        ConfigError: the mesh does not fit the ranks.
        ModelError: the model folder cannot be loaded faithfully.
    """

    def __init__(self, config: RunConfig, role: Role = "actor", *, device: torch.device) -> None:
        torch.manual_seed(config.run.seed + dist.get_rank())
        build.set_matmul_precision(config)
        if role == "actor":
            config = config.with_ranks(dist.get_world_size())
        self.config = config
        self.role = role
        self.mesh: Mesh = build.mesh_for(config, role, device)
        self.folder = build.folder_for(config, role, self.mesh.group)
        self.policy = build.policy_for(config, self.folder, self.mesh)
        self._cost = self.policy.attention.cost  # what plans are balanced by
        self.reference: PolicyModel | None = None
        self._reference_follows = False  # since update_ref its weights are no folder's: checkpoints hold them
        self._residency = Residency(self._tensors, pin_memory=build.is_host_memory_pinned(config, device))
        self.receiver = WeightReceiver(self.policy.named_weights())  # of another group's weights, in a reference group
        if role == "ref":
            self.policy.requires_grad_(False)
            return
        self.updater = build.updater_for(config, self.policy)
        if config.needs_reference and config.reference.placement == "colocated":
            self._load_reference()

    @property
    def updates_taken(self) -> int:
        """Optimiser updates since the first one of the run; the version of the weights."""
        return self.updater.updates_taken if self.role == "actor" else 0

    # ------------------------------------------------------------------ log-probs and training

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
        plan = self._plan_everything(batch)
        values = self._log_probs(model, batch, plan, trained_only=False).float().numpy()
        return LogProbs(log_probs=values[0], entropy=values[1])

    def train_step(self, batch: RolloutBatch, plan: Plan | None = None) -> dict[str, float]:
        """The whole update phase over one rollout batch; returns metrics averaged over its updates.

        Args:
            plan: of `slimefsdp.phase.plan_training`; made here when not given.

        Raises:
            BatchError: the batch does not fit the settings; nothing was changed.
            StateError: too many non-finite gradient norms in a row.
        """
        self._require_actor("train_step")
        start = time.perf_counter()
        loss = self.config.loss_name
        self._check(batch, loss)
        plan = plan or phase.plan_training(self.config, batch, self._cost)
        plan = agreed_plan(self.config, plan, batch, self.mesh.group)
        self.wake_up(("parameters",))
        self.updater.optimizer.zero_grad(set_to_none=True)  # what a failed or abandoned update left
        inputs = self._token_inputs(batch, plan, loss)
        reports = []
        for update, packs in enumerate(plan.updates):
            weights = phase.update_weights_of_tokens(self.config, batch, plan.samples_of(update))
            metrics = self._accumulate(batch, packs, inputs, weights, loss)
            reports.append(metrics | self.optimizer_step())
        seconds = time.perf_counter() - start
        return mean_over_updates(reports) | phase.phase_metrics(self.config, plan, batch, seconds, self._cost)

    def forward_backward(
        self, batch: RolloutBatch, loss: LossName = "policy", denominator: float | None = None
    ) -> dict[str, float]:
        """Adds the gradients of one batch as (part of) one update; nothing is dropped.

        Args:
            loss: `policy` (needs advantages or rewards with groups) or `sft`.
            batch: without `old_log_probs` the current ones serve, and the ratio is 1.
            denominator: what the loss is divided by; default: this call's own count. Halves called with the whole's
                denominator (`slimefsdp.loss.reduce.update_denominator`) equal one call with the whole.

        Raises:
            BatchError: the batch does not fit the settings; no gradient was added.
        """
        self._require_actor("forward_backward")
        if loss not in ("policy", "sft"):
            raise ConfigError(f"loss={loss!r} is not a loss", field="loss", hint="use policy or sft")
        self._check(batch, loss)
        self.wake_up(("parameters",))
        plan = self._plan_everything(batch)
        weights = phase.update_weights_of_tokens(self.config, batch, np.arange(batch.num_samples), denominator)
        inputs = self._token_inputs(batch, plan, loss)
        return self._accumulate(batch, plan.updates[0], inputs, weights, loss)

    def optimizer_step(self) -> dict[str, float]:
        """One optimiser update with the gradients gathered so far; clips by global norm, skips a non-finite one.

        Raises:
            StateError: there are no gradients, or optim.max_skipped_updates were skipped in a row.
        """
        self._require_actor("optimizer_step")
        self.wake_up(("parameters", "optimizer"))
        return self.updater.step(self.mesh.group)

    # ------------------------------------------------------------------ residency

    def sleep(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Frees the device memory of parameters (with buffers), optimiser state and reference; idempotent."""
        self._reshard()
        return self._residency.sleep(tags)

    def wake_up(self, tags: Sequence[Tag] = TAGS) -> MemoryReport:
        """Brings them back; idempotent. Calls that need the model do it themselves."""
        self._reshard()  # also after a call that failed: no copy outlives the weights it was gathered from
        return self._residency.wake_up(tags)

    def memory(self) -> Memory:
        """Bytes held on this rank."""
        return self._residency.memory(self.mesh.device)

    def health(self) -> Health:
        """That this rank answers; takes no lock and joins no collective."""
        return Health(dist.get_rank(), os.getpid(), self.updates_taken)

    # ------------------------------------------------------------------ looking inside

    def describe(self) -> Description:
        """The sharded units of the model: sizes, dtypes and layout, as this rank holds them; no collective."""
        reshard(self.policy)
        axes = {"dp_replicate": self.mesh.dp_replicate, "dp": self.mesh.dp, "cp": self.mesh.cp}
        return describe_model(self.policy, axes)

    def check_sync(self) -> ReplicaCheck:
        """Whether ranks hold the same bits where they should: replicas of shards, buffers, moments, counters."""
        self.wake_up()
        models = {"": self.policy} | ({} if self.reference is None else {"reference.": self.reference})
        tensors: list[tuple[str, torch.Tensor]] = []
        for prefix, model in models.items():
            reshard(model)
            tensors += model_tensors(model, prefix)
        numbers: dict[str, float] = {}
        if self.role == "actor":
            tensors += optimizer_tensors(self.policy, self.updater.optimizer)
            numbers = {**self.updater.progress(), "next_lr": self.updater.next_lr}
        found = compare_replicas(tensors, numbers, self.mesh.group)
        self._residency.sleep(("reference",))
        return found

    def gradient_health(self) -> GradientHealth:
        """The gradients of the last update: their norm by layer, and the first parameter that was not finite.

        Raises:
            StateError: no update has been tried since the start, or since the last load.
        """
        self._require_actor("gradient_health")
        if self.updater.health is None:
            raise StateError("no update has been tried yet", hint="call train_step or optimizer_step first")
        return self.updater.health

    # ------------------------------------------------------------------ weights and state

    def update_weights(self, receivers: Sequence[Receiver]) -> SyncReport:
        """Streams the weights, in the compute dtype, to rollout engines or a reference group; rank 0 sends.

        Raises:
            SyncError: a receiver refused or did not answer; it must not be sampled from until the next update.
        """
        self.wake_up(("parameters",))
        return stream_weights(
            self.policy.named_weights(),
            receivers,
            version=self.updates_taken,
            dtype=build.compute_dtype(self.config),
            group=self.mesh.group,
            shard_group=self.mesh.shard_group,
        )

    def update_ref(self) -> None:
        """Makes the colocated reference model equal to the actor, shard to shard.

        Raises:
            StateError: the reference is a group of its own, which is a receiver of `update_weights`, or of another
                architecture.
        """
        if self.reference is None:
            raise StateError("there is no colocated reference", field="reference.placement", hint="set it up first")
        self.wake_up(("parameters", "reference"))
        if not self.policy.is_like(self.reference):
            raise StateError(
                "update_ref() on a reference of another architecture",
                field="reference.path",
                hint="leave reference.path out, or name a model of the policy's own configuration",
            )
        with torch.no_grad():
            for frozen, trained in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                frozen.copy_(trained)
        self._reference_follows = True
        self._residency.sleep(("reference",))

    def save(self, step: int, loop_state: dict[str, Any] | None = None) -> Path:
        """Writes a checkpoint of everything that training continues from; committed whole or not at all.

        Raises:
            ConfigError: `run.dir` is not set. CheckpointError: it cannot be written.
        """
        self._require_actor("save")
        self.wake_up(("parameters", "optimizer"))
        folder = save_checkpoint(
            self.config,
            step,
            self._saved_weights(self._reference_follows),
            self.updater,
            self.mesh,
            reference_follows=self._reference_follows,
            loop_state=loop_state,
        )
        self._residency.sleep(("reference",))
        return folder

    def load(self, step: int | Literal["latest"] = "latest") -> dict[str, Any]:
        """Restores a checkpoint, on whatever mesh wrote it; returns its loop state.

        Raises:
            CheckpointError: there is none, or it is torn, altered, or of another model.
        """
        self._require_actor("load")
        self.wake_up(("parameters", "optimizer"))
        info = load_checkpoint(
            self.config, step, lambda info: self._saved_weights(info["reference_follows"]), self.updater, self.mesh
        )
        self._reference_follows = info["reference_follows"]
        self._residency.sleep(("reference",))
        return dict(info["loop_state"])

    def export_hf(self, path: str | Path) -> Path:
        """Writes the weights, in the master dtype, as a folder that `AutoModelForCausalLM.from_pretrained` opens.

        Raises:
            CheckpointError: the folder exists already, or cannot be written.
        """
        if not isinstance(path, str | Path):
            raise ConfigError(f"path={path!r} is not a path", field="path", hint="name a folder")
        self.wake_up(("parameters",))
        export_model(self.policy, self.folder, Path(path), dtype=build.master_dtype(self.config), mesh=self.mesh)
        return Path(path)

    # ------------------------------------------------------------------ inside

    def _require_reference(self) -> None:
        if self.reference is None and self.config.reference.placement == "group":
            raise ConfigError(
                "reference.placement=group, and this Trainer has no such group",
                field="reference.placement",
                hint="give ref_log_probs in the batch, use a WorkerGroup, or set reference.placement=colocated",
            )
        if self.reference is None:
            self._load_reference()

    def _load_reference(self) -> None:
        self.reference = build.reference_for(self.config, self.folder.vocab_size, self.mesh)
        self._residency.sleep(("reference",))

    def _check(self, batch: RolloutBatch, loss: LossName | None) -> None:
        check_together(self.config, batch, self.folder, loss, self.mesh.group)

    def _require_actor(self, call: str) -> None:
        if self.role != "actor":
            raise StateError(f"{call}() on a group of role {self.role!r}", hint="call it on the actor group")

    def _plan_everything(self, batch: RolloutBatch) -> Plan:
        return phase.plan_everything(self.config, batch, self._cost, data_ranks=self.mesh.data_ranks)

    def _log_probs(self, model: str, batch: RolloutBatch, plan: Plan, *, trained_only: bool) -> torch.Tensor:
        """[2, R] log-probs and entropies, by the packs of the plan's first epoch."""
        packs = first_epoch_packs(plan, self.mesh.data_rank)
        if model == "ref" and self.role == "actor":
            self._require_reference()
        colocated = model == "ref" and self.role == "actor"
        policy = self.reference if colocated else self.policy
        assert policy is not None
        self.wake_up(("reference",) if colocated else ("parameters",))
        values = log_probs_of_packs(
            policy, batch, packs, self.mesh, temperature=self.config.rollout.temperature, trained_only=trained_only
        )
        if colocated:  # between uses its shards live on the host
            self._residency.sleep(("reference",))
        return values

    def _token_inputs(self, batch: RolloutBatch, plan: Plan, loss: LossName) -> TokenInputs:
        return training_inputs(
            self.config, batch, plan, loss, lambda model: self._log_probs(model, batch, plan, trained_only=True)
        )

    def _accumulate(
        self, batch: RolloutBatch, packs: Sequence[Sequence[np.ndarray]], inputs: TokenInputs, weights: np.ndarray,
        loss: LossName,
    ) -> dict[str, float]:  # fmt: skip
        """Adds one update's gradients; returns its metrics."""
        sums = MetricSums(self.mesh.device, counted=self.mesh.cp_rank == 0)
        accumulate_gradients(
            self.policy,
            batch,
            packs[self.mesh.data_rank],
            replace(inputs, weights=torch.from_numpy(weights)),
            build.objective_for(self.config, loss),
            self.mesh,
            sums,
            temperature=self.config.rollout.temperature,
            loss_scale=self.updater.loss_scale,
        )
        return sums.reduce(self.mesh.group)

    def _reshard(self) -> None:
        for model in (self.policy, self.reference):
            if model is not None:
                reshard(model)

    def _tensors(self, tag: Tag) -> list[torch.Tensor]:
        if tag == "optimizer":
            tensors = tensors_of_optimizer(self.updater.optimizer) if self.role == "actor" else []
        else:
            model = self.policy if tag == "parameters" else self.reference
            tensors = [] if model is None else tensors_of_model(model)
        # what fsdp.cpu_offload keeps on the host is where sleep would put it
        return [tensor for tensor in tensors if tensor.device.type == self.mesh.device.type]

    def _saved_weights(self, with_reference: bool) -> list[tuple[str, torch.nn.Parameter]]:
        """What a checkpoint holds, awake; collective if the reference is asked for and not loaded yet."""
        named = self.policy.named_weights()
        if with_reference:
            self._require_reference()
            assert self.reference is not None
            self.wake_up(("reference",))
            named += [(f"reference.{name}", parameter) for name, parameter in self.reference.named_weights()]
        return named
