"""Adds LoRA adapters to a model, initialises them, and reads them from PEFT folders.

A module with an adapter computes W x + (alpha / rank) B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685). A
module of experts does this for each expert (slimefsdp.models.lora_modules). A and B are parameters of the module that
holds W, so FSDP shards, gathers and reduces them with the unit of W, and sleep and checkpoints treat them like any
parameter. FSDP requires equal dtypes only of a unit's trained parameters, and gathers frozen parameters in their own
dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.mesh import Mesh, local_block, local_shard
from slimefsdp.errors import ConfigError, ModelError, short_text
from slimefsdp.io.safetensors_header import TensorEntry
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.load_weights import ReadBy, read_tensors, seed_of_module
from slimefsdp.models.lora_modules import LoraLinear, LoraModule, add_to_experts, stacks_of
from slimefsdp.models.peft_folder import (
    BASE_DIGEST,
    BASE_DTYPE,
    FIELD,
    PeftFolder,
    stack_modules,
    tensor_name,
    wrong_tensor,
)

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of an element -> the integer dtype
# keyword of lora.targets -> names of this submodule in the decoder layers of transformers
_PARTS = {"attention": ("self_attn", "attn"), "mlp": ("mlp",)}
_OTHER_MODEL = "name the model that the adapters were trained on as model.path"
_HEADS = ("head", "lm_head")  # the keyword for the LM head, and its name in adapter folders


@dataclass(frozen=True, slots=True)
class Lora:
    rank: int
    alpha: float
    targets: Sequence[str]  # keys of `_PARTS`, `all-linear`, `experts`, `head`, or patterns of names
    seed: int


def add_adapters(model: DecoderModel, lora: Lora, *, base_dtype: torch.dtype) -> None:
    """Freezes the model's parameters, stores them in `base_dtype`, and adds adapters to the targets.

    Must be called before sharding. The adapters have the dtype that the parameters had before, and are filled by
    `draw_adapters`. A critic's head is not changed and is trained in full.

    Raises:
        ConfigError: a target matches nothing, or a module that cannot have an adapter; or lora.rank exceeds the rank of
            a matrix.
    """
    targets = _targets(model, lora.targets)
    for name, target in targets.items():
        rows, columns = target.weight.shape[-2:]
        if lora.rank > min(rows, columns):
            raise ConfigError(
                f"lora.rank={lora.rank} is more than the rank of {name}, a matrix of {rows} x {columns}",
                field="lora.rank",
                hint=f"set it to at most {min(rows, columns)}, or leave that module out of lora.targets",
            )
    master_dtype = next(iter(targets.values())).weight.dtype
    for name, parameter in model.named_weights():
        if name not in model.trained_in_full:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(base_dtype)
    stacks: dict[nn.Module, list[str]] = {}
    for name, target in targets.items():
        parent, _, own_name = name.rpartition(".")
        if isinstance(target.module, nn.Linear):
            adapted = LoraLinear(target.module, lora.rank, lora.alpha, dtype=master_dtype)
            setattr(model.hf.get_submodule(parent), own_name, adapted)
        else:
            stacks.setdefault(target.module, []).append(own_name)
    for experts, names in stacks.items():
        add_to_experts(experts, names, lora.rank, lora.alpha, dtype=master_dtype)


@torch.no_grad()
def draw_adapters(model: DecoderModel, seed: int, *, rank: int | None = None) -> None:
    """Fills the local shards of adapters: A uniform in +-1/sqrt(in_features), equal on every mesh, and B with 0.

    Args:
        rank: the adapters' rank, if it is smaller than that of the allocated matrices. The remaining rows of A are 0,
            and stay 0 in training. None means the full rank.
    """
    for matrix in adapted_matrices(model):
        generator = torch.Generator().manual_seed(seed_of_module(seed, f"{matrix.name}.lora_A"))
        drawn = torch.zeros(matrix.a.shape, dtype=torch.float32)  # [(experts,) rank, in_features]
        bound = drawn.shape[-1] ** -0.5
        drawn[..., :rank, :].uniform_(-bound, bound, generator=generator)
        local_shard(matrix.a).copy_(drawn[local_block(matrix.a).slices])
        local_shard(matrix.b).zero_()


def set_scale(model: DecoderModel, scale: float) -> None:
    for module in adapted_modules(model).values():
        module.scale = scale


class AdaptedMatrix(NamedTuple):
    """Describes a matrix with an adapter, or a stack of matrices, one for each expert."""

    name: str  # name of the linear module, or of the parameter that is a stack
    weight: str  # name of the adapted parameter
    a: nn.Parameter  # [(experts,) rank, in_features]
    b: nn.Parameter  # [(experts,) out_features, rank]
    merged_rows: Callable[[], torch.Tensor]

    @property
    def is_stack(self) -> bool:
        return self.a.ndim == 3


def adapted_matrices(model: DecoderModel) -> list[AdaptedMatrix]:
    return [
        AdaptedMatrix(
            name if isinstance(module, LoraLinear) else f"{name}.{own_name}",
            f"{name}.{own_name}",
            a,
            b,
            partial(module.merged_rows, own_name),
        )
        for name, module in adapted_modules(model).items()
        for own_name, (a, b) in module.pairs.items()
    ]


def adapted_modules(model: DecoderModel) -> dict[str, LoraModule]:
    """Returns the modules that have adapters by name, in model order."""
    return {name: module for name, module in model.hf.named_modules() if isinstance(module, LoraModule)}


def merged_rows(model: DecoderModel) -> dict[str, Callable[[], torch.Tensor]]:
    """Returns adapted weight -> function that computes this rank's rows of W + (alpha / rank) B A."""
    return {matrix.weight: matrix.merged_rows for matrix in adapted_matrices(model)}


