"""Reads and writes torch.distributed.checkpoint folders, a tensor at a time and without a process group.

A folder's `.metadata` is a pickle, and a pickle names functions to call. The unpickler here accepts only the names that
torch writes. It makes plain records instead of objects of torch's classes, and the content of the records is checked
before it is used.
"""

from __future__ import annotations

import math
import os
import pickle
import pickletools
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _create_file_view

from slimefsdp.errors import CheckpointError, SlimeError, short_repr
from slimefsdp.io.files import io_reported, new_folder, whole
from slimefsdp.io.safetensors_file import TensorSpec

METADATA_FILE = ".metadata"
MAX_CHUNKS = 8192  # limit per tensor, above any number of ranks, because all pairs of chunks are compared
MAX_METADATA_BYTES = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")  # stays inside of the folder


@dataclass(frozen=True, slots=True)
class Chunk:
    """Describes a box within a tensor, and the bytes of a file that hold this box in the format of `torch.save`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Describes a tensor of a folder; the chunks cover the tensor without overlap."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """Holds the tensors of a folder by key, and the keys of other entries, such as numbers and generators."""

    path: Path
    tensors: dict[str, SavedTensor]
    others: tuple[str, ...]


def read_dcp_folder(path: Path) -> DcpFolder:
    """Reads a folder's `.metadata`, without any tensor.

    Raises:
        CheckpointError: `.metadata` is missing, has names that torch does not write, or contradicts itself.
    """
    file = path / METADATA_FILE
    with io_reported(file, "load"):
        if not file.is_file() and file.exists():  # a pipe would block
            raise _refused(file, "is no plain file")
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise _refused(file, f"has more than {MAX_METADATA_BYTES} bytes")
        with file.open("rb") as stream:
            root = _unpickled(file, stream)
    try:
        entries = _checked(_state(root, "state_dict_metadata"), dict, "state_dict_metadata")
        locations = {
            (_state(index, "fqn"), _sizes(_state(index, "offset") or ())): place
            for index, place in _checked(_state(root, "storage_data"), dict, "storage_data").items()
        }
        tensors = {
            _checked(name, str, "key"): _tensor(file, name, entry, locations)
            for name, entry in entries.items()
            if isinstance(entry, _TensorRecord)
        }
    except (ValueError, TypeError, IndexError) as error:
        raise _refused(file, f"is not what torch writes: {error}") from error
    return DcpFolder(path, tensors, tuple(name for name in entries if name not in tensors))


class _Record:
    """Replaces an object of one of torch's classes in the pickle, and keeps its state."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _TensorRecord(_Record):
    """Stands for `TensorStorageMetadata` when the metadata is unpickled without torch's classes."""


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    _METADATA: [
        *("Metadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ],
    "torch.distributed._shard.sharded_tensor.metadata": ["TensorProperties", "MEM_FORMAT_ENCODING"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo", "_StoragePrefix"],
    "torch.serialization": ["_get_layout"],
    "builtins": ["getattr"],  # some releases of Python pickle enum members with getattr
    "pathlib": ["PosixPath", "WindowsPath"],
    "pathlib._local": ["PosixPath", "WindowsPath"],
}
_KNOWN: dict[tuple[str, str], Any] = {
    **{(module, name): _Record for module, names in _RECORDS.items() for name in names},
    (_METADATA, "TensorStorageMetadata"): _TensorRecord,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}


def _unpickled(file: Path, stream: BinaryIO) -> Any:
    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in _KNOWN:
                raise _refused(
                    file,
                    f"names {short_repr(f'{module}.{name}')}, which torch does not write there",
                    "do not use this folder unless you wrote it: such a name can stand for code to run",
                )
            return _KNOWN[module, name]

    try:
        # a few bytes of pickle can request gigabytes for the memo, or keys that take years to hash
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            is_far = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count
            if opcode.name == "DUP" or is_far:
                raise _refused(file, f"has the instruction {opcode.name} where torch writes none")
        stream.seek(0)
        return Reader(stream).load()
    except CheckpointError:
        raise
    except Exception as error:  # unpickling can fail in any way
        raise _refused(file, f"cannot be read: {type(error).__name__}: {short_repr(str(error))}") from error


def _checked(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is {short_repr(value)}")
    return value


def _state(record: Any, name: str) -> Any:
    """Returns an attribute of a pickled object, or None if the object has no such attribute."""
    return _checked(_checked(record, _Record, f"the owner of {name}").state, dict, f"the owner of {name}").get(name)


def _sizes(value: Any) -> tuple[int, ...]:
    try:
        return tuple(whole(size) for size in _checked(value, list | tuple, "a shape"))  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"{short_repr(value)} is no shape") from None


def _tensor(file: Path, name: str, entry: _TensorRecord, locations: dict[Any, Any]) -> SavedTensor:
    shape, boxes = _sizes(_state(entry, "size")), _checked(_state(entry, "chunks"), list, "chunks")
    properties = _checked(_state(entry, "properties"), _Record, f"properties of {name:.200}").state
    dtype = _checked(_checked(properties, tuple, f"properties of {name:.200}")[0], torch.dtype, f"dtype of {name:.200}")
    if len(boxes) > MAX_CHUNKS or len(shape) > 64:
        raise ValueError(f"{name:.200} has {len(boxes)} chunks and {len(shape)} dims")
    chunks = []
    for box in boxes:
        offsets, sizes = _sizes(_state(box, "offsets")), _sizes(_state(box, "sizes"))
        if math.prod(sizes):
            place = locations.get((name, offsets)) or locations.get((name, ()))
            if place is None:
                raise _refused(file, f"does not say where a chunk of tensor {name!r:.200} is stored")
            file_name, transforms = _state(place, "relative_path"), _state(place, "transform_descriptors")
            if not isinstance(file_name, str) or not _FILE_NAME.fullmatch(file_name):
                raise ValueError(f"relative_path is {short_repr(file_name)}, no name of a file in the folder")
            if transforms:  # such as compression
                raise ValueError(f"transform_descriptors is {short_repr(transforms)}, which is not supported")
            start, nbytes = whole(_state(place, "offset")), whole(_state(place, "length"))
            chunks.append(Chunk(offsets, sizes, file.parent / file_name, start, nbytes))
    if not _fill(shape, chunks):
        raise _refused(file, f"has chunks of tensor {name!r:.200} that do not make up its shape {list(shape)}")
    return SavedTensor(name, dtype, shape, tuple(chunks))


def _fill(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Returns whether the chunks' boxes cover a shape exactly, without overlap."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return False
        if any(start + size > n for start, size, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    starts = torch.tensor([chunk.offsets for chunk in chunks]).view(len(chunks), len(shape))
    ends = starts + torch.tensor([chunk.sizes for chunk in chunks]).view(len(chunks), len(shape))
    overlap = torch.ones(len(chunks), len(chunks), dtype=torch.bool)
    for start, end in zip(starts.T, ends.T, strict=True):  # for each dim
        overlap &= (start[:, None] < end[None]) & (start[None] < end[:, None])
    return int(overlap.sum()) == len(chunks)  # each chunk overlaps only itself


def read_saved(saved: SavedTensor) -> torch.Tensor:
    """Reads a whole tensor of a folder; needs memory for the tensor and one chunk.

    Raises:
        CheckpointError: a chunk is missing, truncated or differs from the metadata; the error names the file and the
            tensor.
    """
    if len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.shape:
        return _read_chunk(saved, saved.chunks[0])
    whole_tensor = torch.empty(saved.shape, dtype=saved.dtype)
    for chunk in saved.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole_tensor[box].copy_(_read_chunk(saved, chunk))
    return whole_tensor


def _read_chunk(saved: SavedTensor, chunk: Chunk) -> torch.Tensor:
    def refused(problem: str) -> CheckpointError:
        return _refused(chunk.file, f"has tensor {saved.name!r:.200}, which {problem}")

    if chunk.file.exists() and not chunk.file.is_file():  # a pipe would block
        raise refused("is in no plain file")
    with io_reported(chunk.file, "load"), chunk.file.open("rb") as stream:
        if chunk.start + chunk.nbytes > os.fstat(stream.fileno()).st_size:
            raise refused(f"would end after the file, at bytes {chunk.start} to {chunk.start + chunk.nbytes}")
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
    return tensor.resolve_conj().resolve_neg()  # torch may conjugate or negate lazily, without changing the memory


def _refused(file: Path, problem: str, hint: str = "copy the folder again, whole") -> CheckpointError:
    return CheckpointError(f"{file} {problem}", field="path", hint=hint, call="load")


def write_dcp_folder(path: Path, specs: Sequence[TensorSpec], read: Callable[[str], torch.Tensor]) -> None:
    """Atomically writes a folder that `torch.distributed.checkpoint.load` can read on any number of ranks.

    Args:
        specs: the tensors to write; the names are the keys.
        read: returns a tensor by its name; called for a tensor after the previous one was written.

    Raises:
        CheckpointError: `path` is taken, or the disk is full or fails. Errors of `read` are raised as they are.
    """

    class ReadWhenWritten(DefaultSavePlanner):
        def lookup_object(self, index: MetadataIndex) -> Any:
            return read(index.fqn)

    announced = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs}
    with new_folder(path) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # this is intended
        try:
            save(announced, storage_writer=FileSystemWriter(folder), planner=ReadWhenWritten(), no_dist=True)
        except CheckpointException as failed:  # not a subclass of Exception, and it wraps the real error
            error = next(iter(failed.failures.values()))[0]
            raise error if isinstance(error, SlimeError | OSError) else RuntimeError(str(error)) from error
