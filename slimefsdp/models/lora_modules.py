"""Modules with adapters: what the module that they take the place of computes, and the product of two thin matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.mesh import local_shard


class LoraLinear(nn.Linear):
    """A linear module with an adapter, which begins as nothing: B is 0.

    Args:
        linear: whose weight and bias it takes over.
        dtype: of the adapter.
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
        """[..., out_features]."""
        output = F.linear(input, self.weight, self.bias)
        if not self.is_on:
            return output
        return output + F.linear(self.low(input), self.lora_B)

    def low(self, input: torch.Tensor) -> torch.Tensor:
        """What B is applied to, [..., rank]."""
        return self.scale * F.linear(input, self.lora_A)

    @torch.no_grad()
    def merged_rows(self) -> torch.Tensor:
        """Collective: this rank's rows of W + (alpha / rank) B A, [rows, in_features] in the adapter's dtype."""
        a = self.lora_A.full_tensor() if isinstance(self.lora_A, DTensor) else self.lora_A
        b = local_shard(self.lora_B)  # sharded over the same rows as the weight
        return torch.addmm(local_shard(self.weight).to(b.dtype), b, a, alpha=self.scale)
