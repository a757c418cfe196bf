"""Saves and loads training state: shards of parameters and optimiser moments, and each rank's random generators."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.checkpoint.async_save import BackgroundSave
from slimefsdp.checkpoint.manifest import MANIFEST, Manifest, check_files
from slimefsdp.checkpoint.shards import (
    Reads,
    ShardedTensor,
    fill,
    plan_reads,
    read_rank_state,
    write_shard,
    writing_ranks,
)
from slimefsdp.checkpoint.store import CheckpointStore, first_verified
from slimefsdp.distributed.consensus import run_on_first, run_together
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported, json_bytes

Named = Sequence[tuple[str, nn.Parameter]]
# from a checkpoint's info and manifest file to the parameters it holds; an error refuses the checkpoint
Accept = Callable[[dict[str, Any], Path], Named]
_T = TypeVar("_T")


@dataclass(frozen=True)
class LoadedState:
    """The checkpoint that a load took its values from."""

    step: int
    folder: Path
    info: dict[str, Any]
    skipped: tuple[str, ...]  # why each checkpoint that comes before it was skipped
    ranks: int  # how many ranks wrote it


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
    background: BackgroundSave | None = None,
) -> Path:
    """Commits a checkpoint of `step`, completely or not at all, and removes old ones; a collective call.

    No parameter is gathered: each rank writes the rows it holds.

    Args:
        info: JSON about the run, the same on every rank.
        writes_tensors: true on one of the ranks that hold the same rows; the others write only their generators.
        background: copies the state and writes it later. Its `finish` must have returned since its last save, and the
            caller waits for its copy before it changes tensors.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any rank could not write; earlier checkpoints stay. With `background`, its
            `finish` raises the errors of writing.
        ResourceError: on every rank, if any has no memory for the copy.
    """

    def prepare() -> None:
        if type(step) is not int or not 0 <= step < 2**62:
            raise CheckpointError(f"step={step!r} is not a step", field="step", hint="count steps from 0")
        json_bytes(info, "info")
        if background is not None and background.is_lost:
            raise CheckpointError(
                "no save in the background can follow one that ranks did not end together",
                field="checkpoint.async_save",
                hint="start the group anew and load, or save with checkpoint.async_save=false",
            )
        if dist.get_rank(group) == 0:
            store.lock()

    run_together(prepare, group)
    tensors = _tensors(named, optimizer) if writes_tensors else {}
    state = {"generators": generator_states(device)}
    if background is None:
        return _write(store, step, tensors, state, info, group=group, keep_last=keep_last)
    copies: dict[str, ShardedTensor] = {}
    run_together(lambda: copies.update(background.buffers_for(tensors)), group)
    info = json.loads(json_bytes(info, "info"))  # the caller may change its own

    def copy_and_write() -> Path:
        run_together(lambda: background.copy(tensors, copies), background.group)
        return _write(store, step, copies, state, info, group=background.group, keep_last=keep_last)

    background.start(copy_and_write)
    return store.final_path(step)


def load_training_state(
    store: CheckpointStore,
    step: int | Literal["latest"],
    accept: Accept,
    optimizer: torch.optim.Optimizer,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    with_generators: Callable[[dict[str, Any]], bool],
) -> LoadedState:
    """Verifies a checkpoint, each rank a part of it, and fills parameters and optimiser; a collective call.

    Any number of ranks may have written the checkpoint.

    Args:
        accept: refuses a checkpoint that is not for this run; a collective call with the same outcome on all ranks.
        with_generators: whether the random generators of a checkpoint with this info belong to these ranks.

    Raises:
        CheckpointError: on every rank: there is no checkpoint, or it is torn, altered or of another model. No value has
            changed, unless the disk failed while values were read.
    """
    folders, odd = _from_first(lambda: store.candidates(step), group)
    verify = partial(_verified_together, store, group)
    if step == "latest":
        manifest, folder, skipped = first_verified(store.root, folders, odd, verify)
    else:
        manifest, folder, skipped = verify(folders[0]), folders[0], []
    named = accept(manifest.info, folder / MANIFEST)
    restores_generators = with_generators(manifest.info)
    reads: Reads = []
    state: dict[str, Any] = {}
    writers: list[int] = []

    def plan() -> None:
        reads.extend(plan_reads(folder, _tensors(named, optimizer)))
        state.update(read_rank_state(folder, dist.get_rank(group)) or {})
        if restores_generators:  # tried now, when nothing has changed, and put back
            present = generator_states(device)
            try:
                restore_generators(state.get("generators"), device, folder)
            finally:
                restore_generators(present, device, folder)
        writers.append(writing_ranks(folder))

    def read() -> None:
        fill(reads)
        if restores_generators:
            restore_generators(state.get("generators"), device, folder)

    run_together(plan, group)
    run_together(read, group)
    return LoadedState(manifest.step, folder, manifest.info, tuple(map(str, skipped)), writers[0])


def _write(
    store: CheckpointStore,
    step: int,
    tensors: dict[str, ShardedTensor],
    state: dict[str, Any],
    info: dict[str, Any],
    *,
    group: dist.ProcessGroup,
    keep_last: int,
) -> Path:
    """Runs the commit protocol; a collective call. An error leaves nothing of the attempt on the disk."""
    folder, rank = store.temporary_path(step), dist.get_rank(group)
    run_on_first(lambda: store.begin(step), group)

    def commit() -> None:
        if (found := writing_ranks(folder)) != dist.get_world_size(group):
            raise CheckpointError(
                f"{folder} received the files of {found} ranks out of {dist.get_world_size(group)}",
                field="run.dir",
                hint="put run.dir on a file system that all nodes share",
            )
        store.commit(step, info)
        store.prune(keep_last)

    try:
        run_together(lambda: write_shard(folder, rank, tensors, state), group)
        run_on_first(commit, group)
    except CheckpointError:  # which all ranks raise, so nobody writes there any more
        run_on_first(lambda: store.abandon(step), group)
        raise
    except Exception:  # alike, or because a rank is gone, which no collective should follow
        if rank == 0:
            store.abandon(step)
        raise
    return store.final_path(step)


def _verified_together(store: CheckpointStore, group: dist.ProcessGroup, folder: Path) -> Manifest:
    """Has the ranks together reread every byte of a folder; all return its manifest or raise the same error."""
    manifest = _from_first(lambda: store.manifest_of(folder), group)

    def check() -> None:
        with io_reported(folder, "load"):
            check_files(folder, manifest, share=dist.get_rank(group), shares=dist.get_world_size(group))

    run_together(check, group)
    return manifest


def _from_first(action: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Runs `action` on rank 0; every rank returns its result or raises its error."""
    results: list[Any] = []
    run_on_first(lambda: results.append(action()), group)
    results = results or [None]
    dist.broadcast_object_list(results, group_src=0, group=group)
    result: _T = results[0]
    return result


