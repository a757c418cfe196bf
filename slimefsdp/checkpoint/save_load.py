"""Saves and loads training state: shards of parameters and optimiser moments, and each rank's random generators."""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.checkpoint.manifest import FileRecord, Manifest, check_files
from slimefsdp.checkpoint.shards import (
    Reads,
    ShardedTensor,
    fill,
    plan_reads,
    read_rank_state,
    write_shard,
    writing_ranks,
)
from slimefsdp.checkpoint.store import CheckpointStore, Choice, first_verified
from slimefsdp.distributed.consensus import gathered, run_on_first, run_together
from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported

Named = Sequence[tuple[str, nn.Parameter]]
_T = TypeVar("_T")


def choose_checkpoint(store: CheckpointStore, step: int | Literal["latest"], group: dist.ProcessGroup) -> Choice:
    """Verifies checkpoints, each rank a share of their bytes, until one is whole; a collective call.

    Any number of ranks may have written the checkpoint.

    Returns:
        The checkpoint, or the store's part of it. Where it has no such part, it is the checkpoint of the same step in
        `PartStore.before`, or without such a store the checkpoint that lacks the part.

    Raises:
        CheckpointError: on every rank: there is no checkpoint, or it is torn or altered.
    """
    folders, odd = _from_first(lambda: store.candidates(step), group)
    verify = partial(_verified_together, store, group)
    if step == "latest":  # with all parts, so that all groups of ranks choose the same
        manifest, folder, skipped = first_verified(store.root, folders, odd, verify)
    else:
        manifest, folder, skipped = verify(folders[0], only_part=store.part), folders[0], []
    if store.part in manifest.parts:
        folder = folder / str(store.part)
        return Choice(_from_first(lambda: store.manifest_of(folder), group), folder, skipped)
    if (before := store.before) is not None:
        folder = _from_first(lambda: before.path_of(manifest.step), group)
        return Choice(_verified_together(before, group, folder), folder, skipped)
    return Choice(manifest, folder, skipped)


def load_training_state(
    chosen: Choice,
    named: Named,
    optimizer: torch.optim.Optimizer | None,
    *,
    device: torch.device,
    group: dist.ProcessGroup,
    restores_generators: bool,
) -> int:
    """Fills parameters, optimiser and random generators from a verified checkpoint; a collective call.

    Args:
        named: the parameters that the checkpoint holds.
        restores_generators: the random generators in the checkpoint belong to these ranks.

    Returns:
        How many ranks wrote the checkpoint.

    Raises:
        CheckpointError: on every rank: it is of another model. No value has changed, unless the disk failed while
            values were read.
    """
    folder = chosen.folder
    reads: Reads = []
    state: dict[str, Any] = {}
    writers: list[int] = []

    def plan() -> None:
        reads.extend(plan_reads(folder, tensors_of(named, optimizer)))
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
    return writers[0]


def write_checkpoint(
    store: CheckpointStore,
    step: int,
    tensors: dict[str, ShardedTensor],
    state: dict[str, Any],
    info: dict[str, Any],
    *,
    parts: Sequence[str],
    keep_last: int,
    group: dist.ProcessGroup,
) -> Path:
    """Commits a checkpoint, completely or not at all, and removes old ones; a collective call.

    Args:
        tensors: this rank's rows, on one of the ranks that hold the same ones.
        state: of this rank, plain JSON.
        info: JSON about the run, the same on every rank.
        parts: parts of this step that other groups of ranks have written, which the checkpoint takes in.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: on every rank, if any rank could not write. Nothing of the attempt is left on the disk, and
            earlier checkpoints stay.
    """
    folder, rank = store.temporary_path(step), dist.get_rank(group)
    run_on_first(lambda: store.begin(step, parts), group)

    records: list[FileRecord] = []

    def commit(files: list[FileRecord]) -> None:
        if absent := [record.name for record in files if not (folder / record.name).exists()]:
            raise CheckpointError(
                f"{folder} did not receive {absent[0]}, which another rank has written",
                field="run.dir",
                hint="put run.dir on a file system that all nodes share",
            )
        store.commit(step, info, files)
        store.prune(keep_last)

    try:
        run_together(lambda: records.extend(write_shard(folder, rank, tensors, state)), group)
        files = [record for of_rank in gathered(records, group) for record in of_rank]
        run_on_first(lambda: commit(files), group)
    except CheckpointError:  # which all ranks raise, so nobody writes there any more
        run_on_first(lambda: store.abandon(step), group)
        raise
    except Exception:  # alike, or because a rank is gone, which no collective should follow
        if rank == 0:
            store.abandon(step)
        raise
    return store.final_path(step)


def _verified_together(
    store: CheckpointStore, group: dist.ProcessGroup, folder: Path, only_part: str | None = None
) -> Manifest:
    """Has the ranks together reread every byte of a folder; all return its manifest or raise the same error."""
    manifest = _from_first(lambda: store.manifest_of(folder), group)
    only_part = only_part if only_part in manifest.parts else None

    def check() -> None:
        with io_reported(folder, "load"):
            check_files(
                folder, manifest, share=dist.get_rank(group), shares=dist.get_world_size(group), only_part=only_part
            )

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


def tensors_of(named: Named, optimizer: torch.optim.Optimizer | None) -> dict[str, ShardedTensor]:
    """Returns this rank's rows of every parameter (`model.*`) and optimiser tensor (`optimizer.*`), as views."""
    tensors: dict[str, ShardedTensor] = {}
    for name, parameter in named:
        start = _first_row(parameter)
        tensors[f"model.{name}"] = _shard(parameter, start)
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
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
