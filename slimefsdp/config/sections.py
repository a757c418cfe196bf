"""Sections of the settings tree (others: algorithm.py, rollout.py), their base and shared types; tree.py joins them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from slimefsdp.config.loader import IN_A_FILE
from slimefsdp.config.messages import BrokenRule
from slimefsdp.errors import ConfigError, short_text
from slimefsdp.io.hub import reads_like_id
from slimefsdp.io.user_files import NoPath, path_of, possible


def broken_rule(rule: str, hint: str) -> PydanticCustomError:
    """The error of a rule about one value; the setting and the value are named in front of it."""
    return PydanticCustomError("rule", "{rule}", {"rule": rule, "hint": hint})


MOST = 10**12
"""The largest whole number of any setting: products of a few of them are still exact in 64 bits, or nearly so."""
LARGEST = 1e30  # float32 holds it
LONGEST_S = 1e9  # thirty years; system calls take no wait that is much longer
MOST_RANKS = 100_000


def _within_range(value: Any) -> Any:
    if type(value) is int and abs(value) > MOST:
        rule, hint = (f"must be at most {MOST:,}", "lower it") if value > 0 else ("must not be so low", "raise it")
        raise broken_rule(rule, hint)
    return value


def _path_from_text(value: Any) -> Path:
    try:
        return possible(value) if isinstance(value, Path) else path_of(value)
    except NoPath as error:
        raise broken_rule(error.rule, error.hint) from None


def path_or_id(value: Any) -> Path:
    """A path, or what is written as an id of the Hugging Face hub.

    What is written otherwise (`./owner/name`), but would read like one as a path, becomes absolute.
    """
    path = _path_from_text(value)
    is_written_so = isinstance(value, str) and reads_like_id(_without_selection(value))
    return path if is_written_so or not reads_like_id(_without_selection(str(path))) else path.absolute()


def _without_selection(text: str) -> str:
    """Removes the configuration and the split from the name of a data set (owner/name:config#split)."""
    return re.split("[:#]", text, maxsplit=1)[0]


def _two_fractions(value: Any) -> tuple[float, float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(item) in (int, float) and 0 <= item < 1 for item in value):
        raise broken_rule("must be two numbers in [0, 1)", "write them like [0.9, 0.95]")
    return (float(value[0]), float(value[1]))


_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def function_name(value: str) -> str:
    """The value, if it has the form `module:function` or `file.py:function`, whose path becomes absolute.

    Raises the error of `broken_rule` otherwise.
    """
    return _named(value, "must be module:function or file.py:function", "actors.rollout.rewards:exact_match")


def class_name(value: str) -> str:
    """Checks the name of a class of the user as `function_name` checks that of a function."""
    return _named(value, "must be module:Class or file.py:Class", "examples/environments/tools.py:ToolUse")


def _named(value: str, rule: str, example: str) -> str:
    if found := IN_A_FILE.fullmatch(value):
        return f"{_path_from_text(found['file']).absolute()}:{found['name']}"
    if not _NAMED.fullmatch(value):
        raise broken_rule(rule, f"write it like {example}")
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise broken_rule("must be a power of two", "choose one such as 65536")
    return value


def _class_names(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item.isidentifier() for item in value):
        raise broken_rule("must be a list of module class names", "write it like [Qwen3DecoderLayer, Qwen3MLP]")
    return tuple(value)


def _name_patterns(value: Any) -> tuple[str, ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item.strip() for item in value):
        raise broken_rule("must be a list of name patterns", "write it like ['model.embed_tokens.*', '*.mlp.*']")
    return tuple(value)


_TARGET_WORDS = ("attention", "mlp", "experts", "head", "lm_head", "all-linear")
_BARE_NAME = re.compile(r"[A-Za-z_]\w*")


def _target_patterns(value: Any) -> tuple[str, ...]:
    """The targets as words and patterns; a module's own name, such as `q_proj`, is that of any layer, as for peft."""
    value = [value] if value == "all-linear" else value  # peft writes this word without a list
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item.strip() for item in value):
        raise broken_rule("must be a list of words or name patterns", "write it like [attention, down_proj]")
    is_bare = [item not in _TARGET_WORDS and _BARE_NAME.fullmatch(item) is not None for item in value]
    return tuple(f"*.{item}" if bare else item for item, bare in zip(value, is_bare, strict=True))