def _tensors(named: Named, optimizer: torch.optim.Optimizer) -> dict[str, ShardedTensor]:
    """This rank's rows of every parameter (`model.*`) and optimiser tensor (`optimizer.*`), as views."""
    tensors: dict[str, ShardedTensor] = {}
    for name, parameter in named:
        start = _first_row(parameter)
        tensors[f"model.{name}"] = _shard(parameter, start)
        for key, value in optimizer.state.get(parameter, {}).items():
            # what is sharded there is sharded as the parameter is
            tensors[f"optimizer.{name}.{key}"] = _shard(value, start if isinstance(value, DTensor) else 0)
    return tensors


def _shard(tensor: torch.Tensor, start: int) -> ShardedTensor:
    return ShardedTensor(local_shard(tensor).detach(), tuple(tensor.shape), start)


def _first_row(parameter: nn.Parameter) -> int:
    """The first row of dim 0 that this rank holds."""
    if not isinstance(parameter, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0]


# ---------------------------------------------------------------------- random generators


def generator_states(device: torch.device) -> dict[str, Any]:
    """Returns the states of this process's global random generators as JSON."""
    version, numbers, next_gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "cpu": _text(torch.get_rng_state().numpy()),
        "python": [version, _text(np.array(numbers, dtype=np.uint32)), next_gauss],
        "numpy": [name, _text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
    }
    if device.type == "cuda":
        states["cuda"] = _text(torch.cuda.get_rng_state(device).numpy())
    return states


def restore_generators(states: Any, device: torch.device, source: Path) -> None:
    """Sets the global random generators to saved states; a generator without a saved state stays as it is.

    Raises:
        CheckpointError: naming `source`: `states` did not come from `generator_states`.
    """
    try:
        torch.set_rng_state(torch.from_numpy(_array(states["cpu"], np.uint8)))
        if "python" in states:
            version, numbers, next_gauss = states["python"]
            random.setstate((version, tuple(_array(numbers, np.uint32).tolist()), next_gauss))
        if "numpy" in states:
            name, keys, position, has_gauss, cached = states["numpy"]
            np.random.set_state((name, _array(keys, np.uint32), position, has_gauss, cached))
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(torch.from_numpy(_array(states["cuda"], np.uint8)), device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"generators in {source} cannot be understood: {error!r}",
            field="generators",
            hint="load another checkpoint",
            call="load",
        ) from error


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: type[np.generic]) -> np.ndarray:
    return np.frombuffer(bytearray(base64.b64decode(text)), dtype=dtype)
