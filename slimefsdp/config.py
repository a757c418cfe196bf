"""The settings tree, and every rule about settings.

Read once, checked once, frozen: past `load_config` nobody asks whether a setting makes sense. Importing this file costs
pydantic and PyYAML, never torch, so that a bad setting is answered at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from slimefsdp.config_messages import config_error, short_text
from slimefsdp.errors import ConfigError
from slimefsdp.yaml_file import apply_override, read_yaml_mapping


def _broken_rule(rule: str, hint: str) -> PydanticCustomError:
    """The error of a rule about one value; the setting and the value are named in front of it."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "hint": hint})


def _path_from_text(value: Any) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise _broken_rule("must be a path", "write the path of a file or folder")
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise _broken_rule("begins with the home of an unknown user", "write the path out") from None


def _two_fractions(value: Any) -> tuple[float, float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(item) in (int, float) and 0 <= item < 1 for item in value):
        raise _broken_rule("must be two numbers in [0, 1)", "write them like [0.9, 0.95]")
    return (float(value[0]), float(value[1]))


def _function_name(value: str) -> str:
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", value):
        raise _broken_rule("must be module:function", "write it like actors.rollout.rewards:exact_match")
    return value


PathSetting = Annotated[Path, BeforeValidator(_path_from_text)]
PositiveInt = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """Base of all sections: unknown keys refused, values frozen, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())


class RunSettings(Settings):
    """What one run is and where it leaves its files."""

    dir: PathSetting | None = Field(None, description="folder for metrics, curves, checkpoints; needed by `train`")
    steps: PositiveInt | None = Field(None, description="steps of the loop: rollout batches, or updates under sft")
    seed: int = Field(0, ge=0, lt=2**31, description="seeds sampling, shuffling and every rank's generator")
    export_dir: PathSetting | None = Field(None, description="write a Hugging Face folder here after the last step")
    wandb_project: str | None = Field(None, min_length=1, description="also log to this Weights & Biases project")


class ModelSettings(Settings):
    """The policy."""

    path: PathSetting = Field(description="local Hugging Face folder with safetensors weights")
    activation_checkpointing: bool = Field(False, description="recompute each decoder layer in backward")


class ReferenceSettings(Settings):
    """The frozen model that KL is measured against; used only when `loss.kl_coefficient` > 0, or on request."""

    path: PathSetting | None = Field(None, description="its folder; default: model.path")
    placement: Literal["colocated", "group"] = Field(
        "colocated", description="in the actor's processes, or a worker group of its own"
    )
    dp: PositiveInt | None = Field(None, description="ranks of its own group (placement: group); default: mesh.dp")


class MeshSettings(Settings):
    """The device mesh; its size is the number of ranks."""

    dp: PositiveInt = Field(1, description="data-parallel ranks")
    cp: PositiveInt = Field(1, description="context-parallel ranks that share each pack")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")

    @model_validator(mode="after")
    def context_parallel_attention_is_not_there_yet(self) -> MeshSettings:
        if self.cp > 1:
            raise ValueError(f"mesh.cp={self.cp} needs ring attention, which this version lacks; set mesh.cp=1")
        return self


class PrecisionSettings(Settings):
    """Number formats. Masters are fp32 whatever the checkpoint's dtype (fp64 when computing in fp64)."""

    compute_dtype: Literal["bfloat16", "float32", "float64"] = Field(
        "bfloat16", description="parameters and activations in forward and backward"
    )


class BatchSettings(Settings):
    """The two knobs of batch size."""

    samples_per_update: PositiveInt | None = Field(None, description="samples per optimiser update; null: all at once")
    max_tokens_per_rank: int = Field(8192, ge=2, description="hard cap on the tokens of one micro-batch on one rank")


class LossSettings(Settings):
    """The training loss: which terms, and how tokens are weighted."""

    reduction: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="1/N tokens; mean over samples of their token mean; sum over constant_length"
    )
    constant_length: PositiveInt | None = Field(None, description="the divisor of reduction=constant (Dr.GRPO)")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.2, gt=0, description="and above at 1 + clip_high")
    kl_coefficient: float = Field(0.0, ge=0, description="weight of KL(policy || reference) in the loss")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="per-token estimator of that KL")
    entropy_coefficient: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    old_log_probs: Literal["auto", "recompute", "rollout"] = Field(
        "auto", description="auto: the current ones where the phase has one update, else recompute"
    )
    normalize_by_std: bool = Field(True, description="divide group advantages by the group's standard deviation")
    drop_zero_advantages: bool = Field(
        True, description="leave out samples whose advantage is zero, unless a KL or entropy term trains them"
    )
    epochs: PositiveInt = Field(1, description="passes over one rollout batch")

    @model_validator(mode="after")
    def constant_length_belongs_to_reduction_constant(self) -> LossSettings:
        if self.reduction == "constant" and self.constant_length is None:
            raise ValueError("loss.reduction=constant divides by loss.constant_length, which is not set; set it")
        if self.reduction != "constant" and self.constant_length is not None:
            raise ValueError(
                f"loss.constant_length={self.constant_length} does nothing with loss.reduction={self.reduction}; "
                "remove it, or set loss.reduction=constant"
            )
        return self


