"""Saves and loads training state: shards of parameters and optimiser moments, and each rank's random generators.

A save may run during training: a thread copies the rank's state before training changes it, and writes the copy.
"""

from __future__ import annotations

import base64
import random
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from slimefsdp import heartbeat
from slimefsdp.checkpoint.manifest import Manifest, check_files
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
from slimefsdp.distributed.collectives import from_first, gathered, run_on_first, run_together
from slimefsdp.distributed.mesh import local_block, local_shard
from slimefsdp.errors import CheckpointError, PeerFailed, ResourceError, SlimeError
from slimefsdp.io.files import FileRecord, io_reported

Named = Sequence[tuple[str, nn.Parameter]]
_T = TypeVar("_T")


def choose_checkpoint(store: CheckpointStore, step: int | Literal["latest"], group: dist.ProcessGroup) -> Choice:
    """Collective: returns the first checkpoint that is whole; each rank verifies a share of the bytes.

    The number of ranks that wrote the checkpoint does not matter.

    Returns:
        The checkpoint; for a `PartStore` its part of the checkpoint. If the checkpoint lacks this part, the result is
        the checkpoint of the same step in `PartStore.before`, or if that is None, the checkpoint itself.

    Raises:
        CheckpointError: there is no checkpoint, or the checkpoint of this step is incomplete or altered; raised on
            every rank.
    """
    folders, odd = from_first(lambda: store.candidates(step), group)
    verify = partial(_verified_together, store, group)
    if step == "latest":  # all parts are verified, so that all groups of ranks choose the same checkpoint
        manifest, folder, skipped = first_verified(store.root, folders, odd, verify)
    else:
        manifest, folder, skipped = verify(folders[0], only_part=store.part), folders[0], []
    if store.part in manifest.parts:
        folder = folder / str(store.part)
        return Choice(from_first(lambda: store.manifest_of(folder), group), folder, skipped)
    if (before := store.before) is not None:
        folder = from_first(lambda: before.path_of(manifest.step), group)
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
    """Collective: fills parameters, optimiser and random generators from a verified checkpoint.

    Args:
        named: the parameters to fill; the checkpoint must hold exactly these.
        restores_generators: whether to restore the random generators; the saving run must have had the same mesh.

    Returns:
        The number of ranks that wrote the checkpoint.

    Raises:
        CheckpointError: the checkpoint belongs to another model; raised on every rank. No value has changed, unless the
            disk failed while values were read.
    """
    folder = chosen.folder

    def plan() -> tuple[Reads, dict[str, Any], int]:
        reads = plan_reads(folder, tensors_of(named, optimizer))
        state = read_rank_state(folder, dist.get_rank(group)) or {}
        if restores_generators:  # tried before anything is changed, and undone
            present = generator_states(device)
            try:
                restore_generators(state.get("generators"), device, folder)
            finally:
                restore_generators(present, device, folder)
        return reads, state, writing_ranks(folder)

    def read() -> None:
        fill(reads)
        if restores_generators:
            restore_generators(state.get("generators"), device, folder)

    reads, state, writers = run_together(plan, group)
    run_together(read, group)
    return writers


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
    """Collective: commits a checkpoint completely or not at all, and removes old checkpoints.

    Args:
        tensors: this rank's rows; if several ranks hold the same rows, only one of these ranks passes them.
        state: this rank's state, such as its random generators, as plain JSON.
        info: JSON about the run, the same on every rank.
        parts: names of the parts of this step that other groups of ranks have written; they become parts of this
            checkpoint.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: some rank could not write; raised on every rank. Nothing of the attempt is left on the disk,
            and earlier checkpoints stay.
    """
    folder, rank = store.temporary_path(step), dist.get_rank(group)
    run_on_first(lambda: store.begin(step, parts), group)

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
        records = run_together(lambda: write_shard(folder, rank, tensors, state), group)
        files = [record for of_rank in gathered(records, group) for record in of_rank]
        run_on_first(lambda: commit(files), group)
    except CheckpointError:  # raised on all ranks, so no rank is still writing
        run_on_first(lambda: store.abandon(step), group)
        raise
    except Exception:  # a rank may have died, so no collective may follow
        if rank == 0:
            store.abandon(step)
        raise
    return store.final_path(step)


def _verified_together(
    store: CheckpointStore, group: dist.ProcessGroup, folder: Path, only_part: str | None = None
) -> Manifest:
    """Rereads every byte of a folder, divided over the ranks.

    Every rank returns the manifest or raises the same error.
    """
    manifest = from_first(lambda: store.manifest_of(folder), group)
    only_part = only_part if only_part in manifest.parts else None

    def check() -> None:
        with io_reported(folder, "load"):
            check_files(
                folder, manifest, share=dist.get_rank(group), shares=dist.get_world_size(group), only_part=only_part
            )

    run_together(check, group)
    return manifest