@torch.no_grad()
def base_digest(model: DecoderModel, group: dist.ProcessGroup | None) -> str:
    """Collective: returns a digest of the bits of all weights that are frozen under adapters, equal on every mesh.

    It is computed from the sum of each weight's elements, whose bits are read as integers; sums do not depend on the
    sharding.

    Args:
        group: the ranks that share a copy of the model; None means that this process has the whole model.
    """
    named = [(name, parameter) for name, parameter in model.named_weights() if not parameter.requires_grad]
    sums = []
    for _, parameter in named:
        rows = local_shard(parameter).contiguous()
        sums.append(rows.view(_WHOLE_NUMBERS[rows.itemsize]).sum(dtype=torch.int64))
    total = torch.stack(sums)
    if group is not None:
        dist.all_reduce(total, group=group)
    content = [(name, str(weight.dtype), value) for (name, weight), value in zip(named, total.tolist(), strict=True)]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@contextmanager
def adapters_off(model: DecoderModel) -> Iterator[None]:
    """Within the block, the model computes without its adapters, bit-equal to a model without adapters."""
    modules = list(adapted_modules(model).values())
    for module in modules:
        module.is_on = False
    try:
        yield
    finally:
        for module in modules:
            module.is_on = True


class _Target(NamedTuple):
    module: nn.Module
    weight: nn.Parameter  # the matrix of a linear module, or a stack of experts


def _targets(model: DecoderModel, targets: Sequence[str]) -> dict[str, _Target]:
    """Returns name -> target for all modules and stacks that `lora.targets` selects, in model order.

    Keys are the names of linear modules, or of the parameters that are stacks of experts.

    Raises:
        ConfigError: see `add_adapters`.
    """
    owners = {
        name: module for name, module in model.hf.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    stacks = {f"{name}.{own_name}": name for name, module in owners.items() for own_name in stacks_of(module)}
    decoder_layers = set(model.decoder_layers())
    layers = [name for name, module in model.hf.named_modules() if module in decoder_layers]
    head = model.hf.get_output_embeddings()
    chosen: dict[str, _Target] = {}
    for target in targets:
        if target in _PARTS:
            parts = tuple(f"{layer}.{part}." for layer in layers for part in _PARTS[target])
            matched = [name for name, module in owners.items() if name.startswith(parts) and _is_meant(module, stacks)]
        elif target == "all-linear":  # as in peft, all linear modules of the layers, but neither experts nor the head
            within = tuple(f"{layer}." for layer in layers)
            matched = [name for name, module in owners.items() if name.startswith(within) and type(module) is nn.Linear]
        elif target == "experts":
            matched = list(stacks)
        elif target in _HEADS and model.trained_in_full:
            continue  # a critic's head is trained in full
        elif target in _HEADS:
            matched = [name for name, module in owners.items() if module is head]
        else:
            matched = [name for name in (*owners, *stacks) if fnmatchcase(name, target)]
        if not matched:
            linear = sorted(
                {name.rpartition(".")[2] for name, module in owners.items() if isinstance(module, nn.Linear)}
            )
            raise ConfigError(
                f"lora.targets has {target!r}, which matches no module of this model that has parameters",
                field="lora.targets",
                hint="this model's MLPs are experts, which the word experts chooses"
                if target == "mlp" and stacks
                else f"use attention, mlp, all-linear, experts, head, names like {', '.join(linear)}, or patterns",
            )
        for name in matched:
            owner = stacks.get(name, name)
            module = owners[owner]
            is_in_reach = module is head or owner.startswith(tuple(f"{layer}." for layer in layers))
            is_tied = module is head and model.has_tied_embeddings
            if problem := _why_unsupported(owner, module, is_in_reach=is_in_reach, is_tied=is_tied):
                raise ConfigError(
                    f"lora.targets has {target!r}, which matches {owner}: {problem}, and adapters of those are not "
                    "supported",
                    field="lora.targets",
                    hint="choose nn.Linear modules of the decoder layers, such as [attention] or ['*.q_proj'], "
                    "stacks of experts, or the head",
                )
            own_names = [name.removeprefix(f"{owner}.")] if name in stacks else stacks_of(module) or ["weight"]
            for own_name in own_names:
                target_name = owner if own_name == "weight" else f"{owner}.{own_name}"
                chosen[target_name] = _Target(module, module.get_parameter(own_name))
    if not chosen:
        raise ConfigError(
            f"lora.targets={list(targets)} is the head alone, and a critic's is trained whole, without an adapter",
            field="lora.targets",
            hint="choose matrices of the layers, too, such as [attention, head]",
        )
    order = [name for owner in owners for name in (owner, *(stack for stack in stacks if stacks[stack] == owner))]
    return {name: chosen[name] for name in order if name in chosen}


def _is_meant(module: nn.Module, stacks: Collection[str]) -> bool:
    """Returns whether the keywords `attention` and `mlp` include a module: it must have a matrix, as norms have not.

    In a mixture of experts the keywords include only linear modules, like peft's all-linear: neither experts nor
    routers.
    """
    if stacks:
        return isinstance(module, nn.Linear)
    return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))


