"""Builds the optimiser of sharded parameters, and updates the parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, assert_never

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from slimefsdp.distributed.mesh import local_block, local_shard
from slimefsdp.optim.low_bit import QuantizedState, RoundedState, block_of, update_quantized, update_rounded
from slimefsdp.optim.muon import update_matrices

OptimizerName = Literal["adamw", "muon", "sgd"]
Rule = Literal["adamw", "adamw_bfloat16", "adamw_8bit", "muon", "sgd"]
"""The update rule of a parameter group; `rule` in each group of `build_optimizer`."""
_MOMENTS: dict[Rule, torch.dtype | None] = {
    "adamw": None,  # the parameters' dtype
    "adamw_bfloat16": torch.bfloat16,
    "adamw_8bit": torch.uint8,
}


class Muon(torch.optim.Optimizer):
    """Holds the state of Muon, for the first group of parameters, and of AdamW, for the others.

    Its steps are taken by `update_shards`.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})


@dataclass(frozen=True, slots=True)
class OptimizerOptions:
    name: OptimizerName
    lr: float
    weight_decay: float
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    eps: float = 1e-8  # of AdamW
    momentum: float = 0.0  # of Muon and SGD
    adamw_lr_ratio: float = 1.0  # with Muon: AdamW's learning rate / Muon's learning rate
    # dtype of AdamW's moments: bfloat16 with stochastic rounding, or uint8 for codes with a scale per block; None means
    # the parameters' dtype
    state_dtype: torch.dtype | None = None
    seed: int = 0  # seed of stochastic rounding


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    options: OptimizerOptions,
    *,
    undecayed: Collection[str] = (),
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Returns AdamW, Muon together with AdamW, or SGD; all optimiser state is allocated as zeros.

    Args:
        named_parameters: the trained parameters.
        undecayed: names of the parameters without weight decay.
        matrices: names of the parameters that Muon updates; AdamW updates the others.
    """
    everything = list(named_parameters)
    is_muon = options.name == "muon"
    orthogonalized = [parameter for name, parameter in everything if is_muon and name in matrices]
    named = [(name, parameter) for name, parameter in everything if not is_muon or name not in matrices]
    rules: dict[nn.Parameter, Rule] = {
        p: "sgd" if options.name == "sgd" else _adamw_rule(p, options.state_dtype) for _, p in named
    }
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in named if rules[p] == rule and (name not in undecayed) == decays],
            "rule": rule,
            "weight_decay": options.weight_decay if decays else 0.0,
            "decays": decays,
            "lr_ratio": options.adamw_lr_ratio if is_muon else 1.0,
        }
        for decays in (True, False)
        for rule in sorted(set(rules.values()))
    ]
    # the name of each parameter, and the index of this rank's first element in the whole parameter
    name_and_offset = {p: (name, local_block(p).rows[0] * math.prod(p.shape[1:])) for name, p in named}
    for group in groups:
        if group["rule"] == "adamw_bfloat16":
            group |= {"rounding_seed": options.seed, "places": name_and_offset}
    lr, betas, eps = options.lr, options.betas, options.eps
    # the state is allocated now, not in the first step, so that it can always be saved and loaded
    optimizer: torch.optim.Optimizer
    if options.name == "sgd":
        # torch has no fused SGD for sharded parameters
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=options.momentum, foreach=True)
        _add_momentum(optimizer, [parameter for _, parameter in named])
        return optimizer
    if options.name == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    else:
        adamw_settings = {"lr": lr * options.adamw_lr_ratio, "betas": betas, "eps": eps}
        adamw_settings |= {"fused": True, "foreach": False}
        muon_settings = {
            "rule": "muon",
            "weight_decay": options.weight_decay,
            "decays": True,
            "lr_ratio": 1.0,
            "lr": lr,
        }
        muon_settings["momentum"] = options.momentum
        optimizer = Muon([{"params": orthogonalized, **muon_settings}, *(group | adamw_settings for group in groups)])
        _add_momentum(optimizer, orthogonalized)
    # the fused kernel reads the step counts on the device
    _add_moments(optimizer, rules, everything[0][1].device)
    return optimizer


def _adamw_rule(parameter: nn.Parameter, state_dtype: torch.dtype | None) -> Rule:
    """Returns the AdamW rule of a parameter: plain AdamW if 8-bit state is set but no block size fits the parameter."""
    if state_dtype == torch.uint8:
        return "adamw" if block_of(parameter.shape) is None else "adamw_8bit"
    return "adamw" if state_dtype is None else "adamw_bfloat16"


def _add_momentum(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _add_moments(optimizer: torch.optim.Optimizer, rules: Mapping[nn.Parameter, Rule], steps_on: torch.device) -> None:
    """Adds AdamW's state, filled with zeros: both moments, scales of 8-bit blocks, and the step count."""
    steps = torch.zeros(len(rules), dtype=torch.float32, device=steps_on)
    for (parameter, rule), step in zip(rules.items(), steps, strict=True):
        state = optimizer.state[parameter]
        state["step"] = step
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = torch.zeros_like(parameter, dtype=_MOMENTS[rule])
            if rule == "adamw_8bit":
                state[f"{key}_scale"] = _scales_of(parameter)


