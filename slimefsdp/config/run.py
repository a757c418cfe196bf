"""Defines and reads the settings of a run: of its Trainer, and of data, rollouts, cluster and service."""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slimefsdp.config.base import LONGEST_S, PositiveInt, Settings, broken_rule
from slimefsdp.config.data import DataSettings
from slimefsdp.config.loader import apply_override, find_code_beside, read_settings, with_base
from slimefsdp.config.messages import BrokenRule
from slimefsdp.config.rollout import (
    ENGINES,
    SERVERS,
    EnvironmentSettings,
    EvaluationSettings,
    RolloutSettings,
    Sampling,
    temperatures_of,
)
from slimefsdp.config.sections import RunSettings
from slimefsdp.config.trainer import TrainerConfig
from slimefsdp.errors import ConfigError, short_repr, short_text

# each process is given these
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def _variables(value: Any) -> Any:
    hint = "write it like {NCCL_DEBUG: INFO}, and quote numbers"
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise broken_rule("must be names with texts", hint)
    for name in value:
        if not re.fullmatch(r"[A-Za-z_]\w*", str(name), re.ASCII):
            raise broken_rule("must have names of environment variables", hint)
        if name in _OWN_VARIABLES or name.startswith("RAY_"):
            raise broken_rule(f"must not have {name}, which each process is given", f"leave {name} out")
    return value


class ClusterSettings(Settings):
    """Chooses the Ray cluster, timeouts, and the number of restarts."""

    address: str | None = Field(None, min_length=1, description="a running cluster; null means a new local cluster")
    allow_without_token: bool = Field(
        False,
        description="join a cluster of other machines although RAY_AUTH_MODE is not `token`, as on KubeRay and "
        "Anyscale; then whoever reaches the cluster's ports can run code in the run",
    )
    environment: Annotated[dict[str, str], BeforeValidator(_variables)] = Field(
        {},
        description="environment variables of every rank and engine, such as {NCCL_SOCKET_IFNAME: eth0}; they replace "
        "those that the nodes of the cluster were started with",
    )
    launch_timeout_s: float = Field(300.0, gt=0, le=LONGEST_S, description="time limit until all ranks are ready")
    call_timeout_s: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="time limit of one call, from when it begins on the ranks"
    )
    sync_timeout_s: float = Field(120.0, gt=0, le=LONGEST_S, description="time limit of one transfer of weights")
    ping_timeout_s: float = Field(
        60.0,
        gt=0,
        le=LONGEST_S,
        description="a process that does not answer a ping for so long during a call counts as hung. So does a process "
        "without progress for 10 times this setting, and also for 10 times its usual time in that activity (at most "
        "for the usual time plus 100 times this setting). A launch and an activity's first time have the call's limit",
    )
    grace_s: float = Field(
        120.0,
        gt=0,
        le=LONGEST_S,
        description="time limit, after SIGTERM or SIGINT, for the end of the step and a checkpoint; after it, `train` "
        "ends without the checkpoint",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="how often lost ranks, and separately lost engines, are replaced; 0 means that a loss ends the "
        "run. `train` replaces them only if checkpoint.interval_steps is set",
    )


def _host_and_port(value: str) -> str:
    found = re.fullmatch(r"(?:[^\s:\[\]/]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", value)
    if found is None or int(found[1]) > 65535:
        raise broken_rule("must be a host and a port", "write it like 127.0.0.1:8000, or like '[::1]:8000'")
    return value


