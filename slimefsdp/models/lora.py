"""LoRA adapters: a trained product of two thin matrices beside each of the frozen matrices that were chosen.

A module computes W x + (alpha / rank) B A x (Hu et al. 2021, https://arxiv.org/abs/2106.09685). The adapter's matrices
are parameters of the module that holds W. So they are sharded and gathered with the unit that W is in, and everything
that holds for its parameters (meshes, levels, sums over ranks, sleep) holds for them: nothing is summed by hand. FSDP
allows this since it asks for one dtype of those parameters of a unit that are trained, and gathers the frozen ones in
whatever dtype they are stored.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.load_weights import local_rows
from slimefsdp.models.lora_modules import LoraLinear
from slimefsdp.models.random_init import seed_of_module

_WHOLE_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of so many bytes
# a word of lora.targets -> what transformers' decoder layers call that part
_PARTS = {"attention": ("self_attn", "attn"), "mlp": ("mlp",)}


@dataclass(frozen=True, slots=True)
class Lora:
    """The settings of `lora` as values."""

    rank: int
    alpha: float
    targets: Sequence[str]  # words of `_PARTS`, `head`, or patterns of module names
    seed: int


def add_adapters(model: DecoderModel, lora: Lora, *, base_dtype: torch.dtype) -> None:
    """Freezes the model's parameters, stores them in `base_dtype`, and puts adapters beside the targets.

    For before sharding; the adapters have the dtype that the parameters had, and wait for `draw_adapters`. A critic's
    head stays as it is, and is trained.

    Raises:
        ConfigError: a target matches nothing, or what can have no adapter; or the rank is more than a matrix has.
    """
    targets = _targets(model, lora.targets)
    for name, linear in targets.items():
        smaller = min(linear.in_features, linear.out_features)
        if lora.rank > smaller:
            raise ConfigError(
                f"lora.rank={lora.rank} is more than the rank of {name}, a matrix of {linear.out_features} x "
                f"{linear.in_features}",
                field="lora.rank",
                hint=f"set it to at most {smaller}, or leave that module out of lora.targets",
            )
    master_dtype = next(iter(targets.values())).weight.dtype
    for name, parameter in model.named_weights():
        if name not in model.trained_beside_adapters:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(base_dtype)
    for name, linear in targets.items():
        parent, _, own_name = name.rpartition(".")
        setattr(model.hf.get_submodule(parent), own_name, LoraLinear(linear, lora.rank, lora.alpha, dtype=master_dtype))


@torch.no_grad()
def draw_adapters(model: DecoderModel, seed: int, *, rank: int | None = None) -> None:
    """Fills the local shards: A uniform in +-1/sqrt(in_features), the same on every mesh, B with 0.

    Args:
        rank: of the adapters, where it is less than there is room for: what is beyond it is 0, and trains to nothing
            else.
    """
    for name, module in adapted_modules(model):
        generator = torch.Generator().manual_seed(seed_of_module(seed, f"{name}.lora_A"))
        bound = module.in_features**-0.5
        drawn = torch.zeros(module.lora_A.shape, dtype=torch.float32)
        drawn[:rank].uniform_(-bound, bound, generator=generator)
        start, end = local_rows(module.lora_A)
        local_shard(module.lora_A).copy_(drawn[start:end])
        local_shard(module.lora_B).zero_()


def set_scale(model: DecoderModel, scale: float) -> None:
    """What B A x is multiplied by from now on, in every module with an adapter."""
    for _, module in adapted_modules(model):
        module.scale = scale


def adapted_modules(model: DecoderModel) -> list[tuple[str, LoraLinear]]:
    """The modules with adapters, in model order."""
    return [(name, module) for name, module in model.hf.named_modules() if isinstance(module, LoraLinear)]


def merged_rows(model: DecoderModel) -> dict[str, Callable[[], torch.Tensor]]:
    """Names of the weights that adapters change -> this rank's rows of the sum; see `LoraLinear.merged_rows`."""
    return {f"{name}.weight": module.merged_rows for name, module in adapted_modules(model)}