def _update_numbers(value: Any) -> tuple[int, ...]:
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(type(item) is int and 1 <= item <= MOST for item in value):
        raise broken_rule("must be a list of update numbers from 1 on", "write it like [3, 100]")
    return tuple(value)


def _count_or_auto(value: Any) -> Any:
    """One answer for what would otherwise be refused twice, as a number and as a word."""
    if value != "auto" and type(value) is not int:
        raise broken_rule("must be a whole number, or auto", "write digits only, without quotes, or auto")
    if value != "auto" and value < 1:
        raise broken_rule("must be at least 1", "raise it")
    return value if value == "auto" else _within_ranks(value)


def _whole_number_or_auto(value: Any) -> Any:
    if value != "auto" and (type(value) is not int or value < 0):
        raise broken_rule("must be a whole number, 0 or more, or auto", "write digits only, without quotes, or auto")
    return value


def _within_ranks(value: Any) -> Any:
    if type(value) is int and value > MOST_RANKS:
        raise broken_rule(f"must be at most {MOST_RANKS:,}", "lower it")
    return value


def _switch_or_name(value: Any) -> Any:
    """YAML has written this setting as true or false."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def path_text(path: Path) -> str:
    """The path as a YAML file would name it, to be read back as it is."""
    return str(path).replace("$", "$$")


PathSetting = Annotated[
    Path, BeforeValidator(_path_from_text), PlainSerializer(path_text, return_type=str, when_used="json")
]
PathOrIdSetting = Annotated[PathSetting, BeforeValidator(path_or_id)]
PositiveInt = Annotated[int, Field(ge=1)]
RankCount = Annotated[PositiveInt, BeforeValidator(_within_ranks)]


def _has_own_null(field: FieldInfo) -> bool:
    return field.default is not None and type(None) in get_args(field.annotation)


class Settings(BaseModel):
    """Base of all sections: unknown keys refused, values frozen, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._frozen(name)

    def __delattr__(self, name: str) -> None:
        raise self._frozen(name)

    def _frozen(self, name: str) -> ConfigError:
        section = type(self).__name__.removesuffix("Settings").lower()
        field = f"{section}.{name}" if type(self).__name__.endswith("Settings") else name
        return ConfigError(
            f"{field} cannot be changed: settings are read once, and what was launched with them would not know",
            field=field,
            hint=f"read them anew with an override: load_config(path, ['{field}=...'])",
        )

    @model_validator(mode="before")
    @classmethod
    def null_is_not_given(cls, value: Any) -> Any:
        """Null withdraws a setting: it is as if nobody had given it, so that it has its default and no rule sees it.

        A setting whose null means something else than its default keeps it (critic.clip).
        """
        if not isinstance(value, Mapping):
            return value
        withdrawn = {name for name, info in cls.model_fields.items() if not _has_own_null(info)}
        return {name: one for name, one in value.items() if one is not None or name not in withdrawn}

    @field_validator("*", mode="before")
    @classmethod
    def check_integer_range(cls, value: Any) -> Any:
        return _within_range(value)