class ServiceSettings(Settings):
    """Configures the HTTP service of `slimefsdp serve`."""

    address: Annotated[str, AfterValidator(_host_and_port)] = Field(
        "127.0.0.1:8000",
        description="host and port at which the server listens; a host other than loopback needs api_key_env; port 0 "
        "means a free port, which is printed",
    )
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="environment variable with keys, separated by commas; each request must bring one. Each key is "
        "a user with separate runs and checkpoints, and the first key is the operator's; null means no keys",
    )
    model_name: str | None = Field(
        None, min_length=1, description="another name for the base model besides model.path; null means no other name"
    )
    max_samplers: PositiveInt = Field(
        256,
        description="limit on a client's samplers with unnamed weights; the oldest are removed, also from the disk",
    )
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo"] | None = Field(
        None,
        description="the loss that replaces `stable_reinforce`, whose formula is not published; null means that "
        "`stable_reinforce` is refused",
    )
    max_version_bytes: int = Field(
        2**30, ge=1024, description="most bytes of adapters or models in the sampling engine, besides the base"
    )

    @property
    def host(self) -> str:
        """Returns the host name or IP address in `address`, without the brackets of IPv6."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


class RunConfig(TrainerConfig):
    """Holds all settings of a run."""

    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    cluster: ClusterSettings = ClusterSettings()
    service: ServiceSettings = ServiceSettings()

    @property
    def temperature(self) -> float:
        return self.rollout.temperature

    @property
    def collective_timeout_s(self) -> float:
        return self.cluster.call_timeout_s

    def with_ranks(self, ranks: int) -> Self:
        """Extends `TrainerConfig.with_ranks`; raises a ConfigError if there are more colocated engines than ranks."""
        extended = super().with_ranks(ranks)
        if problem := extended._surplus_engines():
            raise ConfigError(problem[0], field="rollout.engines", hint=problem[1])
        return extended

    def with_adapters(self, rank: int, alpha: float, targets: Sequence[str]) -> Self:
        """Extends `TrainerConfig.with_adapters`; raises a ConfigError if the engines do not support the adapters."""
        extended = super().with_adapters(rank, alpha, targets)
        if wrong := extended._why_no_engine_takes_adapters():
            raise ConfigError(wrong[0], field="lora.sync", hint=wrong[1])
        return extended

    @model_validator(mode="after")
    def check_settings_without_rollouts(self) -> Self:
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
    def check_environment(self) -> Self:
        rollout = self.rollout
        if rollout.environment is None:
            return self
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
        """Returns how responses are sampled for training, or in evaluations, where `evaluation` comes first."""
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
    def check_temperatures(self) -> Self:
        engine = self.rollout.engine
        low, high = temperatures_of(engine)
        for section, value in (("rollout", self.rollout.temperature), ("evaluation", self.evaluation.temperature)):
            if value and not low <= value <= high:  # 0 means greedy
                raise BrokenRule(
                    f"{section}.temperature",
                    f"{section}.temperature={value:g}: {engine} samples from {low:g} to {high:g}",
                    "set one of these, or rollout.engine=embedded",
                )
        return self

    @property
    def skips_failures(self) -> bool:
        """Returns whether a response without a valid reward drops its group instead of ending the run."""
        return self.rollout.reward_failure == "skip"

    @property
    def rewards_by(self) -> str:
        """Returns the setting that names the reward function or environment."""
        return "rollout.reward" if self.rollout.environment is None else "rollout.environment"

    @model_validator(mode="after")
    def check_engines_take_adapters(self) -> Self:
        if found := self._why_no_engine_takes_adapters():
            raise BrokenRule("lora.sync", *found)
        return self

    def _why_no_engine_takes_adapters(self) -> tuple[str, str] | None:
        """Returns (what is wrong with lora.sync=adapters, the way out), or None if nothing is wrong."""
        lora, rollout = self.lora, self.rollout
        others = "or set lora.sync=merged"
        if lora.sync == "merged":
            return None
        if rollout.engine not in ENGINES:
            known = ", ".join(ENGINES)
            return (
                f"lora.sync=adapters is for engines {known}, not rollout.engine={rollout.engine}",
                f"use one of these engines, {others}",
            )
        if rollout.engine == "embedded":
            given = "lora.sync=adapters, and embedded engines cannot take adapters by rollout.weight_transport=disk"
            return (given, f"set another transport, {others}") if rollout.transport == "disk" else None
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

    @model_validator(mode="after")
    def check_colocated_engine_count(self) -> Self:
        if self.mesh.dp != "auto" and (problem := self._surplus_engines()):
            raise BrokenRule("rollout.engines", *problem)
        return self

    def _surplus_engines(self) -> tuple[str, str] | None:
        """Returns (problem, way out) if there are more colocated engines than ranks; mesh.dp must be a number."""
        if self.rollout.placement != "colocated" or self.rollout.engines <= self.ranks:
            return None
        return (
            f"rollout.engines={self.rollout.engines} are more than the {self.ranks} ranks whose places they take under "
            "rollout.placement=colocated",
            f"set it to at most {self.ranks}, or use more ranks",
        )

    @model_validator(mode="after")
    def check_schedule_end(self) -> Self:
        has_end = self.total_updates is not None or self.run.epochs is not None
        warmup = self.optim.warmup_updates
        is_share = 0 < warmup < 1
        if (self.optim.schedule != "constant" or is_share) and not has_end:
            given = f"optim.warmup_updates={warmup:g}" if is_share else f"optim.schedule={self.optim.schedule}"
            raise BrokenRule(
                given.partition("=")[0],
                f"{given} needs a schedule with an end",
                "set optim.total_updates, run.steps or, under sft, run.epochs",
            )
        return self

    @model_validator(mode="after")
    def check_schedule_length(self) -> Self:
        needed = None if self.run.steps is None else self.run.steps * self.updates_per_step
        if needed is not None and self.optim.total_updates is not None and self.optim.total_updates < needed:
            per_update, steps = self.batch.samples_per_update, f"run.steps={self.run.steps}"
            ways = f"set optim.total_updates={needed}"
            if self.updates_per_step > 1 and per_update is not None and self.algorithm != "sft":
                of_step = f"a step has {self.samples_per_step} samples"
                ways += f", or raise batch.samples_per_update (now {per_update}; {of_step})"
            raise BrokenRule(
                "optim.total_updates",
                f"optim.total_updates={self.optim.total_updates} ends before the run's {needed} updates ({steps} x "
                f"{self.updates_per_step} updates each)",
                ways,
            )
        return self

    @model_validator(mode="after")
    def check_profiled_updates(self) -> Self:
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
        """Returns the name of the algorithm; if it has no name, its estimator and loss."""
        if not self.has_rollouts or (self.estimator, self.loss.policy) in (("grpo", "ppo"), ("gae", "ppo")):
            return self.algorithm.upper()
        return f"{self.estimator} with {self.loss.policy} loss"

    @property
    def samples_per_step(self) -> int:
        """Returns the samples of a step: prompts x responses, or the samples of an update under sft and dpo."""
        if not self.has_rollouts:
            return self.batch.samples_per_update or 1
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        per_update = self.batch.samples_per_update or self.samples_per_step
        return self.loss.epochs * math.ceil(self.samples_per_step / per_update)

    @property
    def total_updates(self) -> int | None:
        """Returns the number of updates in the learning rate's schedule, or None if it is unknown."""
        if self.optim.total_updates is not None or self.run.steps is None:
            return self.optim.total_updates
        return self.run.steps * self.updates_per_step

    def with_steps_of(self, num_records: int, *, step: int = 0, passed: int = 0) -> Self:
        """Returns these settings for a number of records; if run.epochs is set, run.steps is computed from it.

        Args:
            step: the step at which the run starts: 0, or the step of the checkpoint from which it resumes.
            passed: how many records, counted over all epochs, were trained on before this step.

        Raises:
            ConfigError: optim.total_updates, optim.warmup_updates or profile.updates do not fit the number of steps.
        """
        if self.run.epochs is None:
            return self
        steps = step + math.ceil(max(0, self.run.epochs * num_records - passed) / self.samples_per_step)
        steps = min(steps, self.run.steps or steps)
        tree = self.model_dump(exclude_unset=True)
        self.checked({**tree, "run": {**tree.get("run", {}), "steps": steps}})  # checks the rules about steps
        # run.steps is not marked as set by the user, because a run that resumes with more epochs has more steps
        run = RunSettings.model_construct(self.run.model_fields_set, **{**dict(self.run), "steps": steps})
        return self.model_copy(update={"run": run})


