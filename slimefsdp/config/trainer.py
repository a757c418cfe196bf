"""Defines the settings that a Trainer reads, and the rules between them.

These settings are about models, meshes, optimisers and losses. `RunConfig` (run.py) adds engines, service and cluster.
Settings are read once, checked once and frozen. This module does not import torch, to report wrong settings quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ValidationError, model_validator

from slimefsdp.algorithms.registry import PAIRWISE, POLICY_LOSSES
from slimefsdp.config.algorithm import AlgorithmSettings
from slimefsdp.config.base import kinds_of
from slimefsdp.config.messages import BrokenRule, Kinds, config_error
from slimefsdp.config.sections import (
    AdamWSettings,
    AttentionSettings,
    BatchSettings,
    CheckpointSettings,
    FsdpSettings,
    LoraSettings,
    MeshSettings,
    ModelSettings,
    MuonSettings,
    OptimChoice,
    PrecisionSettings,
    ProfileSettings,
    ReferenceSettings,
    RunSettings,
)
from slimefsdp.errors import ConfigError, short_repr, short_text
from slimefsdp.rpc import ROLES, Role


class TrainerConfig(AlgorithmSettings):
    """Holds all settings that a Trainer reads."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    lora: LoraSettings = LoraSettings()
    reference: ReferenceSettings = ReferenceSettings()
    mesh: MeshSettings = MeshSettings()
    attention: AttentionSettings = AttentionSettings()
    precision: PrecisionSettings = PrecisionSettings()
    fsdp: FsdpSettings = FsdpSettings()
    batch: BatchSettings = BatchSettings()
    optim: OptimChoice = AdamWSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    profile: ProfileSettings = ProfileSettings()

    def __repr__(self) -> str:
        """Returns a short text with the main choices, and the number of settings that the user has set."""
        mesh = f"mesh={self.mesh.dp_replicate} x {self.mesh.dp} x {self.mesh.cp}"
        mesh += f" x tp {self.mesh.tp}" * (self.mesh.tp > 1) + f", ep {self.mesh.ep}" * (self.mesh.ep > 1)
        known_by = {"model.path": self.model.path, "run.dir": self.run.dir, "optim.lr": self.optim.lr}
        shown = [f"{field}={short_text(value)}" for field, value in known_by.items() if value is not None]
        sections = [getattr(self, name) for name in self.model_fields_set]
        given = sum(len(value.model_fields_set) if isinstance(value, BaseModel) else 1 for value in sections)
        return f"{type(self).__name__}({self.algorithm}, {', '.join([*shown, mesh])}; {given} settings given)"

    __str__ = __repr__

    @property
    def temperature(self) -> float:
        """Returns the temperature of sampling and of log-probs."""
        return 1.0

    @property
    def collective_timeout_s(self) -> float:
        return 3600.0

    @property
    def total_updates(self) -> int | None:
        """Returns the number of updates in the learning rate's schedule, or None if it is unknown."""
        return self.optim.total_updates

    @classmethod
    def checked(cls, tree: Mapping[str, Any]) -> Self:
        """Returns the checked settings of a nested dictionary with the content of a YAML file.

        Raises:
            ConfigError: a setting breaks a rule; the error names the setting, its value, the rule and the way out.
        """
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            findings = error.errors(include_url=False)
        raise config_error(findings, cls._known_settings())

    @classmethod
    def _known_settings(cls) -> Kinds:
        """Returns section ("" for the top level) -> kind ("" if there is only one) -> settings."""
        sections: dict[str, dict[str, Any]] = {"": {"": cls.model_fields}}
        for name, info in cls.model_fields.items():
            sections[name] = {kind: model.model_fields for kind, model in kinds_of(info.annotation).items()}
        return {name: kinds for name, kinds in sections.items() if kinds}

    def effective(self, field: str) -> Any:
        """Extends `AlgorithmSettings.effective`: lora.rank counts as set if lora.path is set."""
        return self.lora.rank or self.lora.path if field == "lora.rank" else super().effective(field)

    @model_validator(mode="after")
    def check_lora_support(self) -> Self:
        if not self.lora.are_trained:
            return self
        given = "rank" if self.lora.path is None else "path"
        setting = f"lora.{given}={getattr(self.lora, given)}"
        if self.model.frozen:
            raise BrokenRule(
                "model.frozen",
                f"model.frozen={short_text(list(self.model.frozen))} freezes parts of a model that "
                f"{setting} freezes as a whole",
                "remove one of them",
            )
        for name in changed(self.reference, ["offload", "update_interval_steps"] if self.reference_is_policy else []):
            raise BrokenRule(
                f"reference.{name}",
                f"reference.{name}={getattr(self.reference, name)} is for a reference with weights of its own, and "
                f"with {setting} it is the policy without its adapters",
                "remove it, or set reference.path",
            )
        return self

    @model_validator(mode="after")
    def check_muon_with_adapters(self) -> Self:
        """Refuses Muon or optim.adamw_lr if they would apply to no adapter.

        This method judges the keywords of `lora.targets`, such as `mlp`. Names and patterns of modules, such as
        `q_proj`, are judged when the model is built.
        """
        targets, optim = self.lora.targets, self.optim
        # a critic's head is a matrix for the optimiser, and the critic has the same settings
        if not isinstance(optim, MuonSettings) or self.lora.rank is None or self.algorithm == "ppo":
            return self
        if set(targets) <= {"head", "lm_head"}:
            raise BrokenRule(
                "optim.name",
                f"optim.name=muon updates matrices of the decoder layers, and lora.targets={list(targets)} has "
                "adapters on none",
                "set optim.name=adamw, or add others to lora.targets",
            )
        if optim.adamw_lr is not None and set(targets) <= {"attention", "mlp", "all-linear", "experts"}:
            raise BrokenRule(
                "optim.adamw_lr",
                f"optim.adamw_lr={optim.adamw_lr} is for what AdamW updates besides Muon, and adapters of "
                f"lora.targets={list(targets)} are matrices of the decoder layers, which Muon updates",
                "remove it",
            )
        return self

    @model_validator(mode="after")
    def check_expert_ranks(self) -> Self:
        """Refuses mesh.ep that does not divide the ranks of a copy; with mesh.dp=auto `build_mesh` checks it."""
        mesh = self.mesh
        for role, dp in ((role, self.mesh_of(role)[1]) for role in ROLES if mesh.dp != "auto"):
            ranks = dp * mesh.ranks_per_pack
            if ranks % mesh.ep:
                raise BrokenRule(
                    "mesh.ep",
                    f"mesh.ep={mesh.ep} does not divide the {ranks} ranks of a copy of the {role}'s model",
                    "set it to a divisor of dp x cp x tp",
                )
        return self

    @model_validator(mode="after")
    def check_warmup(self) -> Self:
        total, own = self.total_updates, self.optim.total_updates
        if total is not None and self.warmup_updates >= total:
            of = f"the {total} of run.steps={self.run.steps}" if own is None else f"optim.total_updates={own}"
            raise BrokenRule(
                "optim.warmup_updates",
                f"optim.warmup_updates={self.warmup_updates} leaves no update at the full rate out of {of}",
                "lower it, or make the schedule longer",
            )
        return self

    @model_validator(mode="after")
    def check_dpo_update_size(self) -> Self:
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
    def check_reference_update_is_read(self) -> Self:
        if self.reference.update_interval_steps is not None and not self.needs_reference:
            raise BrokenRule(
                "reference.update_interval_steps",
                f"reference.update_interval_steps={self.reference.update_interval_steps} updates a model that "
                "loss.kl_coefficient=0 never uses",
                "remove it, or raise loss.kl_coefficient",
            )
        return self

    @model_validator(mode="after")
    def check_learning_rates(self) -> Self:
        """Refuses rates above 1 except for SGD: AdamW and Muon change parameters by about the rate in every update."""
        adamw_lr = self.optim.adamw_lr if isinstance(self.optim, MuonSettings) else None
        rates = {"optim.lr": self.optim.lr, "optim.adamw_lr": adamw_lr, "critic.lr": self.critic.lr}
        for field, rate in rates.items():
            if rate is not None and rate > 1 and self.optim.name != "sgd":
                raise BrokenRule(
                    field,
                    f"{field}={rate:g} is more than 1, and each update of optim.name={self.optim.name} moves every "
                    "parameter by about that",
                    "lower it to a rate such as 1e-6, or set optim.name=sgd",
                )
        return self

    @property
    def reference_is_policy(self) -> bool:
        """Returns whether the reference is the policy without its adapters, instead of a separate model."""
        reference = self.reference
        return self.lora.are_trained and reference.is_colocated and reference.path is None

    @property
    def actor_mesh(self) -> tuple[int, int]:
        """Returns (dp_replicate, dp) of the actor group; raises a ConfigError if mesh.dp is auto (see `with_ranks`)."""
        if self.mesh.dp == "auto":
            raise ConfigError(
                "mesh.dp=auto is not a number yet", field="mesh.dp", hint="use with_ranks(ranks), or set mesh.dp"
            )
        return self.mesh.dp_replicate, self.mesh.dp

    @property
    def data_ranks(self) -> int:
        dp_replicate, dp = self.actor_mesh
        return dp_replicate * dp

    @property
    def ranks(self) -> int:
        """Returns the number of processes of the actor group; raises a ConfigError if mesh.dp is auto."""
        return self.data_ranks * self.mesh.ranks_per_pack

    def with_ranks(self, ranks: int) -> Self:
        """Returns these settings for an actor group of `ranks` processes, with mesh.dp=auto replaced by a number.

        Raises:
            ConfigError: ranks is not a multiple of mesh.dp_replicate x mesh.cp x mesh.tp.
        """
        if self.mesh.dp != "auto":
            return self
        copies = self.mesh.dp_replicate * self.mesh.ranks_per_pack
        if ranks < 1 or ranks % copies:
            raise ConfigError(
                f"mesh.dp=auto: {ranks} ranks are no multiple of mesh.dp_replicate={self.mesh.dp_replicate} x "
                f"mesh.cp={self.mesh.cp}{f' x mesh.tp={self.mesh.tp}' if self.mesh.tp > 1 else ''}",
                field="mesh.dp",
                hint=f"start {max(1, round(ranks / copies)) * copies} ranks, or change mesh.cp or mesh.dp_replicate",
            )
        mesh = self.mesh.model_copy(update={"dp": ranks // copies})
        return self.model_copy(update={"mesh": mesh})

    def with_sharding(self, level: str) -> Self:
        """Returns these settings with fsdp.sharding=auto replaced by the chosen level."""
        if level == self.fsdp.sharding:
            return self
        return self.model_copy(update={"fsdp": self.fsdp.model_copy(update={"sharding": level})})

    @property
    def max_pack_tokens(self) -> int:
        return self.batch.max_tokens_per_rank * self.mesh.cp

    def mesh_of(self, role: Role) -> tuple[int, int]:
        """Returns (dp_replicate, dp) of a role; cp and tp are the same for all roles."""
        dp = {"actor": None, "ref": self.reference.dp, "critic": self.critic.dp}[role]
        return self.actor_mesh if dp is None else (1, dp)

    def ranks_of(self, role: Role) -> int:
        """Returns the number of processes of a role that has a separate group."""
        return math.prod(self.mesh_of(role)) * self.mesh.ranks_per_pack

    @property
    def model_paths(self) -> dict[str, Path]:
        """Returns setting -> path for the settings that name a model or adapters and are not null."""
        fields = ("model.path", "reference.path", "critic.path", "lora.path")
        found = {field: self.value_of(field) for field in fields}
        return {field: path for field, path in found.items() if path is not None}

    def with_loss(self, settings: Mapping[str, Any]) -> Self:
        """Returns these settings with changes to the loss, for one call of `forward_backward`.

        If `settings` names a policy loss, parameters of this loss that `settings` lacks have their defaults.

        Args:
            settings: settings of the section `loss` that change only the loss of each token, and not the step, the plan
                or the need for a reference.

        Raises:
            ConfigError: a name is not allowed, or a value is invalid.
        """
        if not isinstance(settings, Mapping):
            problem = f"settings={short_repr(settings)} are not names of loss and their values"
            raise ConfigError(problem, field="settings", hint='write them like {"policy": "cispo", "clip_high": 0.3}')
        for name in settings:
            if name not in _LOSS_OF_A_CALL:
                problem = f"settings has {short_repr(name)}, which cannot be chosen for one call"
                raise ConfigError(problem, field="settings", hint=f"choose of {', '.join(_LOSS_OF_A_CALL)}")
        policy = settings.get("policy", self.loss.policy)
        choices = [name for name in POLICY_LOSSES if name not in PAIRWISE]
        if policy not in (*choices, self.loss.policy):
            problem = f"policy={short_repr(policy)} cannot be chosen for one call"
            raise ConfigError(
                problem, field="settings", hint=f"use {', '.join(choices)}, or set loss.policy for the whole run"
            )
        tree = self.model_dump(exclude_unset=True)
        kept = tree.get("loss", {})
        if "policy" in settings:
            kept = {name: value for name, value in kept.items() if name not in _OF_POLICY}
        return self.checked({**tree, "loss": {**kept, **settings}})

    def with_model_paths(self, paths: Mapping[str, Path]) -> Self:
        """Returns these settings with other paths of models, given as in `model_paths`."""
        changed: dict[str, Any] = {}
        for field, path in paths.items():
            section = field.removesuffix(".path")
            changed[section] = getattr(self, section).model_copy(update={"path": path})
        return self.model_copy(update=changed)

    def with_adapters(self, rank: int, alpha: float, targets: Sequence[str]) -> Self:
        """Returns these settings with the rank, alpha and targets of the folder at lora.path.

        Args:
            targets: names of the folder's modules. If lora.targets is set, it stays; building the model checks that it
                selects the same modules.

        Raises:
            ConfigError: lora.rank or lora.alpha is set to another value.
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
        return self.model_copy(update={"lora": self.lora.model_copy(update=found)})

    def folder_of(self, role: Role) -> tuple[Path, str]:
        """Returns (the model folder of a role, the setting that names it)."""
        path = {"actor": None, "ref": self.reference.path, "critic": self.critic.path}[role]
        if path is None:
            return self.model.path, "model.path"
        return path, "reference.path" if role == "ref" else "critic.path"

    @property
    def warmup_updates(self) -> int:
        """Returns the number of warm-up updates; for a share of `total_updates`, 0 until `total_updates` is known."""
        warmup = self.optim.warmup_updates
        if isinstance(warmup, int):
            return warmup
        total = self.total_updates or 0
        updates = math.ceil(round(warmup * total, 6))  # rounded, because 0.07 x 100 is above 7 in floats
        return min(updates, max(total - 1, 0))  # a run of a single update has no warm-up


_OF_POLICY = (
    "clip_low", "clip_high", "dual_clip", "beta",
)  # fmt: skip
_LOSS_OF_A_CALL = ("policy", *_OF_POLICY, "reduction", "constant_length", "entropy_coefficient")


def changed(section: BaseModel, names: Iterable[str]) -> list[str]:
    """Returns the names of the settings in `names` that differ from their defaults."""
    fields = type(section).model_fields
    return [name for name in names if getattr(section, name) != fields[name].get_default(call_default_factory=True)]
