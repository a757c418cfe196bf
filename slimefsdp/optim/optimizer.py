"""The optimiser over sharded parameters, and its learning rate as a function of how many updates were taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Literal

import torch
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from slimefsdp.distributed.mesh import local_shard


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    name: Literal["adamw", "sgd"],
    implementation: Literal["auto", "foreach", "fused"] = "auto",
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    undecayed: Collection[str] = (),
) -> torch.optim.Optimizer:
    """AdamW, or SGD with momentum betas[0]. The optimiser's state exists at once, as zeros.

    Args:
        named_parameters: those that are trained.
        implementation: fused is for AdamW alone: torch has no fused SGD of sharded parameters. auto: fused for AdamW.
        undecayed: names of those that weight decay leaves alone.
    """
    named = list(named_parameters)
    groups = [
        {"params": [p for own, p in named if own not in undecayed], "weight_decay": weight_decay, "decays": True},
        {"params": [p for own, p in named if own in undecayed], "weight_decay": 0.0, "decays": False},
    ]
    if implementation == "auto":
        implementation = "fused" if name == "adamw" else "foreach"
    # either is asked for by name: by default torch loops over parameters on the host one by one
    how = {implementation: True}
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=betas[0], **how)
    else:
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, **how)
    # The fused kernel reads its step counts on the device, as slices of one allocation; the foreach one on the host,
    # where a device scalar would cost it a synchronisation per parameter.
    device = named[0][1].device if implementation == "fused" else torch.device("cpu")
    steps = torch.zeros(len(named), dtype=torch.float32, device=device)
    for (_, parameter), step in zip(named, steps, strict=True):
        # zeros are what both would start from at their first step; made now, there is one state to save and load
        state = optimizer.state[parameter]
        if name == "sgd":
            state["momentum_buffer"] = torch.zeros_like(parameter)
        else:
            state["step"] = step
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
    return optimizer


@torch.no_grad()
def update_shards(optimizer: torch.optim.Optimizer) -> None:
    """One step of an optimiser from `build_optimizer`, taken on each rank's shards as plain tensors.

    What `optimizer.step()` computes, element by element: neither optimiser looks at more than one element at a time.
    Through sharded tensors torch would work out the placement of every operand of every operation first.
    """
    for group in optimizer.param_groups:
        trained = [p for p in group["params"] if p.grad is not None]
        parameters, gradients = [local_shard(p) for p in trained], [local_shard(p.grad) for p in trained]
        state = [optimizer.state[p] for p in trained]
        how = {"foreach": group["foreach"], "fused": group["fused"]}
        if isinstance(optimizer, torch.optim.AdamW):
            beta1, beta2 = group["betas"]
            adamw(
                parameters,
                gradients,
                [local_shard(own["exp_avg"]) for own in state],
                [local_shard(own["exp_avg_sq"]) for own in state],
                [],
                [own["step"] for own in state],
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                **how,
            )
        else:
            sgd(
                parameters,
                gradients,
                [local_shard(own["momentum_buffer"]) for own in state],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                **how,
            )


def undecayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay leaves alone: vectors, biases and embeddings, a tied head among them.

    Vectors are norms, attention sinks and most biases; a mixture's biases are matrices, and known by their name.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or name.endswith("bias") or id(parameter) in embeddings
    }


def learning_rate(
    update: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_updates: int,
    total_updates: int,
    min_ratio: float,
) -> float:
    """The rate of update number `update`, counted from 0.

    Warm-up rises linearly and reaches `peak` at its last update; the decay then runs from `peak` to `peak * min_ratio`
    at update total_updates - 1, and stays there.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - 1 - warmup_updates))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * shape)
