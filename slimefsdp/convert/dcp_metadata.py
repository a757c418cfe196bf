"""Reads the metadata of a torch.distributed.checkpoint folder, without running code that its `.metadata` may name.

`.metadata` is a pickle, and a pickle names functions to call. This unpickler only accepts the names that torch writes,
and makes a plain record instead of an object of each class. pydantic then checks types, sizes, file names and offsets.
"""

from __future__ import annotations

import math
import pickle
import pickletools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from slimefsdp.errors import CheckpointError, short_repr
from slimefsdp.io.files import io_reported

METADATA_FILE = ".metadata"
MAX_CHUNKS = 8192  # per tensor: more than anyone has ranks; all pairs of chunks are compared
MAX_METADATA_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box within a tensor, and the bytes of a file that hold it in the format of `torch.save`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a folder; its chunks cover it without overlap."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """The tensors of a folder by key, and the keys of everything else (numbers, schedules, generators)."""

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
            raise _damaged(file, "is no plain file")
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise _damaged(file, f"has more than {MAX_METADATA_BYTES} bytes")
        with file.open("rb") as stream:
            root = _unpickled(file, stream)
    try:
        metadata = _Metadata.model_validate(root)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))[-200:]
        raise _damaged(file, f"has {where} = {short_repr(first['input'])}: {first['msg']}") from error
    tensors = {
        name: _tensor(file, name, entry, metadata.storage_data)
        for name, entry in metadata.state_dict_metadata.items()
        if entry is not None
    }
    return DcpFolder(path, tensors, tuple(name for name in metadata.state_dict_metadata if name not in tensors))


class _Record:
    """Replaces an object of the pickle, and keeps its state."""

    state: object = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _TensorRecord(_Record):
    """Replaces the metadata of a tensor, which must be told apart from other entries."""


class _State(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _of_record(cls, value: object) -> object:
        return value.state if isinstance(value, _Record) else value


_Size = Annotated[int, Field(ge=0, lt=2**63)]
_Sizes = Annotated[tuple[_Size, ...], Field(max_length=64)]


class _Box(_State):
    offsets: _Sizes
    sizes: _Sizes


def _dtype_of(properties: object) -> object:
    return properties.state[0] if isinstance(properties, _Record) and isinstance(properties.state, tuple) else None


class _Entry(_State):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    size: _Sizes
    properties: Annotated[torch.dtype, BeforeValidator(_dtype_of)]
    chunks: list[_Box] = Field(max_length=MAX_CHUNKS)


class _Index(_State):
    fqn: str
    offset: _Sizes | None = None


class _Place(_State):
    relative_path: str = Field(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\z")  # stays inside of the folder
    offset: _Size
    length: _Size
    transform_descriptors: list[Any] | None = Field(None, max_length=0)  # such as compression, which is not supported


class _Metadata(_State):
    state_dict_metadata: dict[
        str, Annotated[_Entry | None, BeforeValidator(lambda e: e if isinstance(e, _TensorRecord) else None)]
    ]
    storage_data: dict[_Index, _Place]


_METADATA, _SHARDED = "torch.distributed.checkpoint.metadata", "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    _METADATA: [
        *("Metadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING"),
    ],
    _SHARDED: ["TensorProperties", "MEM_FORMAT_ENCODING"],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo", "_StoragePrefix"],
    "torch.serialization": ["_get_layout"],
    "builtins": ["getattr"],  # some releases of Python pickle members of an enum with it
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
                raise _damaged(
                    file,
                    f"names {short_repr(f'{module}.{name}')}, which torch does not write there",
                    "do not use this folder unless you wrote it: such a name can stand for code to run",
                )
            return _KNOWN[module, name]

    try:
        # a few bytes of pickle can request gigabytes of memo, or keys that take years to hash
        for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            is_far = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count
            if opcode.name == "DUP" or is_far:
                raise _damaged(file, f"has the instruction {opcode.name} where torch writes none")
        stream.seek(0)
        return Reader(stream).load()
    except CheckpointError:
        raise
    except Exception as error:  # unpickling can fail in any way
        raise _damaged(file, f"cannot be read: {type(error).__name__}: {short_repr(str(error))}") from error


def _tensor(file: Path, name: str, entry: _Entry, locations: dict[_Index, _Place]) -> SavedTensor:
    chunks = []
    for box in entry.chunks:
        if math.prod(box.sizes):
            location = locations.get(_Index(fqn=name, offset=box.offsets)) or locations.get(_Index(fqn=name))
            if location is None:
                raise _damaged(file, f"does not say where a chunk of tensor {name!r:.200} lies")
            chunks.append(
                Chunk(box.offsets, box.sizes, file.parent / location.relative_path, location.offset, location.length)
            )
    if not _fill(entry.size, chunks):
        shape = list(entry.size)
        raise _damaged(file, f"has chunks of tensor {name!r:.200} that do not make up its shape {shape}")
    return SavedTensor(name, entry.properties, entry.size, tuple(chunks))


def _fill(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Returns whether boxes cover a shape exactly, without overlap."""
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


def _damaged(file: Path, problem: str, hint: str = "copy the folder again, whole") -> CheckpointError:
    return CheckpointError(f"{file} {problem}", field="path", hint=hint, call="load")
