"""Reads and writes tensors of torch.distributed.checkpoint folders, one at a time and without a process group."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from slimefsdp.convert.dcp_metadata import Chunk, SavedTensor
from slimefsdp.errors import CheckpointError, SlimeError, short_repr
from slimefsdp.io.files import io_reported, new_folder
from slimefsdp.io.safetensors_file import TensorSpec


def read_saved(saved: SavedTensor) -> torch.Tensor:
    """Reads a whole tensor of a folder, with the memory of the tensor and one chunk.

    Raises:
        CheckpointError: a chunk is missing, truncated or not as the metadata says; names the file and the tensor.
    """
    if len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.shape:
        return _chunk(saved, saved.chunks[0])
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    for chunk in saved.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box].copy_(_chunk(saved, chunk))
    return whole


def write_dcp_folder(path: Path, specs: Sequence[TensorSpec], read: Callable[[str], torch.Tensor]) -> None:
    """Atomically writes a folder that `torch.distributed.checkpoint.load` can read on any number of ranks.

    Args:
        specs: the tensors to write; the names are the keys.
        read: returns a tensor by its name; it is called when the previous one was written.

    Raises:
        CheckpointError: `path` is taken, or the disk is full or fails. The errors of `read`.
    """
    announced = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
    with new_folder(path) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # this is intended
        try:
            save(announced, storage_writer=FileSystemWriter(folder), planner=_ReadWhenWritten(read), no_dist=True)
        except CheckpointException as failed:  # not a subclass of Exception, and it wraps the real error
            error = next(iter(failed.failures.values()))[0]
            raise error if isinstance(error, SlimeError | OSError) else RuntimeError(str(error)) from error


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans with tensors without memory, and reads each one when it is written."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def _chunk(saved: SavedTensor, chunk: Chunk) -> torch.Tensor:
    def refused(problem: str) -> CheckpointError:
        message = f"{chunk.file}: tensor {saved.name!r:.200} {problem}"
        return CheckpointError(message, field="path", hint="copy the folder again, whole", call="load")

    if chunk.file.exists() and not chunk.file.is_file():  # a pipe would block
        raise refused("lies in no plain file")
    with io_reported(chunk.file, "load"), chunk.file.open("rb") as stream:
        if chunk.start + chunk.nbytes > os.fstat(stream.fileno()).st_size:
            raise refused(f"lies beyond the file's end, at bytes {chunk.start} to {chunk.start + chunk.nbytes}")
        try:
            section = _create_file_view(stream, chunk.start, chunk.nbytes)
            tensor = torch.load(section, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:  # the bytes can be anything
            raise refused(f"cannot be read: {type(error).__name__}: {short_repr(str(error))}") from error
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise refused(f"is a {type(tensor).__name__}, not a plain tensor")
    if (tensor.dtype, tuple(tensor.shape)) != (saved.dtype, chunk.sizes):
        actual, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{saved.dtype} {list(chunk.sizes)}"
        raise refused(f"is {actual} there, and {wanted} by the folder's metadata")
    return tensor.resolve_conj().resolve_neg()  # a view's lazy conjugation or negation is not in its memory
