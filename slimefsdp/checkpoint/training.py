"""What a rank's training state is made of: named shards of parameters and optimiser moments, and its generators."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.checkpoint.sharded import ShardedTensor


def training_tensors(
    named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[str, ShardedTensor]:
    """This rank's rows of every parameter (`model.*`) and optimiser tensor (`optimizer.*`), as views."""
    tensors: dict[str, ShardedTensor] = {}
    for name, parameter in named:
        tensors[f"model.{name}"] = _shard(parameter)
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = _shard(value)
    return tensors


def generator_state(device: torch.device) -> dict[str, Any]:
    """The torch generators of this rank as JSON."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in states.items()}


def restore_generators(saved: dict[str, Any], device: torch.device) -> None:
    """The inverse of `generator_state`."""
    states = {
        name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()
    }
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _shard(tensor: torch.Tensor) -> ShardedTensor:
    if not isinstance(tensor, DTensor):
        return ShardedTensor(tensor.detach(), tuple(tensor.shape), 0)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return ShardedTensor(tensor.to_local().detach(), tuple(tensor.shape), offset[0])
