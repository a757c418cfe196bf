"""Defines the sections that a Trainer reads, except those of the algorithm (algorithm.py)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, Tag, ValidationInfo, field_serializer, field_validator

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
    path_text,
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
    """Returns targets as keywords and patterns; a module's bare name, such as `q_proj`, becomes `*.q_proj`."""
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
    """Returns `full` for true and `none` for false; other values stay."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


_NAME_PATTERNS = list_of(is_text, "name patterns", "['model.embed_tokens.*', '*.mlp.*']")
_UPDATE_NUMBERS = list_of(lambda item: type(item) is int and 1 <= item <= MOST, "update numbers from 1 on", "[3, 100]")
_DETAILS = list_of(
    lambda item: item in ("memory", "shapes", "stacks"), "some of memory, shapes, stacks", "[memory]", may_be_empty=True
)


MODEL_FOLDER = "model"  # in run.dir, for run.export_dir=auto


class RunSettings(Settings):
    """Sets the length, seed and folders of a run."""

    dir: PathSetting | None = Field(None, description="folder for metrics, curves, checkpoints; `train` needs it")
    steps: PositiveInt | None = Field(
        None,
        description="number of steps; a step is a rollout batch, or an update under sft and dpo; `train` needs this or "
        "run.epochs",
    )
    epochs: PositiveInt | None = Field(
        None,
        description="how often each record is trained on, which decides the number of steps; the last update takes the "
        "records that are left; if run.steps is set too, it may end the run earlier",
    )
    seed: int = Field(0, ge=0, lt=2**31, description="seeds sampling, shuffling and every rank's generator")
    deterministic: bool = Field(
        False,
        description="ranks use only deterministic kernels (an operation without one is an error), and before each "
        "train_step seed every generator from run.seed, the update and the data rank; slower on CUDA",
    )
    export_dir: PathSetting | None = Field(
        None,
        description="after the last step, the model is written here as a Hugging Face folder in "
        "precision.compute_dtype; adapters are also written as a PEFT folder, `adapter/` inside it; auto: the folder "
        "model/ in run.dir; null: no model is written",
    )
    wandb_project: str | None = Field(
        None,
        min_length=1,
        description="Weights & Biases project that also gets metrics and settings; a resumed run continues its wandb "
        "run, whose id is in run.dir/wandb_id; the environment's WANDB_NAME and WANDB_RUN_GROUP name the run and group",
    )

    @field_validator("export_dir", mode="before")
    @classmethod
    def resolve_auto(cls, value: Any, info: ValidationInfo) -> Any:
        """Replaces `auto` by the folder in run.dir, or by null if there is no run.dir."""
        run_dir = info.data.get("dir")
        if value != "auto":
            return value
        return None if run_dir is None else run_dir / MODEL_FOLDER

    @field_serializer("export_dir", when_used="json")
    def export_dir_text(self, value: Path | None) -> str | None:
        """Returns `auto` for the folder in run.dir, so that stored settings can be used with another run.dir."""
        if value is None:
            return None
        return "auto" if self.dir is not None and value == self.dir / MODEL_FOLDER else path_text(value)


class ModelSettings(Settings):
    """Describes the policy."""

    path: PathOrIdSetting = Field(
        description="Hugging Face folder with safetensors weights; or, if there is no such folder, an id on the hub, "
        "`owner/name` or `owner/name@revision` (docs/models.md)"
    )
    init: Literal["folder", "random"] = Field(
        "folder",
        description="folder: load the weights; random: draw them from run.seed by transformers' rules, the same on "
        "every mesh; model.path then needs only config.json and the tokenizer",
    )
    read: Literal["every_rank", "first_rank"] = Field(
        "every_rank",
        description="which ranks read model.path, reference.path and lora.path; first_rank: rank 0 reads a folder and "
        "sends each rank its rows, so that the other ranks need no copy of the folder",
    )
    frozen: Annotated[tuple[str, ...], _NAME_PATTERNS] | None = Field(
        None,
        description="patterns, like `*.mlp.*`, of the names of parameters that keep their values and have no gradient "
        "and no optimiser state; `group.describe()` lists the names; null means that all parameters are trained",
    )
    activation_checkpointing: Annotated[
        Literal["none", "full", "selective", "offload"], BeforeValidator(_switch_or_name)
    ] = Field(
        "none",
        description="what backward recomputes. full: decoder layers; selective: all of a layer except matrix products "
        "and attention outputs; offload: as full, and the input of each layer waits in the host's memory until "
        "backward (docs/long_context.md). true means full, false means none",
    )
    compile: bool = Field(False, description="torch.compile each decoder layer (dynamic shapes), but not its attention")


class LoraSettings(Settings):
    """Configures low-rank adapters, trained instead of the parameters of the policy and the critic (docs/lora.md)."""

    rank: PositiveInt | None = Field(
        None, description="columns of an adapter's B and rows of its A; null means no adapters: parameters are trained"
    )
    alpha: float = Field(32.0, gt=0, le=LARGEST, description="a module computes W x + (alpha / rank) B A x")
    targets: Annotated[tuple[str, ...], BeforeValidator(_target_patterns)] = Field(
        ("attention", "mlp"),
        description="modules with an adapter. `attention`, `mlp`, `all-linear`, names like `q_proj` and patterns like "
        "`*.layers.0.*.q_proj`: `nn.Linear` modules of the decoder layers; `experts`: the stacks of experts, or some "
        "of them by a pattern like `*.experts.down_proj`; `head` or `lm_head`: the LM head, if no embedding is tied",
    )
    sync: Literal["merged", "adapters"] = Field(
        "merged",
        description="what a weight update sends to engines. merged: weights with the adapters added; adapters: first "
        "the base weights, then only adapters, with which engines compute W x + B A x as the trainer does",
    )
    path: PathOrIdSetting | None = Field(
        None,
        description="folder or id, in peft's format, of the adapters to begin with; the folder decides rank, alpha and "
        "targets",
    )

    @property
    def are_trained(self) -> bool:
        """Returns whether there are adapters.

        If the adapters come from lora.path, lora.rank is null until `with_adapters` sets it.
        """
        return self.rank is not None or self.path is not None


class PlacedSettings(Settings):
    """Chooses the processes of a reference or a critic."""

    dp: RankCount | None = Field(
        None, description="data ranks of a separate worker group; null means colocated, in the actor's processes"
    )

    @property
    def is_colocated(self) -> bool:
        return self.dp is None


class ReferenceSettings(PlacedSettings):
    """Describes the frozen model of the KL and of DPO. Only some losses, or calls for its log-probs, need the model."""

    path: PathOrIdSetting | None = Field(None, description="folder or id of the reference; null means model.path")
    offload: Literal["sleep", "swap", "fsdp", "none"] = Field(
        "sleep",
        description="where the reference is between uses. sleep: on the host; all shards come back for a use; swap: as "
        "sleep, and the policy and its optimiser state are on the host while the reference computes; fsdp: on the "
        "host, and units are gathered from there; none: on the device",
    )
    update_interval_steps: PositiveInt | None = Field(
        None, description="the reference takes the policy's weights after every so many steps; null means never"
    )


class MeshSettings(Settings):
    """Describes the device mesh (dp_replicate, dp, cp, tp).

    The product is the number of ranks. The tp ranks of a cp rank are adjacent, and so are all ranks that share a pack.
    """

    dp_replicate: RankCount = Field(
        1, description="copies of the model; parameters are sharded inside a copy, gradients summed over all copies"
    )
    dp: Annotated[PositiveInt | Literal["auto"], BeforeValidator(_count_or_auto)] = Field(
        1, description="data-parallel ranks of a copy; auto means as many as the started ranks or the cluster allow"
    )
    cp: RankCount = Field(1, description="context-parallel ranks that share each pack")
    tp: RankCount = Field(
        1, description="tensor-parallel ranks, which share the matrices of each layer and the tokens between its blocks"
    )
    ep: RankCount = Field(
        1,
        description="expert-parallel ranks, which share the experts of each layer: groups of this many adjacent ranks "
        "among the dp x cp x tp ranks of a copy",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto means cuda if this machine, or the joined cluster, has GPUs, else cpu"
    )

    @property
    def ranks_per_pack(self) -> int:
        """Returns the number of ranks that compute a pack together."""
        return self.cp * self.tp

    @property
    def product(self) -> str:
        """Returns the settings whose product is the number of ranks, as a text."""
        tp = f" x mesh.tp={self.tp}" if self.tp > 1 else ""
        return f"mesh.dp_replicate={self.dp_replicate} x mesh.dp={self.dp} x mesh.cp={self.cp}{tp}"


class AttentionSettings(Settings):
    """Chooses how attention is computed, and how cp ranks divide it."""

    strategy: Literal["auto", "ring", "ulysses", "all_gather", "ring_flash_attn"] = Field(
        "auto",
        description="how cp ranks exchange keys and values; auto chooses by model and mesh; `train` prints the choice",
    )
    kernel: Literal["torch", "flash_attn", "flash_attn_3"] = Field(
        "torch",
        description="torch: torch's kernels; flash_attn: the flash-attn package; flash_attn_3: torch with "
        "FlashAttention 3 as its flash kernel, on Hopper GPUs, if flash_attn_interface is installed and torch has a "
        "switch for it (2.13). The packages support heads of a multiple of 8 features, at most 256; FlashAttention 3 "
        "no soft-cap, and under run.deterministic at most 192 features. What is not supported is refused",
    )


class PrecisionSettings(Settings):
    """Chooses dtypes. Master weights are float32, or float64 if precision.compute_dtype is float64."""

    compute_dtype: Literal["bfloat16", "float16", "float32", "float64"] = Field(
        "bfloat16", description="dtype of parameters and activations in forward and backward"
    )
    reduce_dtype: Literal["auto", "bfloat16", "float16", "float32", "float64"] = Field(
        "auto",
        description="dtype in which gradients are summed over ranks; auto means the dtype of the master weights; "
        "float16 needs precision.compute_dtype=float16, whose loss scale is lowered at overflows",
    )

    loss_scale_init: Annotated[int, BeforeValidator(_power_of_two)] = Field(
        2**16, description="initial factor of the loss; a power of two, which is halved at each overflow"
    )
    float8: Literal["none", "rowwise_with_gw_hp"] = Field(
        "none",
        description="torchao's recipe by which the linear modules of attention and MLP compute in float8, in policy, "
        "reference and critic; on a CPU it is emulated (docs/performance.md)",
    )


class FsdpSettings(Settings):
    """Chooses how parameters, gradients and optimiser state are spread over ranks and host memory."""

    sharding: Literal["full", "keep_parameters", "optimizer", "replicate", "auto"] = Field(
        "full",
        description="full (as ZeRO-3): parameters are gathered for each use; keep_parameters (as ZeRO-2, FSDP2's "
        "reshard_after_forward=False): parameters stay whole from forward to backward; optimizer (as ZeRO-1): "
        "parameters and gradients stay whole over all micro-batches of an update, and gradients are summed over ranks "
        "once; replicate (as DDP): every rank holds everything; auto: of the first three, the one that sends least and "
        "fits the free memory by the estimate of `slimefsdp plan`; a resumed run on the same mesh keeps the choice",
    )
    wrap: Annotated[tuple[str, ...] | int, BeforeValidator(_class_names_or_size)] | None = Field(
        None,
        description="which modules are FSDP units: those of the named classes; or, given a number, the smallest "
        "modules with at least so many parameters; null means decoder layers and an untied embedding",
    )
    cpu_offload: bool = Field(False, description="parameters, gradients and optimiser are on the host between uses")


class BatchSettings(Settings):
    """Sets the sizes of updates and micro-batches, and whether samples share the computation of common prefixes."""

    samples_per_update: PositiveInt | None = Field(
        None,
        description="samples per optimiser update; the last update of a step takes the rest; null means all samples",
    )
    max_tokens_per_rank: int = Field(8192, ge=2, description="hard cap on the tokens of one micro-batch on one rank")
    cost_model: PathSetting | None = Field(
        None,
        description="file of `slimefsdp plan --calibrate`, the same on every machine, with the measured cost of "
        "attention and communication, by which packs and ranks are balanced; null means by the model's dimensions",
    )
    share_prefixes: Literal["auto", "always", "never"] = Field(
        "auto",
        description="compute once the tokens with which several samples of a pack begin, such as a group's prompt; "
        "auto: if this saves at least 5 % of the estimated time",
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
        0.0, ge=0, le=LARGEST, description="decoupled weight decay; norms, biases and embeddings have none"
    )
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_updates: Annotated[int | float, BeforeValidator(_count_or_share)] = Field(
        0,
        description="number of updates in which the rate rises from 0 to lr; a value between 0 and 1 is a share of all "
        "updates, rounded up",
    )
    total_updates: PositiveInt | None = Field(
        None, description="number of updates until the schedule ends; null means all of run.steps or run.epochs"
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="the schedule ends at this share of lr")
    max_grad_norm: float = Field(1.0, ge=0, description="clip gradients to this global norm; 0 means no clipping")
    log_layer_norms: bool = Field(False, description="metrics also have the gradient norm of each layer")


class _AdamMoments(_OptimSettings):
    betas: Annotated[tuple[float, float], BeforeValidator(_two_fractions)] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and of the second moment; each in [0, 1)"
    )
    eps: float = Field(1e-8, gt=0, le=LARGEST, description="AdamW's epsilon")


class AdamWSettings(_AdamMoments):
    """AdamW, with one fused kernel for each update."""

    name: Literal["adamw"] = Field("adamw", description="the optimiser")
    state_dtype: Literal["auto", "bfloat16", "8bit"] = Field(
        "auto",
        description="dtype of the moments between updates. auto: as the master weights; bfloat16: half of float32's "
        "memory, rounded stochastically by run.seed, update and element; 8bit: a quarter, codes in blocks with a scale",
    )


class MuonSettings(_AdamMoments):
    """Muon for the layers' matrices, including experts and adapters; AdamW for the rest (docs/optimizers.md)."""

    name: Literal["muon"] = Field("muon", description="the optimiser")
    momentum: float = Field(0.95, ge=0, lt=1, description="Muon's momentum; AdamW's is betas[0]")
    adamw_lr: float | None = Field(
        None,
        gt=0,
        le=LARGEST,
        description="peak learning rate of the parameters that AdamW updates, on the schedule of lr; in a "
        "critic it has the same proportion to critic.lr; null means lr",
    )


