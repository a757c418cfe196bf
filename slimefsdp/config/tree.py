"""The settings tree, and every rule between its sections.

Read once, checked once, frozen: past `load_config` nobody asks whether a setting makes sense. Importing this file costs
pydantic and PyYAML, never torch, so that a bad setting is answered at once.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from slimefsdp.algorithms.registry import PAIRWISE, POLICY_LOSSES
from slimefsdp.config.algorithm import AlgorithmSettings
from slimefsdp.config.loader import apply_override, find_code_beside, read_settings, with_base
from slimefsdp.config.messages import BrokenRule, Sections, config_error
from slimefsdp.config.rollout import (
    ENGINES,
    SERVERS,
    DataSettings,
    EnvironmentSettings,
    EvaluationSettings,
    RolloutSettings,
    Sampling,
    temperatures_of,
)
from slimefsdp.config.sections import (
    AttentionSettings,
    BatchSettings,
    CheckpointSettings,
    ClusterSettings,
    FsdpSettings,
    LoraSettings,
    MeshSettings,
    ModelSettings,
    OptimSettings,
    PrecisionSettings,
    ProfileSettings,
    ReferenceSettings,
    RunSettings,
    ServiceSettings,
)
from slimefsdp.errors import ConfigError, short_repr, short_text
from slimefsdp.rpc import Role


class RunConfig(AlgorithmSettings):
    """Everything one run is made of."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    lora: LoraSettings = LoraSettings()
    reference: ReferenceSettings = ReferenceSettings()
    mesh: MeshSettings = MeshSettings()
    attention: AttentionSettings = AttentionSettings()
    precision: PrecisionSettings = PrecisionSettings()
    fsdp: FsdpSettings = FsdpSettings()
    batch: BatchSettings = BatchSettings()
    optim: OptimSettings = OptimSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cluster: ClusterSettings = ClusterSettings()
    profile: ProfileSettings = ProfileSettings()
    service: ServiceSettings = ServiceSettings()

    def __repr__(self) -> str:
        """Short: the choices that a run is known by, and how many settings were given; `model_dump` has them all."""
        mesh = f"mesh={self.mesh.dp_replicate} x {self.mesh.dp} x {self.mesh.cp}"
        known_by = {"model.path": self.model.path, "run.dir": self.run.dir, "optim.lr": self.optim.lr}
        shown = [f"{field}={short_text(value)}" for field, value in known_by.items() if value is not None]
        sections = [getattr(self, name) for name in self.model_fields_set]
        given = sum(len(one.model_fields_set) if isinstance(one, BaseModel) else 1 for one in sections)
        return f"RunConfig({self.algorithm}, {', '.join([*shown, mesh])}; {given} settings given)"

    __str__ = __repr__

    @model_validator(mode="after")
    def check_settings_without_rollouts(self) -> RunConfig:
        if self.has_rollouts:
            return self
        read = _READ_WITHOUT_ROLLOUTS[self.algorithm]
        unread = [
            f"{section}.{name}"
            for section in _OF_ROLLOUTS
            for name in sorted(getattr(self, section).model_fields_set)
            if f"{section}.{name}" not in read and f"{section}.*" not in read
        ]
        if unread:
            verb, what = ("is", "it") if len(unread) == 1 else ("are", "them")
            shown = [f"{field}={short_text(self.value_of(field))}" for field in unread]
            raise BrokenRule(
                unread[0],
                f"{', '.join(shown)} {verb} not read under algorithm={self.algorithm}",
                f"remove {what} or set {what} to null, or set algorithm=grpo",
            )
        return self

    @model_validator(mode="after")
    def check_environment(self) -> RunConfig:
        rollout = self.rollout
        if rollout.environment is None:
            for name in _changed(self.environment, type(self.environment).model_fields):
                field = f"environment.{name}"
                raise BrokenRule(
                    field,
                    f"{field}={short_text(self.value_of(field))} is of rollout.environment, which is not set",
                    "set it, or remove this",
                )
            return self
        of_rewards = [name for name in type(rollout).model_fields if name.startswith("reward")]
        for name in _changed(rollout, (*of_rewards, "overlong_buffer_tokens")):
            raise BrokenRule(
                f"rollout.{name}",
                f"rollout.{name}={getattr(rollout, name)} is of a reward function, and "
                f"rollout.environment={rollout.environment} gives the rewards",
                f"remove rollout.{name}, or give it to the environment under environment.arguments",
            )
        most = self.environment.max_tokens
        if most is not None and not rollout.max_new_tokens < most <= self.max_pack_tokens:
            raise BrokenRule(
                "environment.max_tokens",
                f"environment.max_tokens={most} must be more than "
                f"rollout.max_new_tokens={rollout.max_new_tokens} and at most {self.max_pack_tokens}, which a pack "
                "holds (batch.max_tokens_per_rank x mesh.cp)",
                "set it so",
            )
        return self

    def sampling(self, *, evaluates: bool) -> Sampling:
        """Returns how responses are sampled, for training or in evaluations, which say what is different about them."""
        rollout, own = self.rollout, self.evaluation
        training = Sampling(
            rollout.temperature, rollout.max_new_tokens, rollout.top_p, rollout.top_k, rollout.min_p,
            length_setting="rollout.max_new_tokens",
        )  # fmt: skip
        if not evaluates:
            return training
        changed: dict[str, Any] = {
            "temperature": own.temperature, "max_new_tokens": own.max_new_tokens, "top_p": own.top_p,
            "top_k": own.top_k, "min_p": own.min_p,
            "length_setting": None if own.max_new_tokens is None else "evaluation.max_new_tokens",
        }  # fmt: skip
        return replace(training, **{name: value for name, value in changed.items() if value is not None})

    @model_validator(mode="after")
    def check_evaluation_temperature(self) -> RunConfig:
        engine, value = self.rollout.engine, self.evaluation.temperature
        low, high = temperatures_of(engine)
        if value is not None and not low <= value <= high:
            raise BrokenRule(
                "evaluation.temperature",
                f"evaluation.temperature={value:g}: {engine} samples from {low:g} to {high:g}",
                "set one of these, or rollout.engine=embedded",
            )
        return self

    @property
    def skips_failures(self) -> bool:
        """Whether a response that cannot be rewarded leaves its group out, and does not end the run."""
        failure = self.rollout.reward_failure if self.rollout.environment is None else self.environment.failure
        return failure == "skip"

    @property
    def rewards_by(self) -> str:
        """The setting that says what rewards."""
        return "rollout.reward" if self.rollout.environment is None else "rollout.environment"

    @model_validator(mode="after")
    def check_lora_support(self) -> RunConfig:
        if not self.lora.are_trained:
            return self
        given = "rank" if self.lora.path is None else "path"
        setting = f"lora.{given}={getattr(self.lora, given)}"
        if self.model.frozen:
            raise BrokenRule(
                "model.frozen",
                f"model.frozen={short_text(list(self.model.frozen))} freezes parts of what adapters of "
                f"{setting} freeze whole",
                "remove one of them",
            )
        for name in _changed(self.reference, ["offload", "update_interval_steps"] if self.reference_is_policy else []):
            raise BrokenRule(
                f"reference.{name}",
                f"reference.{name}={getattr(self.reference, name)} is for a reference with weights of its own, and "
                f"with {setting} it is the policy without its adapters",
                "remove it, or set reference.path",
            )
        return self

    @model_validator(mode="after")
    def check_muon_with_adapters(self) -> RunConfig:
        """Refuses Muon where lora.targets leaves it no matrix. Patterns are checked when the model is built."""
        targets, adamw_lr = self.lora.targets, self.optim.adamw_lr
        # a critic has a head of its own, and the same settings
        if self.optim.name != "muon" or self.lora.rank is None or self.algorithm == "ppo":
            return self
        if set(targets) <= {"head", "lm_head"}:
            raise BrokenRule(
                "optim.name",
                f"optim.name=muon updates matrices of the decoder layers, and lora.targets={list(targets)} has "
                "adapters on none",
                "set optim.name=adamw, or add others to lora.targets",
            )
        if adamw_lr is not None and set(targets) <= {"attention", "mlp", "all-linear", "experts"}:
            raise BrokenRule(
                "optim.adamw_lr",
                f"optim.adamw_lr={adamw_lr} is for what AdamW updates beside Muon, and adapters of "
                f"lora.targets={list(targets)} are matrices of the decoder layers, which Muon updates",
                "remove it",
            )
        return self

    @model_validator(mode="after")
    def check_engines_take_adapters(self) -> RunConfig:
        if found := self._why_no_engine_takes_adapters():
            raise BrokenRule("lora.sync", *found)
        return self

    def _why_no_engine_takes_adapters(self) -> tuple[str, str] | None:
        """Returns what is wrong with lora.sync=adapters, and the way out."""
        lora, rollout = self.lora, self.rollout
        others = "or set lora.sync=merged"
        if lora.sync == "merged":
            return None
        if rollout.engine not in ENGINES:
            known = ", ".join(ENGINES)
            return (
                f"lora.sync=adapters is for engines {known}, not rollout.engine={rollout.engine}",
                f"use one, {others}",
            )
        if rollout.engine == "embedded":
            given = "lora.sync=adapters, and embedded engines take adapters by no rollout.weight_transport=disk"
            return (given, f"set another, {others}") if rollout.transport == "disk" else None
        server = SERVERS[rollout.engine]
        if rollout.transport not in server.adapter_transports:
            return (
                f"lora.sync=adapters, and {rollout.engine} takes adapters by {' or '.join(server.adapter_transports)}, "
                f"not by rollout.weight_transport={rollout.transport}",
                f"set {server.adapter_transports[0]}, {others}",
            )
        if experts := [target for target in lora.targets if "experts" in target.split(".")]:
            return (
                f"lora.sync=adapters sends rollout.engine={rollout.engine} no adapters of experts, and "
                f"lora.targets has {experts[0]}",
                f"leave experts out, {others}",
            )
        ranks = server.adapter_ranks
        if ranks is not None and lora.rank is not None and lora.rank > ranks[-1]:
            return (
                f"lora.sync=adapters, and {rollout.engine} takes adapters of rank {ranks[-1]} at most, not lora.rank="
                f"{lora.rank}",
                f"lower it, {others}",
            )
        return None

    @property
    def reference_is_policy(self) -> bool:
        """Whether the colocated reference is the policy with its adapters off, and no model of its own."""
        reference = self.reference
        return self.lora.are_trained and reference.placement == "colocated" and reference.path is None

    @model_validator(mode="after")
    def check_dpo_update_size(self) -> RunConfig:
        per_update = self.batch.samples_per_update
        if self.loss.policy == "dpo" and per_update is not None and per_update % 2:
            raise BrokenRule(
                "batch.samples_per_update",
                f"batch.samples_per_update={per_update} is odd, and loss.policy=dpo keeps the two samples of a pair "
                "in one update",
                "make it even",
            )
        return self

    @model_validator(mode="after")
    def check_attention_kernel(self) -> RunConfig:
        is_ring_package = self.attention.strategy == "ring_flash_attn" and self.mesh.cp > 1
        if self.attention.kernel == "flash_attn_3" and is_ring_package:
            raise BrokenRule(
                "attention.kernel",
                f"attention.kernel=flash_attn_3 and mesh.cp={self.mesh.cp} with attention.strategy=ring_flash_attn, "
                "which computes by the flash-attn package whatever the kernel",
                "set attention.strategy=auto, or remove attention.kernel",
            )
        return self

    @model_validator(mode="after")
    def check_full_kl_reference(self) -> RunConfig:
        if self.loss.kl_estimator == "full" and self.reference.placement == "group":
            raise BrokenRule(
                "loss.kl_estimator",
                "loss.kl_estimator=full reads the hidden states of the reference, and reference.placement=group "
                "keeps them elsewhere",
                "set reference.placement=colocated, or choose k3",
            )
        return self

    @model_validator(mode="after")
    def check_reference_group_size(self) -> RunConfig:
        if self.reference.dp is not None and self.reference.placement != "group":
            raise BrokenRule(
                "reference.dp",
                f"reference.dp={self.reference.dp} is for a group of its own",
                "set reference.placement=group, or remove it",
            )
        return self

    @model_validator(mode="after")
    def check_reference_offload_requires_colocated(self) -> RunConfig:
        if self.reference.placement == "group" and "offload" in self.reference.model_fields_set:
            raise BrokenRule(
                "reference.offload",
                f"reference.offload={self.reference.offload} is for a reference beside the policy",
                "remove it, or set reference.placement=colocated",
            )
        return self

    @model_validator(mode="after")
    def check_reference_update_is_read(self) -> RunConfig:
        if self.reference.update_interval_steps is not None and not self.needs_reference:
            raise BrokenRule(
                "reference.update_interval_steps",
                f"reference.update_interval_steps={self.reference.update_interval_steps} updates a model that "
                "loss.kl_coefficient=0 never asks",
                "remove it, or raise loss.kl_coefficient",
            )
        return self

    @model_validator(mode="after")
    def check_disk_transport_has_a_folder(self) -> RunConfig:
        if self.rollout.transport == "disk" and self.run.dir is None:
            raise BrokenRule(
                "rollout.weight_transport",
                "rollout.weight_transport=disk writes below run.dir, which is not set",
                "set it, or use broadcast",
            )
        return self

    @model_validator(mode="after")
    def check_gpus_of_engines(self) -> RunConfig:
        if self.rollout.gpus_per_engine > 1 and self.mesh.device == "cpu":
            raise BrokenRule(
                "rollout.gpus_per_engine",
                f"rollout.gpus_per_engine={self.rollout.gpus_per_engine} does nothing under mesh.device=cpu",
                "remove it",
            )
        return self

    @model_validator(mode="after")
    def check_colocated_engine_count(self) -> RunConfig:
        if self.mesh.dp != "auto" and (problem := self._surplus_engines()):
            raise BrokenRule("rollout.engines", *problem)
        return self

    def _surplus_engines(self) -> tuple[str, str] | None:
        """Why there are more colocated engines than ranks, once mesh.dp is a number, and the way out."""
        if self.rollout.placement != "colocated" or self.rollout.engines <= self.ranks:
            return None
        return (
            f"rollout.engines={self.rollout.engines} are more than the {self.ranks} ranks whose places they take under "
            "rollout.placement=colocated",
            f"set it to at most {self.ranks}, or use more ranks",
        )

    @model_validator(mode="after")
    def check_cpu_offload_reference(self) -> RunConfig:
        if self.fsdp.cpu_offload and self.reference.offload == "none":
            raise BrokenRule(
                "reference.offload",
                "reference.offload=none keeps on the device what fsdp.cpu_offload=true keeps on the host",
                "remove one",
            )
        if self.fsdp.cpu_offload and self.reference.offload == "swap":
            raise BrokenRule(
                "reference.offload",
                "reference.offload=swap moves to the host what fsdp.cpu_offload=true keeps there",
                "remove one",
            )
        return self

    @model_validator(mode="after")
    def check_swapped_reference(self) -> RunConfig:
        if self.reference.offload == "swap" and self.kl_estimator == "full":
            raise BrokenRule(
                "reference.offload",
                "reference.offload=swap takes the policy off the device while the reference computes, and "
                "loss.kl_estimator=full needs both at once",
                "set reference.offload=sleep, or another loss.kl_estimator",
            )
        return self

    @model_validator(mode="after")
    def check_auto_dp_with_groups(self) -> RunConfig:
        for name, group in (("reference", self.reference), ("critic", self.critic)):
            if self.mesh.dp == "auto" and group.placement == "group" and group.dp is None:
                raise BrokenRule(
                    "mesh.dp",
                    f"mesh.dp=auto cannot share the cluster with {name}.placement=group of the same size",
                    f"set {name}.dp, or mesh.dp",
                )
        return self

    @model_validator(mode="after")
    def check_demonstration_settings(self) -> RunConfig:
        if self.algorithm == "sft":
            return self
        of_files = [f"data.{name}" for name in _changed(self.data, ("max_tokens",))]
        of_files += ["run.epochs"] if self.run.epochs is not None else []
        fields = [f"data.{name}" for name in _changed(self.data, ("train_on",))]
        if self.data.overlong_prompts in ("truncate", "split"):
            fields.append("data.overlong_prompts")
        for field in fields + (of_files if self.has_rollouts else []):
            readers = "algorithm=sft or dpo" if field in of_files else "algorithm=sft"
            raise BrokenRule(
                field,
                f"{field}={short_text(self.value_of(field))} is of {readers}, and algorithm={self.algorithm}",
                f"remove it, or set {readers}",
            )
        return self

    @model_validator(mode="after")
    def check_prompt_template(self) -> RunConfig:
        if self.data.prompt_template is not None and self.data.prompt_column != "prompt":
            raise BrokenRule(
                "data.prompt_column",
                f"data.prompt_column={short_text(self.data.prompt_column)} and data.prompt_template both say where "
                "prompts come from",
                "remove one of them",
            )
        return self

    @model_validator(mode="after")
    def check_schedule_end(self) -> RunConfig:
        has_end = self.total_updates is not None or self.run.epochs is not None
        ratio = self.optim.warmup_ratio
        if (self.optim.schedule != "constant" or ratio) and not has_end:
            given = f"optim.warmup_ratio={ratio:g}" if ratio else f"optim.schedule={self.optim.schedule}"
            raise BrokenRule(
                given.partition("=")[0],
                f"{given} is of a schedule that ends nowhere",
                "set optim.total_updates, run.steps or, under sft, run.epochs",
            )
        return self

    @model_validator(mode="after")
    def check_warmup_of_steps(self) -> RunConfig:
        total, own = self.total_updates, self.optim.total_updates
        if total is not None and self.warmup_updates >= total:
            of = f"the {total} of run.steps={self.run.steps}" if own is None else f"optim.total_updates={own}"
            raise BrokenRule(
                "optim.warmup_updates",
                f"optim.warmup_updates={self.warmup_updates} leaves no update at the full rate out of {of}",
                "lower the first or raise the second",
            )
        return self

    @model_validator(mode="after")
    def check_max_failed_steps(self) -> RunConfig:
        if _changed(self.rollout, ["max_failed_steps"]) and not self.skips_failures:
            raise BrokenRule(
                "rollout.max_failed_steps",
                f"rollout.max_failed_steps={self.rollout.max_failed_steps} is for failures that are skipped",
                "set rollout.reward_failure=skip, or environment.failure=skip, or remove it",
            )
        return self

    @model_validator(mode="after")
    def check_schedule_length(self) -> RunConfig:
        needed = None if self.run.steps is None else self.run.steps * self.updates_per_step
        if needed is not None and self.optim.total_updates is not None and self.optim.total_updates < needed:
            per_update, steps = self.batch.samples_per_update, f"run.steps={self.run.steps}"
            ways = f"set optim.total_updates={needed}"
            if self.updates_per_step > 1 and per_update is not None and self.algorithm != "sft":
                ways += (
                    f", or raise batch.samples_per_update={per_update}, of {self.samples_per_step} samples in a step"
                )
            raise BrokenRule(
                "optim.total_updates",
                f"optim.total_updates={self.optim.total_updates} ends before the run's {needed} updates ({steps} x "
                f"{self.updates_per_step} updates each)",
                ways,
            )
        return self

    @model_validator(mode="after")
    def check_learning_rates(self) -> RunConfig:
        """Steps of AdamW and Muon have about the length of the rate; those of SGD have the gradient's."""
        rates = {"optim.lr": self.optim.lr, "optim.adamw_lr": self.optim.adamw_lr, "critic.lr": self.critic.lr}
        for field, rate in rates.items():
            if rate is not None and rate > 1 and self.optim.name != "sgd":
                raise BrokenRule(
                    field,
                    f"{field}={rate:g} is more than 1, and each update of optim.name={self.optim.name} moves every "
                    "parameter by about that",
                    "lower it to a rate such as 1e-6, or set optim.name=sgd",
                )
        return self

    @model_validator(mode="after")
    def check_profiled_updates(self) -> RunConfig:
        chosen = self.profile.updates
        total = self.total_updates
        if chosen is not None and total is not None and max(chosen) > total:
            named = "the updates of run.steps" if self.optim.total_updates is None else "optim.total_updates"
            raise BrokenRule(
                "profile.updates",
                f"profile.updates={list(chosen)} goes beyond {named}={total}",
                "choose earlier ones",
            )
        if chosen is not None and self.run.dir is None:
            raise BrokenRule(
                "profile.updates",
                f"profile.updates={list(chosen)} has no folder to be written to",
                "set run.dir",
            )
        return self

    @property
    def algorithm_title(self) -> str:
        """The algorithm by its name, where it has one, else by its estimator and loss."""
        if not self.has_rollouts or (self.estimator, self.loss.policy) in (("grpo", "ppo"), ("gae", "ppo")):
            return self.algorithm.upper()
        return f"{self.estimator} with {self.loss.policy} loss"

    @property
    def samples_per_step(self) -> int:
        """Samples in one step of the loop: prompts x responses, or one update's under sft and dpo (two of a pair)."""
        if not self.has_rollouts:
            return self.batch.samples_per_update or 1
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates that one full rollout batch leads to."""
        per_update = self.batch.samples_per_update or self.samples_per_step
        return self.loss.epochs * math.ceil(self.samples_per_step / per_update)

    @property
    def total_updates(self) -> int | None:
        """The update at which the learning rate's schedule ends; None while it and the number of steps are unknown."""
        if self.optim.total_updates is not None or self.run.steps is None:
            return self.optim.total_updates
        return self.run.steps * self.updates_per_step

    @property
    def warmup_updates(self) -> int:
        """Updates in which the rate rises, however they are given; of a share, once `total_updates` is known."""
        ratio = self.optim.warmup_ratio
        if ratio is None:
            return self.optim.warmup_updates
        total = self.total_updates or 0
        updates = math.ceil(round(ratio * total, 6))  # 0.07 x 100 is 7, and a bit more in floats
        return min(updates, max(total - 1, 0))  # a trial run of one update takes it at the full rate

    def with_steps_of(self, num_records: int, *, step: int = 0, passed: int = 0) -> RunConfig:
        """These settings for so many demonstrations: where run.epochs is set, run.steps becomes a number.

        Args:
            step: where the run begins: 0, or the step of the checkpoint that it resumes from.
            passed: how many demonstrations of its epochs are behind it by then.

        Raises:
            ConfigError: optim.total_updates, optim.warmup_updates or profile.updates do not fit so many steps.
        """
        if self.run.epochs is None:
            return self
        steps = step + math.ceil(max(0, self.run.epochs * num_records - passed) / self.samples_per_step)
        steps = min(steps, self.run.steps or steps)
        tree = self.model_dump(exclude_unset=True)
        config_from_dict({**tree, "run": {**tree.get("run", {}), "steps": steps}})  # for the rules about steps
        # not among the settings that were given: a run that goes on with more epochs has more steps
        run = RunSettings.model_construct(self.run.model_fields_set, **{**dict(self.run), "steps": steps})
        return self.model_copy(update={"run": run})

    @property
    def actor_mesh(self) -> tuple[int, int]:
        """(dp_replicate, dp) of the actor group. Raises ConfigError while mesh.dp is auto: see `with_ranks`."""
        if self.mesh.dp == "auto":
            raise ConfigError(
                "mesh.dp=auto is not a number yet", field="mesh.dp", hint="use with_ranks(ranks), or set mesh.dp"
            )
        return self.mesh.dp_replicate, self.mesh.dp

    @property
    def data_ranks(self) -> int:
        """Shares that a batch of the actor group is cut into: dp_replicate x dp."""
        dp_replicate, dp = self.actor_mesh
        return dp_replicate * dp

    @property
    def ranks(self) -> int:
        """Processes of the actor group; as `data_ranks`, not known while mesh.dp is auto."""
        return self.data_ranks * self.mesh.cp

    @property
    def reference_mesh(self) -> tuple[int, int]:
        """(dp_replicate, dp) of a reference group of its own; its cp is the actor's."""
        return self.actor_mesh if self.reference.dp is None else (1, self.reference.dp)

    @property
    def reference_ranks(self) -> int:
        """Processes of a reference group of its own."""
        dp_replicate, dp = self.reference_mesh
        return dp_replicate * dp * self.mesh.cp

    def with_ranks(self, ranks: int) -> RunConfig:
        """These settings for an actor group of `ranks` processes: where mesh.dp is auto, it becomes a number.

        Raises:
            ConfigError: ranks is not a multiple of mesh.dp_replicate x mesh.cp, or fewer than the colocated engines.
        """
        if self.mesh.dp != "auto":
            return self
        copies = self.mesh.dp_replicate * self.mesh.cp
        if ranks < 1 or ranks % copies:
            raise ConfigError(
                f"mesh.dp=auto: {ranks} ranks are no multiple of mesh.dp_replicate={self.mesh.dp_replicate} x "
                f"mesh.cp={self.mesh.cp}",
                field="mesh.dp",
                hint=f"start {max(1, round(ranks / copies)) * copies} ranks, or change mesh.cp or mesh.dp_replicate",
            )
        mesh = self.mesh.model_copy(update={"dp": ranks // copies})
        found = self.model_copy(update={"mesh": mesh})
        if problem := found._surplus_engines():
            raise ConfigError(problem[0], field="rollout.engines", hint=problem[1])
        return found

    def with_sharding(self, level: str) -> RunConfig:
        """These settings with fsdp.sharding at a level that `auto` has become."""
        if level == self.fsdp.sharding:
            return self
        return self.model_copy(update={"fsdp": self.fsdp.model_copy(update={"sharding": level})})

    @property
    def max_pack_tokens(self) -> int:
        """Hard cap on the tokens of one pack, which the cp ranks share."""
        return self.batch.max_tokens_per_rank * self.mesh.cp

    @property
    def critic_mesh(self) -> tuple[int, int]:
        """(dp_replicate, dp) of the critic; its cp is the actor's."""
        return self.actor_mesh if self.critic.dp is None else (1, self.critic.dp)

    @property
    def critic_ranks(self) -> int:
        """Processes of a critic group of its own."""
        dp_replicate, dp = self.critic_mesh
        return dp_replicate * dp * self.mesh.cp

    def mesh_of(self, role: Role) -> tuple[int, int]:
        """(dp_replicate, dp) of a role."""
        if role == "actor":
            return self.actor_mesh
        return self.reference_mesh if role == "ref" else self.critic_mesh

    @property
    def model_paths(self) -> dict[str, Path]:
        """Every setting that names a model, or adapters of one -> the path, where it is set."""
        fields = ("model.path", "reference.path", "critic.path", "lora.path")
        found = {field: self.value_of(field) for field in fields}
        return {field: path for field, path in found.items() if path is not None}

    def with_loss(self, settings: Mapping[str, Any]) -> RunConfig:
        """These settings with another loss, as one call of `forward_backward` may have it.

        With a policy loss its parameters are those given beside it, or their defaults.

        Args:
            settings: names of `loss` that say how each token counts, and none that a step, a plan or a reference
                model follows from.

        Raises:
            ConfigError: another name, or a value that the settings would not take.
        """
        if not isinstance(settings, Mapping):
            problem = f"settings={short_repr(settings)} are not names of loss and their values"
            raise ConfigError(problem, field="settings", hint='write them like {"policy": "cispo", "clip_high": 0.3}')
        for name in settings:
            if name not in _LOSS_OF_A_CALL:
                problem = f"settings has {short_repr(name)}, which is not what one call can choose"
                raise ConfigError(problem, field="settings", hint=f"choose of {', '.join(_LOSS_OF_A_CALL)}")
        policy = settings.get("policy", self.loss.policy)
        choices = [name for name in POLICY_LOSSES if name not in PAIRWISE]
        if policy not in (*choices, self.loss.policy):
            problem = f"policy={short_repr(policy)} is not what one call can choose"
            raise ConfigError(
                problem, field="settings", hint=f"use {', '.join(choices)}, or set loss.policy for the whole run"
            )
        tree = self.model_dump(exclude_unset=True)
        kept = tree.get("loss", {})
        if "policy" in settings:
            kept = {name: value for name, value in kept.items() if name not in _OF_POLICY}
        return config_from_dict({**tree, "loss": {**kept, **settings}})

    def with_model_paths(self, paths: Mapping[str, Path]) -> RunConfig:
        """These settings with other models, named as in `model_paths`."""
        changed: dict[str, Any] = {}
        for field, path in paths.items():
            section = field.removesuffix(".path")
            changed[section] = getattr(self, section).model_copy(update={"path": path})
        return self.model_copy(update=changed)

    def with_adapters(self, rank: int, alpha: float, targets: Sequence[str]) -> RunConfig:
        """These settings with what the folder at lora.path says of its adapters.

        Args:
            targets: names of modules. Where lora.targets is set it stays, and the model tells whether it names these.

        Raises:
            ConfigError: lora.rank or lora.alpha is set, and another; or engines cannot be sent such adapters.
        """
        found: dict[str, Any] = {"rank": rank, "alpha": alpha}
        for name, value in found.items():
            own = getattr(self.lora, name)
            if name in self.lora.model_fields_set and own not in (None, value):
                raise ConfigError(
                    f"lora.{name}={own}, and it is {value} in lora.path={self.lora.path}",
                    field=f"lora.{name}",
                    hint=f"remove lora.{name}: it is that of the folder",
                )
        if "targets" not in self.lora.model_fields_set:
            found["targets"] = tuple(targets)
        made = self.model_copy(update={"lora": self.lora.model_copy(update=found)})
        if wrong := made._why_no_engine_takes_adapters():
            problem, way_out = wrong
            raise ConfigError(problem, field="lora.sync", hint=way_out)
        return made

    def folder_of(self, role: Role) -> tuple[Path, str]:
        """The model folder of a role, and the setting that names it."""
        path = {"actor": None, "ref": self.reference.path, "critic": self.critic.path}[role]
        if path is None:
            return self.model.path, "model.path"
        return path, "reference.path" if role == "ref" else "critic.path"


_OF_ROLLOUTS = (
    "rollout", "environment", "evaluation", "reference", "advantage", "loss", "correction", "critic", "data",
)  # fmt: skip
_OF_RECORDS = frozenset(
    ("evaluation.interval_steps", *(f"data.{name}" for name in DataSettings.model_fields if name != "answer_column"))
)
_READ_WITHOUT_ROLLOUTS: dict[str, frozenset[str]] = {
    "sft": _OF_RECORDS | {"data.answer_column", "loss.reduction", "loss.constant_length", "loss.entropy_coefficient"},
    "dpo": _OF_RECORDS | {"loss.policy", "loss.reduction", "loss.dpo_beta", "reference.*"},
}
"""Algorithm -> the settings of these sections that it reads."""
_OF_POLICY = (
    "clip_low", "clip_high", "dual_clip", "dro_beta", "sapo_temperature_positive", "sapo_temperature_negative",
)  # fmt: skip
_LOSS_OF_A_CALL = ("policy", *_OF_POLICY, "reduction", "constant_length", "entropy_coefficient")


def _changed(section: BaseModel, names: Iterable[str]) -> list[str]:
    """Returns which of these settings are not at their defaults."""
    fields = type(section).model_fields
    return [name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)]


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings of one YAML file with dotted overrides (`optim.lr=1e-6`) on top.

    Args:
        path: the file, which may build on another (`base: FILE`), or a nested dictionary of what it would hold.

    Raises:
        ConfigError: naming the setting, its value, the rule and the way out.
    """
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    if not is_path and not isinstance(path, Mapping):
        hint = "name a YAML file, or give a dictionary of settings"
        raise ConfigError(f"path={short_repr(path)} is not a path", field="path", hint=hint)
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str | bytes)
    if not is_list or not all(isinstance(override, str) for override in overrides):
        problem = f"overrides={short_repr(overrides)} is not a list of texts"
        raise ConfigError(problem, field="overrides", hint="write them like ['optim.lr=1e-6', 'mesh.dp=2']")
    # overrides must not change what the caller gave, and the base of a dictionary begins at the present folder
    tree = with_base(copy.deepcopy(path), Path()) if isinstance(path, Mapping) else read_settings(Path(path))
    for override in overrides:
        apply_override(tree, override)
    find_code_beside(tree, Path())
    if not isinstance(path, Mapping):
        find_code_beside(tree, Path(path).parent)
    return config_from_dict(tree)


def config_from_dict(tree: dict[str, Any]) -> RunConfig:
    """The checked settings of a nested dict (what a YAML file holds).

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        findings = error.errors(include_url=False)
    raise config_error(findings, _known_settings())


def _known_settings() -> Sections:
    """Returns section ("" for the top level) -> its names -> their fields."""
    models: dict[str, type[BaseModel]] = {"": RunConfig}
    for name, info in RunConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            models[name] = info.annotation
    return {section: model.model_fields for section, model in models.items()}
