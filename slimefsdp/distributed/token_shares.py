"""Gathers hidden states of all tensor-parallel ranks' tokens for blocks and head, and gives each rank its own back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.mesh import CutMesh


def local_part(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a cut tensor (a DTensor), or a plain tensor unchanged; differentiable."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Gather(torch.autograd.Function):
    """[1, own tokens, features] of every tp rank -> [1, tokens, features]; backward sums the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gathered(own, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _scattered(gradients[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    """Partial sums [1, tokens, features] of every tp rank -> the total of this rank's tokens; backward gathers."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scattered(partial, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _gathered(gradients[0], ctx.group), None


def gather_tokens(own: Tensor, mesh: CutMesh) -> Tensor:
    """Collective: returns the hidden states of all tp ranks' tokens, [1, tokens, features]; backward is collective too.

    Args:
        own: [1, own tokens, features]; every tp rank has equally many tokens.
    """
    gathered: Tensor = _Gather.apply(own, mesh.group)
    return gathered


def scatter_tokens(partial: Tensor, mesh: CutMesh) -> Tensor:
    """Collective: adds up all tp ranks' partial sums, and returns the total for this rank's tokens; backward gathers.

    Args:
        partial: [1, tokens, features]; the number of tokens is a multiple of the tp ranks.
    """
    scattered: Tensor = _Scatter.apply(partial, mesh.group)
    return scattered


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = own.new_empty(dist.get_world_size(group) * own.shape[1], *own.shape[2:])
    dist.all_gather_into_tensor(whole, own[0].contiguous(), group=group)
    return whole[None]


def _scattered(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    # not a view, because FSDP warns about units that return views
    own = partial.new_empty(1, partial.shape[1] // dist.get_world_size(group), *partial.shape[2:])
    dist.reduce_scatter_tensor(own[0], partial[0].contiguous(), group=group)
    return own


class _FirstRankTrains(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, is_first: bool) -> Tensor:
        ctx.is_first = is_first
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] if ctx.is_first else torch.zeros_like(gradients[0]), None


def first_rank_trains(values: Tensor, mesh: CutMesh) -> Tensor:
    """Returns `values` unchanged; gradients flow through the first tp rank's only, and are 0 on the others.

    For values that each tp rank computes from all tokens with uncut weights, whose gradients FSDP would sum tp times.
    """
    result: Tensor = _FirstRankTrains.apply(values, mesh.rank == 0)
    return result
