"""The optimiser over sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    name: Literal["adamw", "sgd"],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum betas[0], with decay on matrices only (not on norms, biases and embeddings).

    The optimiser's state exists at once, as zeros.
    """
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter_name, parameter in named_parameters:
        is_matrix = parameter.ndim >= 2 and "embed" not in parameter_name
        (decayed if is_matrix else undecayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    # asked for by name: by default torch loops over sharded parameters one by one
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=betas[0], foreach=True)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, foreach=True)
    for parameter in [*decayed, *undecayed]:
        # zeros are what both would start from at their first step; made now, there is one state to save and load
        state = optimizer.state[parameter]
        if name == "sgd":
            state["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            state["step"] = torch.tensor(0.0)  # on the host: a device scalar would cost a synchronisation per parameter
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return optimizer