class RunSettings(Settings):
    """What one run is and where it leaves its files."""

    dir: PathSetting | None = Field(None, description="folder for metrics, curves, checkpoints; needed by `train`")
    steps: PositiveInt | None = Field(
        None,
        description="steps of the loop: rollout batches, or updates under sft and dpo; needed by `train`, or else "
        "run.epochs",
    )
    epochs: PositiveInt | None = Field(
        None,
        description="under sft and dpo: how often each record is trained on; the steps follow from it, the last update "
        "takes the records that are left, and run.steps beside it ends the run earlier",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seeds sampling, shuffling and every rank's generator")
    deterministic: bool = Field(
        False,
        description="ranks use deterministic kernels alone, an operation without one being an error, and seed every "
        "generator by run.seed, update and data rank before a train_step; slower on CUDA",
    )
    export_dir: PathSetting | None = Field(
        None,
        description="write a Hugging Face folder here after the last step; adapters also as a PEFT folder, adapter/ "
        "inside it",
    )
    export_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto", description="of the tensors in run.export_dir; auto: that of the master weights"
    )
    wandb_project: str | None = Field(
        None,
        min_length=1,
        description="also log to this Weights & Biases project, with all settings; a resumed run goes on in its wandb "
        "run, whose id is in run.dir/wandb_id",
    )
    wandb_name: str | None = Field(
        None, min_length=1, description="what the run is called there; null: as run.dir's last folder"
    )
    wandb_group: str | None = Field(
        None, min_length=1, description="runs of one group are shown together there, such as the seeds of an experiment"
    )

    @model_validator(mode="after")
    def wandb_names_require_a_project(self) -> RunSettings:
        for name in ("wandb_name", "wandb_group"):
            value = getattr(self, name)
            if value is not None and self.wandb_project is None:
                raise BrokenRule(
                    f"run.{name}",
                    f"run.{name}={short_text(value)} does nothing without run.wandb_project",
                    "set that, or remove it",
                )
        return self

    @model_validator(mode="after")
    def check_export_dtype(self) -> RunSettings:
        if self.export_dtype != "auto" and self.export_dir is None:
            raise BrokenRule(
                "run.export_dtype",
                f"run.export_dtype={self.export_dtype} does nothing without run.export_dir",
                "set that, or remove it",
            )
        return self


class ModelSettings(Settings):
    """The policy."""

    path: PathOrIdSetting = Field(
        description="Hugging Face folder with safetensors weights; or, where there is none, the id of one on the hub, "
        "`owner/name` or `owner/name@revision` (docs/models.md)"
    )
    init: Literal["folder", "random"] = Field(
        "folder",
        description="random: draw the weights from run.seed by transformers' own rules, the same on every mesh; "
        "model.path then needs config.json and the tokenizer alone",
    )
    read: Literal["every_rank", "first_rank"] = Field(
        "every_rank",
        description="who reads model.path, reference.path and lora.path; first_rank: rank 0 reads the folder and sends "
        "each rank its rows; the other ranks need no copy of it",
    )
    frozen: Annotated[tuple[str, ...], BeforeValidator(_name_patterns)] | None = Field(
        None,
        description="patterns like `*.mlp.*` of parameter names, as `group.describe()` lists them: these parameters "
        "keep their values, and take no gradient and no optimiser state; null: all are trained",
    )
    activation_checkpointing: Annotated[Literal["none", "full", "selective"], BeforeValidator(_switch_or_name)] = Field(
        "none",
        description="recompute decoder layers in backward; selective: all but matrix products and attention outputs; "
        "true is full, false none",
    )
    checkpoint_every_n_layers: PositiveInt = Field(1, description="recompute the first of every so many layers")
    offload_activations: bool = Field(
        False,
        description="under full recomputation: the input of a recomputed layer waits in the host's memory from forward "
        "to backward, and takes none of the device; computing waits for the copies there and back; on a CPU that is "
        "the same memory (docs/long_context.md)",
    )
    compile: bool = Field(False, description="torch.compile each decoder layer (dynamic shapes), but not its attention")

    @model_validator(mode="after")
    def check_checkpoint_every_n_layers(self) -> ModelSettings:
        if self.activation_checkpointing == "none" and self.checkpoint_every_n_layers != 1:
            raise BrokenRule(
                "model.checkpoint_every_n_layers",
                f"model.checkpoint_every_n_layers={self.checkpoint_every_n_layers} does nothing with "
                "model.activation_checkpointing=none",
                "remove it, or choose full or selective",
            )
        return self

    @model_validator(mode="after")
    def offload_activations_requires_full_recomputation(self) -> ModelSettings:
        if self.offload_activations and self.activation_checkpointing != "full":
            raise BrokenRule(
                "model.offload_activations",
                "model.offload_activations=true moves the inputs of recomputed layers, and "
                f"model.activation_checkpointing={self.activation_checkpointing} keeps more than these",
                "set that to full, or remove model.offload_activations",
            )
        return self

    @model_validator(mode="after")
    def check_compile_with_checkpointing(self) -> ModelSettings:
        if self.compile and self.activation_checkpointing == "selective":
            raise BrokenRule(
                "model.activation_checkpointing",
                "model.activation_checkpointing=selective cannot see inside the layers of model.compile=true",
                "use full or none, or remove model.compile",
            )
        return self