class SgdSettings(_OptimSettings):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = Field("sgd", description="the optimiser")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum")


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
        description="steps between checkpoints; if this is set, `slimefsdp train` replaces lost ranks and engines; "
        "null means that no checkpoints are written, and a loss ends the run",
    )
    keep_last: PositiveInt = Field(2, description="how many of the newest checkpoints are kept")
    resume: bool = Field(False, description="continue from the newest valid checkpoint; an error if there is none")
    async_save: bool = Field(
        False,
        description="save() returns at once: copying to host buffers, writing, hashing and the commit go on in the "
        "background, one save at a time; the next update waits for the copy",
    )


class ProfileSettings(Settings):
    """Chooses the updates to profile, and the peak rate for the metric `mfu`."""

    updates: Annotated[tuple[int, ...], _UPDATE_NUMBERS] | None = Field(
        None,
        description="updates of train_step to profile, counted from 1 over the run; run.dir/profile gets traces of all "
        "ranks, the shares of compute, communication and idle time, and communication by phase; null means none",
    )
    details: Annotated[tuple[Literal["memory", "shapes", "stacks"], ...], _DETAILS] = Field(
        (),
        description="what the traces also have. memory: every allocation and the peak, and on CUDA a snapshot of the "
        "allocator; shapes: the shapes of operators' inputs; stacks: the Python frames that call operators, which "
        "makes traces ten times as large",
    )
    peak_tflops: float | None = Field(
        None, gt=0, description="dense TFLOP/s of a rank's device, for `mfu`; null means by the device's name"
    )
