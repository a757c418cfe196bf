"""Gradient norms over shards: one number per parameter, reduced over the ranks together, and what they say.

The squared norms travel as one float64 vector, so the global norm that clipping needs, the norm of each layer and the
name of the first parameter that is not finite cost one reduction and one look from the host.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.results import GradientHealth

_LAYER = re.compile(r"\.(\d+)\.")  # model.layers.3.mlp.experts.5.w1: the first number is the layer's
_GROUPS = {
    "embedding": re.compile(r"embed_tokens|embed_in|embeddings?\b|\bwte\b|\bwpe\b|embed_positions"),
    "head": re.compile(r"head\b|embed_out|\bscore\b"),
    "final_norm": re.compile(r"norm\b|\bln_f\b|layernorm|layer_norm"),
}


def layer_group(name: str) -> str:
    """The part of the model that a parameter of this Hugging Face name is in.

    Returns:
        `layer_3` for anything in a numbered layer, else `embedding`, `head`, `final_norm`, or `other`.
    """
    if numbered := _LAYER.search(name):
        return f"layer_{numbered[1]}"
    return next((group for group, pattern in _GROUPS.items() if pattern.search(name)), "other")


def squared_norms(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[float]:
    """Collective: the squared L2 norm of each parameter's whole gradient, in float64; 0 where there is none.

    However the gradients are sharded: each shard counts once, also where several ranks hold replicas of it. Every rank
    gets the same numbers, because all ranks take part, not only those that hold different shards.

    Args:
        parameters: at least one of them with a gradient.
        group: all ranks.
    """
    norms = torch._foreach_norm([local_shard(p.grad) for p in parameters if p.grad is not None], 2, torch.float64)
    found = iter(norms)
    nothing = torch.zeros_like(norms[0])
    own = []
    for parameter in parameters:
        norm = nothing if parameter.grad is None else next(found)
        own.append(norm if parameter.grad is not None and _is_first_replica(parameter.grad, group) else nothing)
    total = torch.stack(own).square()
    dist.all_reduce(total, group=group)
    return [float(value) for value in total.tolist()]  # the update's one host synchronisation


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiplies all gradients in place; nothing is touched when the factor is 1."""
    if factor != 1.0:
        torch._foreach_mul_([local_shard(p.grad) for p in parameters if p.grad is not None], factor)


def gradient_health(
    names: Sequence[str], squares: Sequence[float], *, loss_scale: float, update: int
) -> GradientHealth:
    """The report on gradients whose squared norms are `squares`.

    Args:
        names: of the parameters, in model order.
        squares: as `squared_norms` returns them, for gradients that are `loss_scale` times too large.
        update: updates taken so far.
    """
    groups: dict[str, float] = {}
    for name, square in zip(names, squares, strict=True):
        group = layer_group(name)
        groups[group] = groups.get(group, 0.0) + square
    first_nonfinite = next((n for n, square in zip(names, squares, strict=True) if not math.isfinite(square)), None)
    norm = math.sqrt(sum(squares)) / loss_scale
    return GradientHealth(
        update=update,
        norm=norm,
        group_norms={group: math.sqrt(square) / loss_scale for group, square in groups.items()},
        first_nonfinite=first_nonfinite,
        is_skipped=not math.isfinite(norm),
    )


def _is_first_replica(gradient: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether this rank is the one, of those that hold the same rows, whose rows are counted."""
    if not isinstance(gradient, DTensor):
        return dist.get_rank(group) == 0
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None, "a gradient on ranks outside its mesh"
    return all(
        place == 0 or not isinstance(placement, Replicate)
        for place, placement in zip(coordinate, gradient.placements, strict=True)
    )
