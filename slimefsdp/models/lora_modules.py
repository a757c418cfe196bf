"""Defines modules with LoRA adapters, which add a product of two low-rank matrices to each adapted matrix."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.mesh import is_cut, local_block, local_shard


class LoraLinear(nn.Linear):
    """A linear module with an adapter; the adapter has no effect at first because B is 0.

    Args:
        linear: the module whose weight and bias are used.
        dtype: dtype of the adapter.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, *, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, linear.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=dtype, device=device))
        self.scale = alpha / rank
        self.is_on = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = F.linear(input, self.weight, self.bias)
        if not self.is_on:
            return output
        return output + F.linear(self.low(input), self.lora_B)

    def low(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the input of B, [..., rank]."""
        return self.scale * F.linear(input, self.lora_A)

    @torch.no_grad()
    def merged_rows(self, parameter: str = "weight") -> torch.Tensor:
        """Collective: returns this rank's part of W + (alpha / rank) B A, shaped like its part of W, in A's dtype."""
        rows, columns = local_block(self.weight).slices
        a = (self.lora_A.full_tensor() if isinstance(self.lora_A, DTensor) else self.lora_A)[:, columns]
        b = local_shard(self.lora_B)  # sharded over the same rows as the weight, unless tp ranks share its columns
        if isinstance(self.lora_B, DTensor) and is_cut(self.weight) and not is_cut(self.lora_B):
            b = self.lora_B.full_tensor()[rows]
        return torch.addmm(local_shard(self.weight).to(b.dtype), b, a, alpha=self.scale)

    @property
    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        return {"weight": (self.lora_A, self.lora_B)}


class LoraExperts(nn.Module):
    """A mixin that `add_to_experts` puts before the class of a module of experts.

    Each forward computes W + (alpha / rank) B A, [experts, ..], for each adapted stack of expert weights, and replaces
    W by this sum while the module computes. This works with every implementation of experts. The sum is as large as the
    stack and lives until backward has used it, unless the layer is recomputed. In half precision (alpha / rank) B is
    rounded first, and then the sum.
    """

    stacks: tuple[str, ...]  # names of the adapted parameters, in the module's order
    scale: float
    is_on: bool
    is_transposed: bool  # whether a stack is [experts, in, out]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_on:
            return super().forward(*args, **kwargs)
        # attributes rather than parameters: expert parallelism replaces them by this rank's part
        parts = {name: (getattr(self, f"{name}_lora_A"), getattr(self, f"{name}_lora_B")) for name in self.stacks}
        sums = {name: self._sum(getattr(self, name), *parts[name]) for name in self.stacks}
        # attributes of the instance take precedence over parameters of the same name
        self.__dict__.update(sums)
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in sums:
                del self.__dict__[name]

    @torch.no_grad()
    def merged_rows(self, stack: str) -> torch.Tensor:
        """Returns this rank's experts of W + (alpha / rank) B A, in the adapter's dtype."""
        a, b = map(local_shard, self.pairs[stack])  # sharded over the same experts as the stack
        return self._sum(local_shard(getattr(self, stack)).to(b.dtype), a, b)

    @property
    def pairs(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        """Returns A, [experts, rank, in], and B, [experts, out, rank], of each adapted stack."""
        own = self._parameters
        return {name: (own[f"{name}_lora_A"], own[f"{name}_lora_B"]) for name in self.stacks}  # type: ignore[misc]

    def _sum(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scaled = self.scale * b  # baddbmm's alpha would be a constant in a compiled graph
        left, right = (a.mT, scaled.mT) if self.is_transposed else (scaled, a)
        return torch.baddbmm(weight, left, right)


LoraModule = LoraLinear | LoraExperts


def stacks_of(module: nn.Module) -> list[str]:
    """Returns the names of a module's parameters that hold one matrix per expert and can have adapters.

    Only transformers' own modules of experts have such parameters; their `is_transposed` gives the layout.
    """
    if not hasattr(module, "is_transposed"):
        return []
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]


@cache
def _with_adapters(kind: type[nn.Module]) -> type[nn.Module]:
    """Returns the subclass with adapters of a class of experts; it has the same name, which fsdp.wrap refers to.

    The result is cached because torch.compile recompiles for every new class.
    """
    return type(kind.__name__, (LoraExperts, kind), {})


def add_to_experts(experts: nn.Module, stacks: Sequence[str], rank: int, alpha: float, *, dtype: torch.dtype) -> None:
    """Adds adapters to stacks of a module of experts, in place; they have no effect at first because B is 0.

    Args:
        stacks: names from `stacks_of`, in the module's order.
        dtype: dtype of the adapters.
    """
    for name in stacks:
        weight = experts.get_parameter(name)
        count, rows, columns = weight.shape
        out_features, in_features = (columns, rows) if experts.is_transposed else (rows, columns)
        a = torch.empty(count, rank, in_features, dtype=dtype, device=weight.device)
        b = torch.zeros(count, out_features, rank, dtype=dtype, device=weight.device)
        experts.register_parameter(f"{name}_lora_A", nn.Parameter(a))
        experts.register_parameter(f"{name}_lora_B", nn.Parameter(b))
    experts.__class__ = _with_adapters(type(experts))  # type: ignore[arg-type]
    assert isinstance(experts, LoraExperts)
    experts.stacks, experts.scale, experts.is_on = tuple(stacks), alpha / rank, True
