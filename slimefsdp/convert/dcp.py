"""Tensors out of and into torch.distributed.checkpoint folders, one at a time, in one process without a group."""

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
from slimefsdp.io.atomic_dir import new_folder
from slimefsdp.io.checksummed_files import io_reported
from slimefsdp.io.safetensors_file import TensorSpec


def read_saved(saved: SavedTensor) -> torch.Tensor:
    """A whole tensor of a folder; its memory and that of one chunk are needed.

    Raises:
        CheckpointError: naming file and tensor: missing, torn, or not what the folder's metadata says.
    """
    if len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.shape:
        return _chunk(saved, saved.chunks[0])
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    for chunk in saved.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box].copy_(_chunk(saved, chunk))
    return whole


def write_dcp_folder(path: Path, specs: Sequence[TensorSpec], read: Callable[[str], torch.Tensor]) -> None:
    """A folder that `torch.distributed.checkpoint.load` opens on any number of ranks; whole or absent.

    Args:
        specs: what it will hold; the names are its keys.
        read: gives a tensor when it is written; the next is asked for after that.

    Raises:
        CheckpointError: `path` is taken, or the disk refused. What `read` raises.
    """
    announced = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
    with new_folder(path) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # which is what is meant
        try:
            save(announced, storage_writer=FileSystemWriter(folder), planner=_ReadWhenWritten(read), no_dist=True)
        except CheckpointException as failed:  # no Exception, and it hides what was raised
            error = next(iter(failed.failures.values()))[0]
            raise error if isinstance(error, SlimeError | OSError) else RuntimeError(str(error)) from error


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans with tensors that have no memory, and gets each one when its turn has come."""

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of a key."""
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
        found, wanted = f"{tensor.dtype} {list(tensor.shape)}", f"{saved.dtype} {list(chunk.sizes)}"
        raise refused(f"is {found} there, and {wanted} by the folder's metadata")
    return tensor.resolve_conj().resolve_neg()  # a view's sign is in no byte of its memory