class OptimSettings(Settings):
    """Optimiser and schedule; counted in optimiser updates, not rollouts."""

    name: Literal["adamw", "sgd"] = Field("adamw", description="AdamW, or plain SGD with momentum betas[0]")
    lr: float = Field(1e-6, gt=0, description="peak learning rate")
    betas: Annotated[tuple[float, float], BeforeValidator(_two_fractions)] = Field(
        (0.9, 0.95), description="momentum, second moment; each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="decoupled decay; none on norms, biases and embeddings")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_updates: int = Field(0, ge=0, description="linear from 0 to lr")
    total_updates: PositiveInt = Field(description="where the schedule ends")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at lr x this")
    max_grad_norm: float = Field(1.0, gt=0, description="global-norm clipping")
    max_skipped_updates: PositiveInt = Field(3, description="stop after this many non-finite gradient norms in a row")

    @model_validator(mode="after")
    def warmup_ends_before_training_does(self) -> OptimSettings:
        if self.warmup_updates >= self.total_updates:
            raise ValueError(
                f"optim.warmup_updates={self.warmup_updates} leaves no update at the full rate out of "
                f"optim.total_updates={self.total_updates}; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def a_constant_schedule_has_no_floor(self) -> OptimSettings:
        if self.schedule == "constant" and "min_lr_ratio" in self.model_fields_set:
            raise ValueError(
                f"optim.min_lr_ratio={self.min_lr_ratio} does nothing with optim.schedule=constant; "
                "remove it or choose linear or cosine"
            )
        return self


class DataSettings(Settings):
    """JSONL files."""

    train: PathSetting | None = Field(None, description="records with `prompt` (and `answer` under sft)")
    heldout: PathSetting | None = Field(None, description="records for evaluation, never trained on")


class RolloutSettings(Settings):
    """Sampling. The temperature is the engine's and the trainer's at once."""

    temperature: float = Field(1.0, gt=0, description="sampling temperature; log-probs are taken at it too")
    prompts_per_step: PositiveInt = Field(32, description="prompts drawn per rollout step")
    samples_per_prompt: PositiveInt = Field(8, description="responses per prompt; they form a group")
    max_new_tokens: PositiveInt = Field(256, description="longest response")
    engines: PositiveInt = Field(1, description="embedded engine processes")
    reward: Annotated[str, AfterValidator(_function_name)] | None = Field(
        None, description="reward function as `module:function`"
    )


class EvaluationSettings(Settings):
    """Held-out evaluation by sampling at the rollout temperature."""

    interval_steps: PositiveInt | None = Field(None, description="every so many steps; also before and after the run")
    samples_per_prompt: PositiveInt = Field(1, description="responses per held-out prompt")


class CheckpointSettings(Settings):
    """Checkpoints under `run.dir`/checkpoints."""

    interval_steps: PositiveInt | None = Field(None, description="every so many steps; null: none are written")
    keep_last: PositiveInt = Field(2, description="older ones are removed")
    resume: bool = Field(False, description="continue from the newest verified one")


class ClusterSettings(Settings):
    """Ray, and how long to wait for it."""

    address: str | None = Field(None, min_length=1, description="a running cluster; null: a local one, loopback only")
    max_ranks_per_core: PositiveInt = Field(4, description="cap on worker processes per core of a CPU machine")
    launch_timeout_s: float = Field(300.0, gt=0, description="all ranks ready")
    call_timeout_s: float = Field(3600.0, gt=0, description="one call on all ranks")
    sync_timeout_s: float = Field(120.0, gt=0, description="one transfer of weights to the engines")


class RunConfig(Settings):
    """Everything one run is made of."""

    algorithm: Literal["grpo", "sft"] = Field("grpo", description="grpo: reinforcement learning; sft: supervised")
    run: RunSettings = RunSettings()
    model: ModelSettings
    reference: ReferenceSettings = ReferenceSettings()
    mesh: MeshSettings = MeshSettings()
    precision: PrecisionSettings = PrecisionSettings()
    batch: BatchSettings = BatchSettings()
    loss: LossSettings = LossSettings()
    optim: OptimSettings
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def sft_takes_no_rollout_settings(self) -> RunConfig:
        if self.algorithm != "sft":
            return self
        given = [
            f"{section}.{name}"
            for section in ("rollout", "evaluation", "reference", "loss", "data")
            for name in sorted(getattr(self, section).model_fields_set)
        ]
        kept = {"loss.reduction", "loss.constant_length", "loss.entropy_coefficient", "data.train"}
        unread = [f"{field}={short_text(self._value(field))}" for field in given if field not in kept]
        if unread:
            verb, what = ("is", "it") if len(unread) == 1 else ("are", "them")
            raise ValueError(
                f"{', '.join(unread)} {verb} not read under algorithm=sft; remove {what}, or set algorithm=grpo"
            )
        return self

    @model_validator(mode="after")
    def reference_group_size_belongs_to_a_group(self) -> RunConfig:
        if self.reference.dp is not None and self.reference.placement != "group":
            raise ValueError(
                f"reference.dp={self.reference.dp} is for a group of its own; set reference.placement=group, "
                "or remove it"
            )
        return self

    @model_validator(mode="after")
    def cuda_kernels_take_half_precision(self) -> RunConfig:
        if self.mesh.device == "cuda" and self.precision.compute_dtype != "bfloat16":
            raise ValueError(
                f"precision.compute_dtype={self.precision.compute_dtype} has no variable-length kernel on CUDA; "
                "use bfloat16 there, or mesh.device=cpu"
            )
        return self

    @model_validator(mode="after")
    def the_schedule_covers_the_run(self) -> RunConfig:
        needed = None if self.run.steps is None else self.run.steps * self.updates_per_step
        if needed is not None and self.optim.total_updates < needed:
            raise ValueError(
                f"optim.total_updates={self.optim.total_updates} ends before the run's {needed} updates "
                f"(run.steps={self.run.steps} x {self.updates_per_step} updates each); set optim.total_updates={needed}"
            )
        return self

    @property
    def samples_per_step(self) -> int:
        """Samples in one step of the loop: prompts x responses, or one update's under sft."""
        if self.algorithm == "sft":
            return self.batch.samples_per_update or 1
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def updates_per_step(self) -> int:
        """Optimiser updates that one full rollout batch leads to."""
        per_update = self.batch.samples_per_update or self.samples_per_step
        return self.loss.epochs * math.ceil(self.samples_per_step / per_update)

    @property
    def ranks(self) -> int:
        """Processes of the actor group."""
        return self.mesh.dp * self.mesh.cp

    @property
    def loss_name(self) -> Literal["policy", "sft"]:
        """The loss that `train_step` takes under this algorithm."""
        return "sft" if self.algorithm == "sft" else "policy"

    @property
    def max_pack_tokens(self) -> int:
        """Hard cap on the tokens of one pack, which the cp ranks share."""
        return self.batch.max_tokens_per_rank * self.mesh.cp

    @property
    def needs_reference(self) -> bool:
        """Whether training reads reference log-probs."""
        return self.loss.kl_coefficient > 0

    def check_ready_to_train(self) -> None:
        """What `slimefsdp train` needs beyond what a custom loop does.

        Raises:
            ConfigError: naming the first setting that is missing.
        """
        needed = [
            "run.dir",
            "run.steps",
            "data.train",
            *(["batch.samples_per_update"] if self.algorithm == "sft" else []),
        ]
        needed += ["rollout.reward"] if self.algorithm == "grpo" else []
        needed += ["data.heldout"] if self.evaluation.interval_steps is not None else []
        for field in needed:
            if self._value(field) is None:
                raise ConfigError(
                    f"{field} is not set, and `train` needs it", field=field, hint=f"add {field} to the YAML"
                )
        if self.algorithm == "grpo" and self.rollout.max_new_tokens >= self.max_pack_tokens:
            raise ConfigError(
                f"rollout.max_new_tokens={self.rollout.max_new_tokens} leaves no room for a prompt in packs of "
                f"{self.max_pack_tokens} tokens",
                field="rollout.max_new_tokens",
                hint="raise batch.max_tokens_per_rank, or lower it",
            )
        if self.algorithm == "grpo" and self.rollout.samples_per_prompt < 2:
            raise ConfigError(
                f"rollout.samples_per_prompt={self.rollout.samples_per_prompt} makes groups of one: no advantage",
                field="rollout.samples_per_prompt",
                hint="sample at least 2 responses per prompt",
            )

    def _value(self, field: str) -> Any:
        section, name = field.split(".")
        return getattr(getattr(self, section), name)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked settings of one YAML file with dotted overrides (`optim.lr=1e-6`) on top.

    Raises:
        ConfigError: naming the setting, its value, the rule and the way out.
    """
    tree = read_yaml_mapping(Path(path))
    for override in overrides:
        apply_override(tree, override)
    return config_from_dict(tree)


def config_from_dict(tree: dict[str, Any]) -> RunConfig:
    """The checked settings of a nested dict (what a YAML file holds).

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(error.errors(include_url=False), _known_settings()) from None


def _known_settings() -> dict[str, dict[str, bool]]:
    """Section ("" for the top level) -> its names -> whether one must be given."""
    models: dict[str, type[BaseModel]] = {"": RunConfig}
    for name, info in RunConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            models[name] = info.annotation
    return {
        section: {name: info.is_required() for name, info in model.model_fields.items()}
        for section, model in models.items()
    }