class LoraSettings(Settings):
    """Adapters of low rank, trained in place of the parameters of the policy and of a critic (docs/lora.md)."""

    rank: PositiveInt | None = Field(
        None, description="columns of an adapter's B, rows of its A; null: no adapters, the parameters are trained"
    )
    alpha: float = Field(32.0, gt=0, le=LARGEST, description="a module computes W x + (alpha / rank) B A x")
    targets: Annotated[tuple[str, ...], BeforeValidator(_target_patterns)] = Field(
        ("attention", "mlp"),
        description="which `nn.Linear` modules of the decoder layers have one: `attention`, `mlp`, `all-linear`, "
        "names like `q_proj`, or patterns like `*.layers.0.*.q_proj`; `experts`: the stacks of experts, "
        "`*.experts.down_proj` some of them; `head` or `lm_head`: the LM head, where no embedding is tied to it",
    )
    sync: Literal["merged", "adapters"] = Field(
        "merged",
        description="what a weight update sends to engines: the weights with adapters added, or after a first one "
        "adapters alone, to engines which then compute W x and B A x apart as the trainer does",
    )
    resident_adapters: int = Field(
        0,
        ge=0,
        description="of several adapters beside one base, so many that wait for their turn may stay on the device; the "
        "others are on the host",
    )
    path: PathOrIdSetting | None = Field(
        None,
        description="begin with the adapters of this folder, or id, in peft's format; rank, alpha and targets are "
        "those of the folder",
    )

    @property
    def are_trained(self) -> bool:
        """Whether there are adapters; their rank is that of a folder until `RunConfig.with_adapters` has set it."""
        return self.rank is not None or self.path is not None

    @model_validator(mode="after")
    def check_lora_rank(self) -> LoraSettings:
        for name in ("alpha", "targets", "sync", "resident_adapters"):
            value = getattr(self, name)
            if not self.are_trained and value != type(self).model_fields[name].default:
                shown = short_text(list(value) if name == "targets" else value)
                raise BrokenRule(
                    f"lora.{name}",
                    f"lora.{name}={shown} does nothing without lora.rank",
                    "set that, or remove it",
                )
        return self


class ReferenceSettings(Settings):
    """The frozen model that KL is measured against; used only when `loss.kl_coefficient` > 0, or on request."""

    path: PathOrIdSetting | None = Field(None, description="its folder, or id; default: model.path")
    placement: Literal["colocated", "group"] = Field(
        "colocated", description="in the actor's processes, or a worker group of its own"
    )
    dp: RankCount | None = Field(
        None, description="data ranks of its own group (placement: group); default: the actor's mesh"
    )
    offload: Literal["sleep", "swap", "fsdp", "none"] = Field(
        "sleep",
        description="where it is between uses (placement: colocated); sleep: its shards go to the host and come back "
        "whole; swap: the same, and while it computes the policy and its optimiser state wait on the host; fsdp: its "
        "shards stay on the host, and units are gathered from there; none: on the device",
    )
    update_interval_steps: PositiveInt | None = Field(
        None, description="it takes the policy's weights after every so many steps; null: it keeps its own"
    )


class MeshSettings(Settings):
    """The device mesh (dp_replicate, dp, cp); its size is the number of ranks, cp ranks are adjacent."""

    dp_replicate: RankCount = Field(
        1, description="copies of the sharded model; gradients are summed over them, parameters sharded inside each"
    )
    dp: Annotated[PositiveInt | Literal["auto"], BeforeValidator(_count_or_auto)] = Field(
        1, description="data-parallel ranks of a copy; auto: as many as the ranks started, or the cluster, leave for it"
    )
    cp: RankCount = Field(1, description="context-parallel ranks that share each pack")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where this machine, or the cluster that is joined, has GPUs"
    )


class AttentionSettings(Settings):
    """How attention is computed, and how the cp ranks share it."""

    strategy: Literal["auto", "ring", "ulysses", "all_gather", "ring_flash_attn"] = Field(
        "auto",
        description="how cp ranks exchange keys and values; auto: chosen by model and mesh, as `train` prints",
    )
    kernel: Literal["torch", "flash_attn", "flash_attn_3"] = Field(
        "torch",
        description="torch's own kernels, the flash-attn package, or FlashAttention 3 in the place of torch's flash "
        "kernels, on Hopper GPUs where torch has a switch for it (2.13) and the package flash_attn_interface is. The "
        "packages take heads of a multiple of 8 features, at most 256. FlashAttention 3 takes no soft-cap, and under "
        "run.deterministic at most 192 features. What they would not compute is refused",
    )