@torch.no_grad()
def update_shards(optimizer: torch.optim.Optimizer, ranks: dist.ProcessGroup | None = None, *, update: int = 0) -> None:
    """Takes one step of an optimiser from `build_optimizer`; each rank updates its local shards as plain tensors.

    For AdamW and SGD the result equals that of torch's `step()`, because both are elementwise. torch's `step()` works
    on DTensors, and spends time on the placement of every operand. Muon uses collectives.

    Args:
        ranks: all ranks; None is allowed for a single process, and without Muon.
        update: the update's number, counted from 0; seeds the stochastic rounding of bfloat16 moments.
    """
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state[parameter] for parameter in trained]
        rule: Rule = group["rule"]
        match rule:
            case "muon":
                update_matrices(
                    trained,
                    [state["momentum_buffer"] for state in states],
                    ranks,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    momentum=group["momentum"],
                )
            case "sgd":
                _update_sgd(trained, states, group)
            case "adamw":
                _update_adamw(trained, states, group)
            case "adamw_bfloat16":
                names_and_offsets = [group["places"][parameter] for parameter in trained]
                rounded = [
                    RoundedState(*shards, *name_and_offset)
                    for shards, name_and_offset in zip(_adamw_shards(trained, states), names_and_offsets, strict=True)
                ]
                update_rounded(rounded, seed=group["rounding_seed"], update=update, **_adamw_settings(group))
            case "adamw_8bit":
                quantized = [
                    QuantizedState(*shards, local_shard(state["exp_avg_scale"]), local_shard(state["exp_avg_sq_scale"]))
                    for shards, state in zip(_adamw_shards(trained, states), states, strict=True)
                ]
                update_quantized(quantized, **_adamw_settings(group))
            case _:
                assert_never(rule)


def _update_sgd(
    trained: Sequence[nn.Parameter], states: Sequence[dict[str, torch.Tensor]], group: dict[str, Any]
) -> None:
    sgd(
        [local_shard(parameter) for parameter in trained],
        [local_shard(_gradient(parameter)) for parameter in trained],
        [local_shard(state["momentum_buffer"]) for state in states],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=0.0,
        nesterov=False,
        maximize=False,
        foreach=group["foreach"],
        fused=group["fused"],
    )


def _update_adamw(
    trained: Sequence[nn.Parameter], states: Sequence[dict[str, torch.Tensor]], group: dict[str, Any]
) -> None:
    shards = _adamw_shards(trained, states)
    parameters, gradients, exp_avgs, exp_avg_sqs, steps = ([tensors[i] for tensors in shards] for i in range(5))
    settings = _adamw_settings(group)
    adamw(parameters, gradients, exp_avgs, exp_avg_sqs, [], steps, amsgrad=False, maximize=False, **settings)


def _adamw_shards(
    trained: Sequence[nn.Parameter], states: Sequence[dict[str, torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Returns (parameter, gradient, first moment, second moment, step count) for each parameter, as local shards."""
    return [
        (
            local_shard(parameter),
            local_shard(_gradient(parameter)),
            local_shard(state["exp_avg"]),
            local_shard(state["exp_avg_sq"]),
            state["step"],
        )
        for parameter, state in zip(trained, states, strict=True)
    ]


def _adamw_settings(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "foreach", "fused")}
    return settings | {"beta1": beta1, "beta2": beta2}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def _scales_of(parameter: nn.Parameter) -> torch.Tensor:
    """Returns float32 zeros, [rows of dim 0, blocks of a row], sharded over rows like the parameter."""
    block = block_of(parameter.shape)
    assert block is not None
    blocks = math.prod(parameter.shape[1:]) // block
    return torch.zeros_like(parameter.detach().flatten(1)[:, :blocks], dtype=torch.float32)


def undecayed_names(model: nn.Module) -> set[str]:
    """Returns the names of parameters without weight decay: vectors, biases and embeddings, including a tied head.

    Vectors are norms, attention sinks and most biases. The biases of experts are matrices, and recognised by name.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or name.endswith("bias") or id(parameter) in embeddings
    }


def matrix_names(model: nn.Module, layers: nn.Module) -> set[str]:
    """Returns the names of the parameters that Muon updates: matrices of decoder layers, also of experts and adapters.

    Args:
        layers: the module that holds the model's decoder layers, but not embeddings and head.
    """
    inside = {id(parameter) for parameter in layers.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in inside} - undecayed_names(model)