_OF_ROLLOUTS = (
    "rollout", "environment", "evaluation", "reference", "advantage", "loss", "correction", "critic", "data",
)  # fmt: skip
_OF_RECORDS = frozenset(
    ("evaluation.interval_steps", *(f"data.{name}" for name in DataSettings.model_fields if name != "answer_column"))
)
_READ_WITHOUT_ROLLOUTS: dict[str, frozenset[str]] = {
    "sft": _OF_RECORDS | {"data.answer_column", "loss.reduction", "loss.constant_length", "loss.entropy_coefficient"},
    "dpo": _OF_RECORDS | {"loss.policy", "loss.reduction", "loss.beta", "reference.*"},
}
"""Algorithm -> the settings that it reads of the sections in `_OF_ROLLOUTS`."""


def load_config(path: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the checked settings of a YAML file, changed by overrides such as `optim.lr=1e-6`.

    Args:
        path: the file, which may have a line `base: FILE`; or a nested dictionary with the content of such a file.

    Raises:
        ConfigError: a setting breaks a rule; the error names the setting, its value, the rule and the way out.
    """
    is_path = isinstance(path, str | os.PathLike) and isinstance(os.fspath(path), str)
    if not is_path and not isinstance(path, Mapping):
        hint = "name a YAML file, or give a dictionary of settings"
        raise ConfigError(f"path={short_repr(path)} is not a path", field="path", hint=hint)
    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str | bytes)
    if not is_list or not all(isinstance(override, str) for override in overrides):
        problem = f"overrides={short_repr(overrides)} is not a list of texts"
        raise ConfigError(problem, field="overrides", hint="write them like ['optim.lr=1e-6', 'mesh.dp=2']")
    # the caller's dictionary must not be changed; the path of its base starts at the current folder
    tree = with_base(copy.deepcopy(path), Path()) if isinstance(path, Mapping) else read_settings(Path(path))
    for override in overrides:
        apply_override(tree, override)
    find_code_beside(tree, Path())
    if not isinstance(path, Mapping):
        find_code_beside(tree, Path(path).parent)
    return config_from_dict(tree)


def config_from_dict(tree: Mapping[str, Any]) -> RunConfig:
    """Returns the checked settings of a nested dictionary with the content of a YAML file.

    Raises:
        ConfigError: see `load_config`.
    """
    return RunConfig.checked(tree)