class PrecisionSettings(Settings):
    """Number formats. Masters are fp32 whatever the checkpoint's dtype (fp64 when computing in fp64)."""

    compute_dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        "bfloat16", description="parameters and activations in forward and backward"
    )
    reduce_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto",
        description="in which gradients are summed over ranks; auto: that of the masters; float16 needs "
        "precision.compute_dtype=float16, whose loss scale follows what overflows",
    )
    buffer_dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        "auto", description="of rotary frequencies and the like; auto: as transformers makes them"
    )
    tf32: bool = Field(
        False, description="let CUDA multiply what is float32 in TF32, faster and with 10 bits of fraction"
    )
    loss_scale_init: Annotated[int, Field(ge=1), AfterValidator(_power_of_two)] = Field(
        2**16, description="float16: the loss is multiplied by this at first; a power of two, halved at each overflow"
    )
    loss_scale_growth_interval: PositiveInt = Field(
        2000, description="float16: updates in a row without overflow after which the loss scale doubles"
    )

    @model_validator(mode="after")
    def check_reduce_dtype(self) -> PrecisionSettings:
        if self.reduce_dtype == "float16" and self.compute_dtype != "float16":
            raise BrokenRule(
                "precision.reduce_dtype",
                "precision.reduce_dtype=float16 overflows without a loss scale, and "
                f"precision.compute_dtype={self.compute_dtype} has none",
                "set precision.compute_dtype=float16, or reduce in bfloat16",
            )
        return self

    @model_validator(mode="after")
    def check_loss_scale(self) -> PrecisionSettings:
        for name in ("loss_scale_init", "loss_scale_growth_interval"):
            value = getattr(self, name)
            if self.compute_dtype != "float16" and value != type(self).model_fields[name].default:
                raise BrokenRule(
                    f"precision.{name}",
                    f"precision.{name}={value} does nothing with precision.compute_dtype={self.compute_dtype}, "
                    "whose range needs no loss scale",
                    "remove it, or set precision.compute_dtype=float16",
                )
        return self


class FsdpSettings(Settings):
    """How parameters, gradients and optimiser state are spread over ranks and host memory."""

    sharding: Literal["full", "keep_parameters", "optimizer", "replicate", "auto"] = Field(
        "full",
        description="full (as ZeRO-3): parameters are gathered for each use; keep_parameters (as ZeRO-2, FSDP2's "
        "reshard_after_forward=False): they stay whole from forward to backward; optimizer (as ZeRO-1): they stay "
        "whole, and gradients too, over all micro-batches of an update, which are summed over ranks once; replicate "
        "(as DDP): every rank holds everything; auto: of the first three the one that sends least and, by the estimate "
        "of `slimefsdp plan`, fits the memory that is free; a resumed run of the same mesh keeps it",
    )
    wrap_layers: Annotated[tuple[str, ...], BeforeValidator(_class_names)] | None = Field(
        None, description="classes of modules that are units; null: decoder layers and an untied embedding"
    )
    wrap_min_parameters: PositiveInt | None = Field(
        None, description="instead: modules with so many parameters that are in no smaller unit"
    )
    prefetch_layers: Annotated[int | Literal["auto"], BeforeValidator(_whole_number_or_auto)] = Field(
        "auto",
        description="units gathered ahead of their use, in forward and backward; 0: each is gathered when it is "
        "needed; auto: FSDP2's own order, which gathers one unit ahead in backward",
    )
    cpu_offload: bool = Field(False, description="parameters, gradients and optimiser live on the host between uses")
    offload_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="threads of a rank under cpu_offload, whose updates the host computes; null: on CUDA a machine's "
        "cores over the ranks on it, on a CPU as many as ranks without cpu_offload have, which is one under Ray",
    )
    pin_memory: bool = Field(
        True,
        description="page-locked host memory for sleep, cpu_offload, checkpoint.async_save and "
        "model.offload_activations, where there is CUDA; without it the host waits for each layer's copy of the last",
    )

    @model_validator(mode="after")
    def check_offload_threads(self) -> FsdpSettings:
        if self.offload_threads is not None and not self.cpu_offload:
            raise BrokenRule(
                "fsdp.offload_threads",
                f"fsdp.offload_threads={self.offload_threads} does nothing without fsdp.cpu_offload",
                "set that, or remove it",
            )
        return self

    @model_validator(mode="after")
    def check_fsdp_wrapping(self) -> FsdpSettings:
        if self.wrap_layers is not None and self.wrap_min_parameters is not None:
            raise BrokenRule(
                "fsdp.wrap_min_parameters",
                f"fsdp.wrap_min_parameters={self.wrap_min_parameters} chooses units, and so does "
                f"fsdp.wrap_layers={list(self.wrap_layers)}",
                "remove one",
            )
        return self