def _why_unsupported(name: str, module: nn.Module, *, is_in_reach: bool, is_tied: bool) -> str | None:
    if is_tied:
        return "its weight is the embedding, too (tie_word_embeddings)"
    if not is_in_reach:
        return "it is outside of the decoder layers, as embeddings are"
    if stacks_of(module):
        return None
    if ".experts" in name:
        return "it is of one expert, or of experts that lie otherwise than transformers' own"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__} and no nn.Linear"
    return None


# ---------------------------------------------------------------------- adapters of a PEFT folder


def add_adapters_of(
    folder: PeftFolder, model: DecoderModel, lora: Lora, *, base: Path, base_dtype: torch.dtype
) -> None:
    """Adds adapters for the tensors of a folder; `read_adapters` fills them after sharding.

    Args:
        base: the model's folder, for errors.

    Raises:
        ModelError: a tensor belongs to no module of the model or has another shape, or the folder lacks a tensor of a
            module that its target_modules select.
        ConfigError: see `add_adapters`; or lora.targets selects other modules than the folder has tensors for.
    """
    check_is_of(folder, model, base)
    add_adapters(model, lora, base_dtype=base_dtype)
    in_folder, chosen = set(folder.targets), {matrix.name for matrix in adapted_matrices(model)}
    if differing := sorted(in_folder ^ chosen):
        does, has = ("names", "no") if differing[0] in chosen else ("does not name", "a")
        raise ConfigError(
            f"lora.targets={short_text(list(lora.targets))} {does} {differing[0]}, for which lora.path={folder.path} "
            f"has {has} tensor",
            field="lora.targets",
            hint="remove lora.targets: they are those of the folder",
        )