@torch.no_grad()
def base_digest(model: DecoderModel, group: dist.ProcessGroup) -> str:
    """Collective: of the bits of all weights that are frozen beside adapters, the same on every mesh.

    Each weight counts by the sum of its bits as whole numbers, in which no order and no split shows.

    Args:
        group: the ranks that share a copy of the model.
    """
    named = [(name, parameter) for name, parameter in model.named_weights() if not parameter.requires_grad]
    sums = []
    for _, parameter in named:
        rows = local_shard(parameter).contiguous()
        sums.append(rows.view(_WHOLE_NUMBERS[rows.itemsize]).sum(dtype=torch.int64))
    total = torch.stack(sums)
    dist.all_reduce(total, group=group)
    content = [(name, str(one.dtype), value) for (name, one), value in zip(named, total.tolist(), strict=True)]
    return hashlib.sha256(repr(content).encode()).hexdigest()[:16]


@contextmanager
def adapters_off(model: DecoderModel) -> Iterator[None]:
    """Inside, the model computes what it would without adapters, to the bit."""
    modules = [module for _, module in adapted_modules(model)]
    for module in modules:
        module.is_on = False
    try:
        yield
    finally:
        for module in modules:
            module.is_on = True


def _targets(model: DecoderModel, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The modules that `lora.targets` names, in model order.

    Raises:
        ConfigError: as `add_adapters`.
    """
    owners = {
        name: module for name, module in model.hf.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    in_stack = set(model.decoder_layers())
    layers = [name for name, module in model.hf.named_modules() if module in in_stack]
    head = model.hf.get_output_embeddings()
    chosen: dict[str, nn.Linear] = {}
    for target in targets:
        if target in _PARTS:
            parts = tuple(f"{layer}.{part}." for layer in layers for part in _PARTS[target])
            # norms, sinks and the like are no matrices: the word does not mean them
            matched = [
                name
                for name, module in owners.items()
                if name.startswith(parts) and any(p.ndim > 1 for p in module.parameters(recurse=False))
            ]
        elif target == "head":
            matched = [name for name, module in owners.items() if module is head]
        else:
            matched = [name for name in owners if fnmatchcase(name, target)]
        if not matched:
            near = difflib.get_close_matches(target, owners, n=3, cutoff=0.0)
            raise ConfigError(
                f"lora.targets has {target!r}, which matches no module of this model that has parameters",
                field="lora.targets",
                hint=f"use attention, mlp, head or patterns of names, of which the nearest are {', '.join(near)}",
            )
        for name in matched:
            is_in_reach = owners[name] is head or name.startswith(tuple(f"{layer}." for layer in layers))
            if problem := _why_unsupported(
                name, owners[name], is_in_reach=is_in_reach, is_tied=owners[name] is head and model.has_tied_embeddings
            ):
                raise ConfigError(
                    f"lora.targets has {target!r}, which matches {name}: {problem}, and adapters of those are not "
                    "supported",
                    field="lora.targets",
                    hint="choose nn.Linear modules of the decoder layers, such as [attention] or ['*.q_proj'], or an "
                    "untied head",
                )
            module = owners[name]
            assert isinstance(module, nn.Linear)
            chosen[name] = module
    return {name: chosen[name] for name in owners if name in chosen}


def _why_unsupported(name: str, module: nn.Module, *, is_in_reach: bool, is_tied: bool) -> str | None:
    if is_tied:
        return "its weight is the embedding, too (tie_word_embeddings)"
    if not is_in_reach:
        return "it is outside of the decoder layers, as embeddings are"
    if any(parameter.ndim > 2 for parameter in module.parameters(recurse=False)) or ".experts" in name:
        return "it is a stack of experts"
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__} and no nn.Linear"
    return None