class BatchSettings(Settings):
    """The two knobs of batch size, and what is computed once for several samples."""

    samples_per_update: PositiveInt | None = Field(
        None,
        description="samples per optimiser update; the last one of a step takes what is left over; null: all at once",
    )
    max_tokens_per_rank: int = Field(8192, ge=2, description="hard cap on the tokens of one micro-batch on one rank")
    cost_model: PathSetting | None = Field(
        None,
        description="file of `slimefsdp plan --calibrate`, the same on every machine: packs and ranks are balanced by "
        "what it measured of attention and of sending; null: by the model's dimensions",
    )
    share_prefixes: Literal["auto", "always", "never"] = Field(
        "auto",
        description="compute what samples of a pack have in common at their beginning, such as a group's prompt, once; "
        "auto: where it saves at least 5 % of the estimated time",
    )


class OptimSettings(Settings):
    """Optimiser and schedule; counted in optimiser updates, not rollouts."""

    name: Literal["adamw", "muon", "sgd"] = Field(
        "adamw",
        description="AdamW; Muon for matrices of the layers, of experts and adapters too, with AdamW for all else;"
        " or plain SGD with momentum betas[0]",
    )
    implementation: Literal["auto", "foreach", "fused"] = Field(
        "auto",
        description="fused: one kernel for a whole AdamW update, where foreach has one for each operation; auto: "
        "fused for adamw and muon, foreach for sgd",
    )
    lr: float = Field(1e-6, gt=0, le=LARGEST, description="peak learning rate")
    betas: Annotated[tuple[float, float], BeforeValidator(_two_fractions)] = Field(
        (0.9, 0.95), description="momentum, second moment; each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, le=LARGEST, description="AdamW's epsilon")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST, description="decoupled decay; none on norms, biases and embeddings"
    )
    state_dtype: Literal["auto", "bfloat16", "8bit"] = Field(
        "auto",
        description="of AdamW's moments between updates. auto: as the masters; bfloat16: half of float32's, rounded "
        "stochastically by run.seed, the update and the element; 8bit: a quarter, codes in blocks with a scale each",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="of Muon; AdamW's, and SGD's, is betas[0]")
    nesterov: bool = Field(True, description="Muon looks ahead along its momentum")
    ns_steps: int = Field(5, ge=1, le=99, description="Newton-Schulz iterations of Muon")
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = Field(
        "match_rms_adamw",
        description="Muon's rate of a matrix. match_rms_adamw: lr x 0.2 sqrt(max(rows, columns)), for the rates that "
        "suit AdamW; original: lr x sqrt(max(1, rows / columns)), for rates such as 0.02",
    )
    adamw_lr: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="peak rate of what AdamW updates beside Muon; it follows lr's schedule, and a critic's lr in "
        "proportion; null: lr",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_updates: int = Field(0, ge=0, description="linear from 0 to lr")
    warmup_ratio: float | None = Field(
        None, ge=0, lt=1, description="instead: the warm-up as a share of total_updates, rounded up to whole updates"
    )
    total_updates: PositiveInt | None = Field(
        None, description="where the schedule ends; null: with the last update of run.steps or run.epochs"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at lr x this")
    max_grad_norm: float = Field(1.0, ge=0, description="global-norm clipping; 0: none")
    max_skipped_updates: PositiveInt = Field(3, description="stop after this many non-finite gradient norms in a row")
    log_layer_norms: bool = Field(False, description="metrics also have the gradient norm of each layer")

    @model_validator(mode="after")
    def check_warmup(self) -> OptimSettings:
        if self.warmup_ratio is not None and self.warmup_updates:
            raise BrokenRule(
                "optim.warmup_ratio",
                f"optim.warmup_ratio={self.warmup_ratio:g} and optim.warmup_updates={self.warmup_updates} both say "
                "how long the warm-up is",
                "remove one",
            )
        if self.total_updates is not None and self.warmup_updates >= self.total_updates:
            raise BrokenRule(
                "optim.warmup_updates",
                f"optim.warmup_updates={self.warmup_updates} leaves no update at the full rate out of "
                f"optim.total_updates={self.total_updates}",
                "lower the first or raise the second",
            )
        return self

    @model_validator(mode="after")
    def check_fused_optimizer(self) -> OptimSettings:
        if self.name == "sgd" and self.implementation == "fused":
            raise BrokenRule(
                "optim.implementation",
                "optim.implementation=fused has no kernel for the sharded parameters of optim.name=sgd",
                "use foreach, or adamw",
            )
        return self

    @model_validator(mode="after")
    def check_state_dtype(self) -> OptimSettings:
        if self.state_dtype != "auto" and self.name != "adamw":
            raise BrokenRule(
                "optim.state_dtype",
                f"optim.state_dtype={self.state_dtype} is for the moments of AdamW, and optim.name={self.name}",
                "remove it, or set optim.name=adamw",
            )
        return self

    @model_validator(mode="after")
    def check_muon_settings(self) -> OptimSettings:
        of_muon = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "adamw_lr")
        # not what was written out: settings that were printed whole are read again
        given = [name for name in of_muon if getattr(self, name) != type(self).model_fields[name].default]
        if self.name != "muon" and given:
            raise BrokenRule(
                f"optim.{given[0]}",
                f"optim.{given[0]}={getattr(self, given[0])} is Muon's, and optim.name={self.name}",
                "remove it, or set optim.name=muon",
            )
        return self

    @model_validator(mode="after")
    def check_schedule_floor(self) -> OptimSettings:
        if self.schedule == "constant" and "min_lr_ratio" in self.model_fields_set:
            raise BrokenRule(
                "optim.min_lr_ratio",
                f"optim.min_lr_ratio={self.min_lr_ratio} does nothing with optim.schedule=constant",
                "remove it or choose linear or cosine",
            )
        return self