def check_is_of(folder: PeftFolder, model: DecoderModel, base: Path) -> None:
    """Checks that a folder's adapters belong to this model and are complete; the model may already have adapters.

    Args:
        base: the model's folder, for errors.

    Raises:
        ModelError: see `add_adapters_of`.
    """

    def require_tensor(name: str, chosen_by: str) -> TensorEntry:
        if (entry := folder.tensors.get(name)) is None:
            hint = f"save the adapters again, or {_OTHER_MODEL}"
            raise wrong_tensor(name, f"is missing from {folder.path}, where {chosen_by}", hint)
        return entry

    linears = {name: module for name, module in model.hf.named_modules() if isinstance(module, nn.Linear)}
    folder.check_base({f"{name}.weight": tuple(module.weight.shape) for name, module in linears.items()}, base)
    in_model = {name: module for name, module in model.hf.named_modules() if stacks_of(module)}
    in_folder = folder.stacks
    for owner in sorted(in_folder.keys() | in_model.keys()):
        wanted, module = folder.parameters_of(owner), in_model.get(owner)
        # not by get_parameter, because a forward in another thread may have replaced the attribute by W + (alpha /
        # rank) B A
        parameters = {} if module is None else dict(module.named_parameters(recurse=False))
        known = [] if module is None else stacks_of(module)
        if owner in in_folder and set(wanted) - set(known):
            raise wrong_tensor(
                tensor_name(owner, "A"),
                f"of {folder.path} is of experts, where target_parameters names {', '.join(wanted)}, and the model at "
                f"{base} has no such stacks of experts there",
                _OTHER_MODEL,
            )
        in_peft = stack_modules(f"{owner}.{name}" for name in known if name in wanted)
        for stack, peft_module in in_peft.items():
            assert module is not None
            experts, rows, columns = parameters[stack.removeprefix(f"{owner}.")].shape
            if module.is_transposed:
                rows, columns = columns, rows
            for matrix, shape in {"A": (folder.rank * experts, columns), "B": (rows, folder.rank * experts)}.items():
                tensor = tensor_name(peft_module, matrix)
                entry = require_tensor(tensor, f"target_parameters chooses {stack}")
                if tuple(entry.shape) != shape:
                    problem = f"has shape {list(entry.shape)}, and {stack} of the model at {base} needs {list(shape)}"
                    raise wrong_tensor(tensor, f"of {folder.path} {problem}", _OTHER_MODEL)
    targets, head = set(folder.targets), model.hf.get_output_embeddings()
    for name, module in linears.items():
        is_left_out = folder.chooses_all_linear and module is head
        if name not in targets and not is_left_out and folder.chooses(name):
            require_tensor(
                tensor_name(name, "A"), f"target_modules={short_text(folder.config['target_modules'])} chooses {name}"
            )


def read_adapters(
    folder: PeftFolder, model: DecoderModel, mesh: Mesh, *, base: Path, read_by: ReadBy = "every_rank"
) -> None:
    """Collective: fills the local shards of A and B from the folder's file.

    Args:
        base: the model's folder, for errors.
        read_by: see `slimefsdp.models.load_weights.read_weights`.

    Raises:
        ModelError: a value is not finite, the file cannot be read, or the folder's metadata records other base weights;
            raised on every rank.
    """
    fill_matrices(folder, adapted_matrices(model), mesh.group, device=mesh.device, read_by=read_by)
    dtype = model.named_weights()[0][1].dtype
    check_base_weights(folder, dtype, lambda: base_digest(model, mesh.shard_group), base)


def fill_matrices(
    folder: PeftFolder,
    matrices: Sequence[AdaptedMatrix],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    read_by: ReadBy = "every_rank",
) -> None:
    """Collective: fills this rank's rows of A and B from the folder's file; the matrices must have the folder's rank.

    Args:
        group, device, read_by: see `slimefsdp.models.load_weights.read_weights`.

    Raises:
        ModelError: a value is not finite, or the file cannot be read; raised on every rank.
    """
    inside = stack_modules(matrix.name for matrix in matrices if matrix.is_stack)
    named: list[tuple[str, nn.Parameter]] = []
    stacked: list[tuple[str, nn.Parameter]] = []
    for matrix in matrices:
        module = inside.get(matrix.name, matrix.name)
        named.append((tensor_name(module, "A"), matrix.a))  # the rows of A have the file's order, also in a stack
        (stacked if matrix.is_stack else named).append((tensor_name(module, "B"), matrix.b))
    try:
        read_tensors(named, folder.tensors, group, device=device, read_by=read_by)
        for name, b in stacked:
            experts, rows, rank = b.shape
            whole = nn.Parameter(torch.empty(rows, rank * experts, dtype=b.dtype, device=b.device), requires_grad=False)
            read_tensors([(name, whole)], folder.tensors, group, device=device, read_by=read_by)
            stack = whole.view(rows, rank, experts).permute(2, 0, 1)
            local_shard(b).detach().copy_(stack[local_block(b).slices])
    except ModelError as error:
        error.field = FIELD
        raise


def check_base_weights(folder: PeftFolder, dtype: torch.dtype, digest: Callable[[], str], base: Path) -> None:
    """Checks that a folder's adapters were trained on the model's base weights, if the folder records their digest.

    Args:
        dtype: dtype of the base weights.
        digest: computes the model's `base_digest`; called only if the folder records a digest in this dtype.
        base: the model's folder, for errors.

    Raises:
        ModelError: the adapters were trained on other base weights.
    """
    name, recorded = str(dtype).removeprefix("torch."), folder.metadata.get(BASE_DIGEST)
    if recorded is None or folder.metadata.get(BASE_DTYPE) != name:  # digests of different dtypes cannot be compared
        return
    if (digest_of_model := digest()) != recorded:
        raise ModelError(
            f"the adapters of {folder.path} were trained on base weights {recorded} (in {name}), and the model at "
            f"{base} has weights {digest_of_model}",
            field=FIELD,
            hint=_OTHER_MODEL,
        )