def tensors_of(named: Named, optimizer: torch.optim.Optimizer | None) -> dict[str, ShardedTensor]:
    """Returns this rank's rows of every parameter (`model.*`) and optimiser tensor (`optimizer.*`), as views."""

    def shard(tensor: torch.Tensor) -> ShardedTensor:
        start = (*local_block(tensor).start, 0, 0)  # a 0-d tensor has no dimensions
        return ShardedTensor(local_shard(tensor).detach(), tuple(tensor.shape), start[0], start[1])

    tensors: dict[str, ShardedTensor] = {}
    for name, parameter in named:
        tensors[f"model.{name}"] = shard(parameter)
        for key, value in ({} if optimizer is None else optimizer.state.get(parameter, {})).items():
            tensors[f"optimizer.{name}.{key}"] = shard(value)
    return tensors


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
        CheckpointError: `states` did not come from `generator_states`; the error names `source`.
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


# ---------------------------------------------------------------------- saves during training


class BackgroundSave:
    """Runs one save at a time on one rank; every rank makes the same calls.

    The thread is not a daemon, so a process that ends without `finish` still waits for its save.

    Args:
        group: all ranks, over gloo. Nothing else uses it, so the thread's collectives never mix with training's.
        pin_memory: whether to page-lock the host buffers, for faster copies from CUDA.
    """

    def __init__(self, group: dist.ProcessGroup, *, pin_memory: bool = False) -> None:
        self.group = group
        self._pin_memory = pin_memory
        self._buffers: dict[str, torch.Tensor] = {}  # reused, because page faults in new memory cost more than copying
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self._running: Future[Path] | None = None
        self.is_lost = False  # the ranks' collectives no longer match, so no further save is possible
        self._is_copied = threading.Event()  # set while the thread reads no tensor that training changes
        self._is_copied.set()
        self._moment: torch.cuda.Event | None = None  # recorded by `start`, after the device work before it

    def buffers_for(self, tensors: Mapping[str, ShardedTensor]) -> dict[str, ShardedTensor]:
        """Returns tensors of the same shapes in host memory; the next call returns the same memory again.

        Raises:
            ResourceError: the host has too little memory.
        """
        assert self._running is None
        for name in self._buffers.keys() - tensors.keys():
            del self._buffers[name]
        return {name: replace(tensor, local=self._buffer(name, tensor.local)) for name, tensor in tensors.items()}

    @property
    def host_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def start(self, write: Callable[[], Path]) -> None:
        """Runs `write` in the thread.

        `write` must call `copy` first. `finish` returns its result or raises its error.
        """
        assert self._running is None
        if torch.cuda.is_initialized():
            self._moment = torch.cuda.Event()
            self._moment.record()
        self._is_copied.clear()
        try:
            self._running = self._thread.submit(heartbeat.aside()(write))
        except BaseException:
            self._is_copied.set()
            raise
        self._running.add_done_callback(_report_failure)

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, ShardedTensor], buffers: Mapping[str, ShardedTensor]) -> None:
        """Copies the values that the tensors had at `start` to the buffers; called in the thread."""
        try:
            device = next((t.local.device for t in tensors.values() if t.local.device.type == "cuda"), None)
            side = None if device is None else torch.cuda.Stream(device)
            with torch.cuda.stream(side):  # None has no effect
                if side is not None and self._moment is not None:
                    side.wait_event(self._moment)
                for name, tensor in tensors.items():
                    buffers[name].local.copy_(tensor.local, non_blocking=True)
            if side is not None:
                side.synchronize()
        finally:
            self._is_copied.set()

    def wait_for_copy(self) -> None:
        """Waits until the state is copied; must be called before the state is changed, moved or freed."""
        self._is_copied.wait()

    def finish(self) -> Path | None:
        """Waits for the running save and returns its result; None if no save runs.

        Raises:
            PeerFailed: the ranks did not finish the save together. Other errors are those of `write`.
        """
        running, self._running = self._running, None
        try:
            with heartbeat.joined():
                return None if running is None else running.result()
        except SlimeError:
            raise
        except Exception as error:
            self.is_lost = True
            raise PeerFailed(
                f"the save in the background did not end: {error}",
                field="checkpoint.async_save",
                hint="look at what ended another rank or delayed its disk, then start the group again",
            ) from error

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            try:
                buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=self._pin_memory)
            except RuntimeError as error:
                raise ResourceError(
                    f"there is no host memory for a copy of {name} ({like.nbytes} bytes): {error}",
                    field="checkpoint.async_save",
                    hint="set checkpoint.async_save=false, or spread the state over more ranks",
                ) from error
            self._buffers[name] = buffer
        return buffer


def _report_failure(save: Future[Path]) -> None:
    """Warns of a failed save at once, because a process that ends without `finish` would not report the error."""
    if (error := save.exception()) is not None:
        warnings.warn(f"the save in the background failed: {error}", stacklevel=2)