class CheckpointSettings(Settings):
    """Checkpoints under `run.dir`/checkpoints."""

    interval_steps: PositiveInt | None = Field(
        None,
        description="every so many steps, and `slimefsdp train` replaces lost ranks and engines; null: none are "
        "written, and a loss ends it",
    )
    keep_last: PositiveInt = Field(2, description="older ones are removed")
    resume: bool = Field(False, description="continue from the newest verified one; an error where there is none")
    async_save: bool = Field(
        False,
        description="save() returns at once: copying to host buffers, writing, hashing and the commit go on in the "
        "background, one save at a time; the next update waits for the copy",
    )


class ServiceSettings(Settings):
    """The HTTP service of `slimefsdp serve`."""

    host: str = Field("127.0.0.1", min_length=1, description="where it listens; others than loopback need api_key_env")
    port: int = Field(8000, ge=0, le=65535, description="0: a free one, which is printed")
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="environment variable with the keys of which requests must bring one, separated by commas: each is "
        "a user with runs and checkpoints of their own, the first is the operator's; null: none is asked for",
    )
    model_name: str | None = Field(
        None, min_length=1, description="what clients call the base model, beside model.path; null: that alone"
    )
    session_timeout_s: float = Field(
        120.0, gt=0, description="a client that says nothing for so long is gone, and its runs end"
    )
    max_sessions: PositiveInt = Field(64, description="clients at once; more are told to wait")
    max_runs: PositiveInt = Field(32, description="training runs at once, of all clients")
    max_samplers: PositiveInt = Field(
        256, description="of a client, with weights that it gave no name; the oldest ones go, from the disk too"
    )
    max_waiting: PositiveInt = Field(
        4096, description="requests without an answer, of one user at most four fifths; more are told to wait"
    )
    max_waiting_bytes: int = Field(
        2**30,
        ge=1024,
        description="of what these take, of one user at most four fifths, and as many of bodies on their way; more are "
        "told to wait",
    )
    receive_timeout_s: float = Field(
        60.0, gt=0, description="for a request's head, and again for its body, from their first byte to the last"
    )
    max_body_bytes: int = Field(64 * 2**20, ge=1024, description="of a request, also when it is decompressed")
    max_result_bytes: int = Field(2**30, ge=1024, description="of answers that are kept; the oldest ones go first")
    result_kept_s: float = Field(600.0, gt=0, description="for how long an answer can be fetched again")
    stable_reinforce: Literal["importance_sampling", "ppo", "cispo"] | None = Field(
        None,
        description="the loss that stands for `stable_reinforce`, whose formula is not published; null: that is "
        "refused",
    )
    max_version_bytes: int = Field(
        2**30, ge=1024, description="of what the sampling engine holds beside the base: adapters, or whole models"
    )


