"""A run's training state on disk and back: shards of parameters and optimiser moments, and each rank's generators."""

from __future__ import annotations

import base64
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.checkpoint.atomic import CheckpointStore
from slimefsdp.checkpoint.sharded import ShardedTensor, read_rank_state, read_shard, write_shard, writing_ranks
from slimefsdp.errors import CheckpointError
from slimefsdp.parallel.agree import run_on_first, run_together

Named = Sequence[tuple[str, nn.Parameter]]
NamedFor = Callable[[dict[str, Any]], Named]  # from a checkpoint's info to the parameters it holds


def save_training_state(
    store: CheckpointStore,
    step: int,
    named: Named,
    optimizer: torch.optim.Optimizer,
    info: dict[str, Any],
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    keep_last: int,
    writes_tensors: bool,
) -> Path:
    """Collective: commits a checkpoint of `step`, whole or not at all, and removes old ones; returns its folder.

    No parameter is gathered: each rank writes the rows it holds.

    Args:
        info: JSON about the run, the same on every rank.
        writes_tensors: of all ranks that hold the same rows, one; the others write their generators alone.

    Raises:
        CheckpointError: on every rank, when any rank could not write; the earlier checkpoints stand.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step={step!r} is not a step", field="step", hint="count steps from 0")
    run_on_first(lambda: store.begin(step), group)
    tensors = _tensors(named, optimizer) if writes_tensors else {}
    own = {"generators": _generators(device)}
    folder, rank = store.temporary_path(step), dist.get_rank(group)
    run_together(lambda: write_shard(folder, rank, tensors, own), group)

    def commit() -> None:
        if (found := writing_ranks(folder)) != dist.get_world_size(group):
            raise CheckpointError(
                f"{folder} received the files of {found} ranks out of {dist.get_world_size(group)}",
                field="run.dir",
                hint="put run.dir on a file system that all nodes share",
            )
        store.commit(step, info)
        store.prune(keep_last)

    run_on_first(commit, group)
    return store.path_of(step)


def load_training_state(
    store: CheckpointStore,
    step: int | Literal["latest"],
    named_for: NamedFor,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Collective: verifies a checkpoint, fills parameters and optimiser from it, and returns its `info`.

    Args:
        named_for: the parameters that a checkpoint with this `info` holds.

    Any number of ranks may have written it. Generators are restored where the number is this run's.

    Raises:
        CheckpointError: on every rank; there is none, or it is torn, altered or of another model.
    """
    chosen: list[tuple[Path, dict[str, Any]] | None] = [None]

    def choose() -> None:
        if step == "latest":
            _, folder, skipped = store.newest_verified()
            for reason in skipped:
                warnings.warn(f"checkpoint passed over: {reason}", stacklevel=2)
        else:
            folder = store.path_of(step)
        chosen[0] = folder, store.verify(folder).info

    run_on_first(choose, group)
    dist.broadcast_object_list(chosen, group_src=0, group=group)
    assert chosen[0] is not None
    folder, info = chosen[0]
    named = named_for(info)

    def read() -> None:
        read_shard(folder, _tensors(named, optimizer))
        state = read_rank_state(folder, dist.get_rank(group))
        if state is not None and writing_ranks(folder) == dist.get_world_size(group):
            _restore_generators(state["generators"], device)

    run_together(read, group)
    return info


def _tensors(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, ShardedTensor]:
    """This rank's rows of every parameter (`model.*`) and optimiser tensor (`optimizer.*`), as views."""
    tensors: dict[str, ShardedTensor] = {}
    for name, parameter in named:
        tensors[f"model.{name}"] = _shard(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{name}.{key}"] = _shard(value)
    return tensors


def _generators(device: torch.device) -> dict[str, Any]:
    """The torch generators of this rank as JSON."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in states.items()}


def _restore_generators(saved: dict[str, Any], device: torch.device) -> None:
    """The inverse of `_generators`."""
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
