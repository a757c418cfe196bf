"""Muon beside AdamW on whole float64 tensors, written from the formulas, one matrix after the other."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import nn

from slimefsdp.config.sections import OptimSettings

IN_LAYERS = re.compile(r"\.(layers|h)\.\d+\.")


def is_matrix_of_a_layer(name: str, parameter: torch.Tensor) -> bool:
    return bool(IN_LAYERS.search(name)) and parameter.ndim > 1 and not name.endswith("bias")


def orthogonalized(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """By a power of X X^T for each term of the polynomial."""
    x = matrix / max(matrix.square().sum().sqrt().item(), 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x - 4.7750 * (square @ x) + 2.0315 * (square @ (square @ x))
    return x


class PlainMuon:
    """What `optimizer.step()` and `zero_grad()` of a plain training are, for optim.name=muon.

    Args:
        named: the trained parameters, under names of transformers or peft.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], optim: OptimSettings) -> None:
        everything = list(named)
        self.optim = optim
        self.matrices = [p for name, p in everything if is_matrix_of_a_layer(name, p)]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        others = [(name, p) for name, p in everything if not is_matrix_of_a_layer(name, p)]
        decays = re.compile(r"(lm_head|score|lora_[AB].*)\.weight$")
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for name, p in others if decays.search(name)], "weight_decay": optim.weight_decay},
                {"params": [p for name, p in others if not decays.search(name)], "weight_decay": 0.0},
            ],
            lr=optim.adamw_lr or optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            foreach=False,
        )

    @torch.no_grad()
    def step(self) -> None:
        optim = self.optim
        for parameter, momentum in zip(self.matrices, self.momenta, strict=True):
            assert parameter.grad is not None
            momentum.mul_(optim.momentum).add_((1 - optim.momentum) * parameter.grad)
            seen = optim.momentum * momentum + (1 - optim.momentum) * parameter.grad
            rows, columns = parameter.shape[-2:]
            scale = 0.2 * max(rows, columns) ** 0.5
            for matrix, update in zip(parameter.view(-1, rows, columns), seen.view(-1, rows, columns), strict=True):
                matrix.mul_(1 - optim.lr * optim.weight_decay)
                matrix.sub_(optim.lr * scale * orthogonalized(update, 5))
        self.adamw.step()

    def zero_grad(self) -> None:
        for parameter in self.matrices:
            parameter.grad = None
        self.adamw.zero_grad()