class ProfileSettings(Settings):
    """Where the time of single updates goes, and what speed is measured against."""

    updates: Annotated[tuple[int, ...], BeforeValidator(_update_numbers)] | None = Field(
        None,
        description="updates of train_step to profile, 1 is the run's first: traces of all ranks and a table of "
        "compute, communication and idle shares, and of communication by phase, in run.dir/profile; null: none",
    )
    memory: bool = Field(
        False, description="with each of them every allocation, and the peak; on CUDA a snapshot of its allocator, too"
    )
    record_shapes: bool = Field(False, description="with each of them the shapes of operators' inputs, in the traces")
    with_stack: bool = Field(
        False, description="with each of them the Python frames that call operators, in the traces, which grow tenfold"
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="dense TFLOP/s of one rank's device, which `mfu` is a share of; null: by its name"
    )

    @model_validator(mode="after")
    def profile_options_require_updates(self) -> ProfileSettings:
        for name in ("memory", "record_shapes", "with_stack"):
            if getattr(self, name) and self.updates is None:
                raise BrokenRule(
                    f"profile.{name}",
                    f"profile.{name}=true does nothing without profile.updates",
                    "set that, or remove it",
                )
        return self


class ClusterSettings(Settings):
    """Ray, and how long to wait for it."""

    address: str | None = Field(None, min_length=1, description="a running cluster; null: a local one, loopback only")
    allow_without_token: bool = Field(
        False,
        description="join a cluster of other machines although RAY_AUTH_MODE is not `token`, as on KubeRay and "
        "Anyscale: whoever reaches its ports can run code in the run",
    )
    max_ranks_per_core: PositiveInt = Field(4, description="cap on worker processes per core of a CPU machine")
    launch_timeout_s: float = Field(300.0, gt=0, le=LONGEST_S, description="all ranks ready")
    call_timeout_s: float = Field(
        3600.0, gt=0, le=LONGEST_S, description="one call on all ranks, from when it begins there"
    )
    sync_timeout_s: float = Field(120.0, gt=0, le=LONGEST_S, description="one transfer of weights to the engines")
    ping_timeout_s: float = Field(
        60.0,
        gt=0,
        le=LONGEST_S,
        description="while a call waits: a process that does not answer a ping for so long counts as hung",
    )
    hang_timeout_s: float = Field(
        600.0,
        gt=0,
        le=LONGEST_S,
        description="so does one without progress for so long and for 10 times what is usual in that activity (at most "
        "10 times this setting more); the first time of an activity, and the launch, have as long as the call",
    )
    grace_s: float = Field(
        120.0,
        gt=0,
        le=LONGEST_S,
        description="after SIGTERM or SIGINT, for the end of the step and a checkpoint; then `train` ends without one. "
        "Where the run has to go on to a later step, each has as long",
    )
    max_restarts: int = Field(
        10,
        ge=0,
        description="how often a run replaces lost ranks and goes on from its newest checkpoint, and how often lost "
        "engines, counted each for itself; 0: a loss ends it; read where checkpoint.interval_steps is set",
    )

    @model_validator(mode="after")
    def check_allow_without_token(self) -> ClusterSettings:
        if self.allow_without_token and self.address is None:
            raise BrokenRule(
                "cluster.allow_without_token",
                "cluster.allow_without_token=true does nothing without cluster.address",
                "set that, or remove it",
            )
        return self
