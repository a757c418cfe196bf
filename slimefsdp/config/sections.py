"""Defines the sections that a Trainer reads, except those of the algorithm (algorithm.py)."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag

from slimefsdp.config.base import (
    LARGEST,
    MOST,
    PathOrIdSetting,
    PathSetting,
    PositiveInt,
    RankCount,
    Settings,
    broken_rule,
    chosen_by,
    is_text,
    list_of,
    within_ranks,
    without_nulls,
)


def _power_of_two(value: Any) -> Any:
    if type(value) is not int or value < 1 or value & (value - 1):
        raise broken_rule("must be a power of two", "choose one such as 65536")
    return value


def _class_names_or_size(value: Any) -> tuple[str, ...] | int:
    if type(value) is int and value >= 1:
        return value
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item.isidentifier() for item in value):
        rule = "must be a list of module class names, or a number of parameters"
        raise broken_rule(rule, "write it like [Qwen3DecoderLayer, Qwen3MLP], or like 1000000")
    return tuple(value)


_TARGET_WORDS = ("attention", "mlp", "experts", "head", "lm_head", "all-linear")
_BARE_NAME = re.compile(r"[A-Za-z_]\w*")


def _target_patterns(value: Any) -> tuple[str, ...]:
    """Returns targets as keywords and patterns; the bare name of a module, such as `q_proj`, means it in all layers."""
    value = [value] if value == "all-linear" else value  # peft writes this keyword without a list
    is_list = isinstance(value, list | tuple) and len(value) > 0
    if not is_list or not all(isinstance(item, str) and item.strip() for item in value):
        raise broken_rule("must be a list of words or name patterns", "write it like [attention, down_proj]")
    is_bare = [item not in _TARGET_WORDS and _BARE_NAME.fullmatch(item) is not None for item in value]
    return tuple(f"*.{item}" if bare else item for item, bare in zip(value, is_bare, strict=True))


def _count_or_auto(value: Any) -> Any:
    """Checks a count or `auto` with a single error; for a union of types, pydantic would report two."""
    if value != "auto" and type(value) is not int:
        raise broken_rule("must be a whole number, or auto", "write digits only, without quotes, or auto")
    if value != "auto" and value < 1:
        raise broken_rule("must be at least 1", "raise it")
    return value if value == "auto" else within_ranks(value)


def _switch_or_name(value: Any) -> Any:
    """Returns the name that true or false means; other values stay."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


_NAME_PATTERNS = list_of(is_text, "name patterns", "['model.embed_tokens.*', '*.mlp.*']")
_UPDATE_NUMBERS = list_of(lambda item: type(item) is int and 1 <= item <= MOST, "update numbers from 1 on", "[3, 100]")
_DETAILS = list_of(
    lambda item: item in ("memory", "shapes", "stacks"), "some of memory, shapes, stacks", "[memory]", may_be_empty=True
)


class RunSettings(Settings):
    """Sets the length, seed and folders of a run."""

    dir: PathSetting | None = Field(None, description="folder for metrics, curves, checkpoints; needed by `train`")
    steps: PositiveInt | None = Field(
        None,
        description="steps of the loop: rollout batches, or updates under sft and dpo; needed by `train`, or else "
        "run.epochs",
    )
    epochs: PositiveInt | None = Field(
        None,
        description="how often each record is trained on; the steps follow from it, the last update "
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
        description="write a Hugging Face folder here after the last step, in precision.compute_dtype; adapters also "
        "as a PEFT folder, adapter/ inside it",
    )
    wandb_project: str | None = Field(
        None,
        min_length=1,
        description="also log to this Weights & Biases project, with all settings; a resumed run goes on in its wandb "
        "run, whose id is in run.dir/wandb_id; WANDB_NAME and WANDB_RUN_GROUP in the environment name it and its group",
    )


class ModelSettings(Settings):
    """Describes the policy."""

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
    frozen: Annotated[tuple[str, ...], _NAME_PATTERNS] | None = Field(
        None,
        description="patterns like `*.mlp.*` of parameter names, as `group.describe()` lists them: these parameters "
        "keep their values, and take no gradient and no optimiser state; null: all are trained",
    )
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective", "offload"], BeforeValidator(_switch_or_name)
    ] = Field(
        "none",
        description="recompute decoder layers in backward; selective: all but matrix products and attention outputs; "
        "offload: everything, and the input of a recomputed layer waits in the host's memory until backward "
        "(docs/long_context.md); true is full, false none",
    )
    compile: bool = Field(False, description="torch.compile each decoder layer (dynamic shapes), but not its attention")


class LoraSettings(Settings):
    """Configures low-rank adapters, trained instead of the parameters of the policy and the critic (docs/lora.md)."""

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
        description="what a weight update sends to engines. merged: weights with the adapters added; adapters: the "
        "base weights once and then adapters alone, with which engines compute W x + B A x as the trainer does",
    )
    path: PathOrIdSetting | None = Field(
        None,
        description="begin with the adapters of this folder, or id, in peft's format; rank, alpha and targets are "
        "those of the folder",
    )

    @property
    def are_trained(self) -> bool:
        """Returns whether there are adapters.

        If they come from a folder, lora.rank is null until `with_adapters` sets it.
        """
        return self.rank is not None or self.path is not None


class PlacedSettings(Settings):
    """Chooses the processes of a reference or a critic."""

    dp: RankCount | None = Field(
        None, description="data ranks of a worker group of its own; null: it is colocated, in the actor's processes"
    )

    @property
    def is_colocated(self) -> bool:
        return self.dp is None


class ReferenceSettings(PlacedSettings):
    """Describes the frozen model of the KL and of DPO; it is needed only by some losses, or on request."""

    path: PathOrIdSetting | None = Field(None, description="its folder, or id; default: model.path")
    offload: Literal["sleep", "swap", "fsdp", "none"] = Field(
        "sleep",
        description="where it is between uses; sleep: its shards go to the host and come back "
        "whole; swap: the same, and while it computes the policy and its optimiser state wait on the host; fsdp: its "
        "shards stay on the host, and units are gathered from there; none: on the device",
    )
    update_interval_steps: PositiveInt | None = Field(
        None, description="it takes the policy's weights after every so many steps; null: it keeps its own"
    )


class MeshSettings(Settings):
    """Describes the device mesh (dp_replicate, dp, cp). The product is the number of ranks; cp ranks are adjacent."""

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
    """Chooses how attention is computed, and how cp ranks divide it."""

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
    """Chooses dtypes. Master weights are float32, or float64 if precision.compute_dtype is float64."""

    compute_dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        "bfloat16", description="parameters and activations in forward and backward"
    )
    reduce_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto",
        description="in which gradients are summed over ranks; auto: that of the masters; float16 needs "
        "precision.compute_dtype=float16, whose loss scale follows what overflows",
    )

    loss_scale_init: Annotated[int, BeforeValidator(_power_of_two)] = Field(
        2**16, description="the loss is multiplied by this at first; a power of two, halved at each overflow"
    )


class FsdpSettings(Settings):
    """Chooses how parameters, gradients and optimiser state are spread over ranks and host memory."""

    sharding: Literal["full", "keep_parameters", "optimizer", "replicate", "auto"] = Field(
        "full",
        description="full (as ZeRO-3): parameters are gathered for each use; keep_parameters (as ZeRO-2, FSDP2's "
        "reshard_after_forward=False): they stay whole from forward to backward; optimizer (as ZeRO-1): they stay "
        "whole, and gradients too, over all micro-batches of an update, which are summed over ranks once; replicate "
        "(as DDP): every rank holds everything; auto: of the first three the one that sends least and, by the estimate "
        "of `slimefsdp plan`, fits the memory that is free; a resumed run of the same mesh keeps it",
    )
    wrap: Annotated[tuple[str, ...] | int, BeforeValidator(_class_names_or_size)] | None = Field(
        None,
        description="which modules are FSDP units: those of the named classes; or, given a number, the smallest "
        "modules with at least so many parameters; null: decoder layers and an untied embedding",
    )
    cpu_offload: bool = Field(False, description="parameters, gradients and optimiser live on the host between uses")


class BatchSettings(Settings):
    """Sets the sizes of updates and micro-batches, and whether samples share the computation of common prefixes."""

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


def _two_fractions(value: Any) -> tuple[float, float]:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(item) in (int, float) and 0 <= item < 1 for item in value):
        raise broken_rule("must be two numbers in [0, 1)", "write them like [0.9, 0.95]")
    return (float(value[0]), float(value[1]))


def _count_or_share(value: Any) -> Any:
    is_count = type(value) is int and 0 <= value <= MOST
    if not is_count and not (type(value) is float and 0 <= value < 1):
        raise broken_rule("must be a number of updates, or a share of them below 1", "write it like 100, or like 0.05")
    return value


class _OptimSettings(Settings):
    """Holds the settings of all optimisers; lengths are numbers of optimiser updates, not of rollouts."""

    section: ClassVar[str] = "optim"

    lr: float = Field(1e-6, gt=0, le=LARGEST, description="peak learning rate")
    weight_decay: float = Field(
        0.0, ge=0, le=LARGEST, description="decoupled decay; none on norms, biases and embeddings"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="shape after the warm-up")
    warmup_updates: Annotated[int | float, BeforeValidator(_count_or_share)] = Field(
        0,
        description="updates in which the rate rises from 0 to lr; or, between 0 and 1, their share of all updates, "
        "rounded up to whole ones",
    )
    total_updates: PositiveInt | None = Field(
        None, description="where the schedule ends; null: with the last update of run.steps or run.epochs"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at lr x this")
    max_grad_norm: float = Field(1.0, ge=0, description="global-norm clipping; 0: none")
    log_layer_norms: bool = Field(False, description="metrics also have the gradient norm of each layer")


class _AdamMoments(_OptimSettings):
    betas: Annotated[tuple[float, float], BeforeValidator(_two_fractions)] = Field(
        (0.9, 0.95), description="AdamW's decay of the momentum and of the second moment; each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, le=LARGEST, description="AdamW's epsilon")


class AdamWSettings(_AdamMoments):
    """AdamW, with one fused kernel for each update."""

    name: Literal["adamw"] = Field("adamw", description="the optimiser")
    state_dtype: Literal["auto", "bfloat16", "8bit"] = Field(
        "auto",
        description="of the moments between updates. auto: as the masters; bfloat16: half of float32's, rounded "
        "stochastically by run.seed, the update and the element; 8bit: a quarter, codes in blocks with a scale each",
    )


class MuonSettings(_AdamMoments):
    """Muon for the layers' matrices, including experts and adapters; AdamW for the rest (docs/optimizers.md)."""

    name: Literal["muon"] = Field("muon", description="the optimiser")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum; AdamW's is betas[0]")
    adamw_lr: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="peak rate of what AdamW updates; it follows lr's schedule, and a critic's lr in proportion; null: "
        "lr",
    )


class SgdSettings(_OptimSettings):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = Field("sgd", description="the optimiser")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last step in the next one")


OptimSettings = AdamWSettings | MuonSettings | SgdSettings
OptimChoice = Annotated[
    Annotated[AdamWSettings, Tag("adamw")] | Annotated[MuonSettings, Tag("muon")] | Annotated[SgdSettings, Tag("sgd")],
    chosen_by("name", default="adamw"),
    BeforeValidator(lambda value: without_nulls(value, AdamWSettings, MuonSettings, SgdSettings)),
]


class CheckpointSettings(Settings):
    """Configures the checkpoints in `run.dir`/checkpoints."""

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


class ProfileSettings(Settings):
    """Chooses the updates to profile, and the peak rate for the metric `mfu`."""

    updates: Annotated[tuple[int, ...], _UPDATE_NUMBERS] | None = Field(
        None,
        description="updates of train_step to profile, 1 is the run's first: traces of all ranks and a table of "
        "compute, communication and idle shares, and of communication by phase, in run.dir/profile; null: none",
    )
    details: Annotated[tuple[Literal["memory", "shapes", "stacks"], ...], _DETAILS] = Field(
        (),
        description="what the traces have besides: memory: every allocation and the peak, and on CUDA a snapshot of "
        "its allocator; shapes: of operators' inputs; stacks: the Python frames that call operators, with which traces "
        "grow tenfold",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="dense TFLOP/s of one rank's device, which `mfu` is a share of; null: by its name"
    )
