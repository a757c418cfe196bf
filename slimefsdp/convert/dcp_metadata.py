"""What a torch.distributed.checkpoint folder says it holds, read without running what its `.metadata` could hold.

`.metadata` is a pickle, and a pickle names functions to call. Here only the names that torch itself writes are known,
and each stands for a plain record: no class of torch is touched, and any other name is refused. Nothing in the records
is trusted: types, sizes, file names and offsets are checked before they are used.
"""

from __future__ import annotations

import math
import pickle
import pickletools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import io_reported
from slimefsdp.io.safetensors_header import short

METADATA_FILE = ".metadata"
MAX_CHUNKS = 8192  # of a tensor: more than anybody's ranks; every two of them are compared
MAX_METADATA_BYTES = 1 << 30
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, and the bytes of a file that hold it as `torch.save` wrote it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor of a folder; its chunks do not overlap, and fill it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DcpFolder:
    """The tensors of a folder by their keys, and the keys of all else (numbers, schedules, generators)."""

    path: Path
    tensors: dict[str, SavedTensor]
    others: tuple[str, ...]


def read_dcp_folder(path: Path) -> DcpFolder:
    """What the folder's `.metadata` describes; no tensor is read.

    Raises:
        CheckpointError: it is missing, names what torch does not write, or makes no sense.
    """
    file = path / METADATA_FILE
    with io_reported(file, "load"):
        if not file.is_file() and file.exists():  # a pipe would block
            raise _damaged(file, "is no plain file")
        if file.stat().st_size > MAX_METADATA_BYTES:
            raise _damaged(file, f"has more than {MAX_METADATA_BYTES} bytes")
        with file.open("rb") as stream:
            root = _records(file, stream)
    entries, storage = _attribute(file, root, "state_dict_metadata", dict), _attribute(file, root, "storage_data", dict)
    places = {}
    for index, info in storage.items():
        places[_attribute(file, index, "fqn", str), _sizes(file, _state(index).get("offset") or ())] = info
    tensors = {
        name: _tensor(file, name, entry, places)
        for name, entry in entries.items()
        if isinstance(name, str) and isinstance(entry, _TensorRecord)
    }
    return DcpFolder(path, tensors, tuple(str(name) for name in entries if name not in tensors))


class _Record:
    """What was pickled as an object: its state."""

    state: object = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state


class _TensorRecord(_Record):
    """Of a tensor, told from the other entries by its class."""


_METADATA, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_OLD_PROPERTIES = "torch.distributed._shard.sharded_tensor.metadata"
_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("uint16", "uint32", "uint64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]
_KNOWN: dict[tuple[str, str], Any] = {
    (_METADATA, "TensorStorageMetadata"): _TensorRecord,
    **{
        (_METADATA, name): _Record
        for name in (
            *("Metadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
            *("StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        )
    },
    (_OLD_PROPERTIES, "TensorProperties"): _Record,
    (_OLD_PROPERTIES, "MEM_FORMAT_ENCODING"): _Record,
    (_FILES, "_StorageInfo"): _Record,
    (_FILES, "_StoragePrefix"): _Record,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _Record,
    ("collections", "OrderedDict"): dict,
    # some releases of Python name a member of an enumeration so; here it makes a record like any other
    ("builtins", "getattr"): _Record,
    **{(module, name): _Record for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    **{("torch", name): getattr(torch, name) for name in _DTYPES},
}


def _records(file: Path, stream: BinaryIO) -> Any:
    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if (module, name) not in _KNOWN:
                raise _damaged(
                    file,
                    f"names {short(f'{module}.{name}')}, which torch does not write there",
                    "do not use this folder unless you wrote it: such a name can stand for code to run",
                )
            return _KNOWN[module, name]

    try:
        _refuse_bombs(file, stream)
        stream.seek(0)
        return Reader(stream).load()
    except CheckpointError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise _damaged(file, f"cannot be read: {type(error).__name__}: {short(str(error))}") from error


def _refuse_bombs(file: Path, stream: BinaryIO) -> None:
    """A few bytes of pickle can ask for gigabytes of memo, or for keys that take years to hash."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        is_far = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > count
        if opcode.name == "DUP" or is_far:
            raise _damaged(file, f"has the instruction {opcode.name} where torch writes none")


def _tensor(
    file: Path, name: str, entry: _TensorRecord, places: Mapping[tuple[str, tuple[int, ...]], Any]
) -> SavedTensor:
    properties = _attribute(file, entry, "properties", _Record).state
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise _damaged(file, f"has no dtype for tensor {short(name)}")
    shape = _sizes(file, _state(entry).get("size"))
    chunks = []
    for chunk in _attribute(file, entry, "chunks", list):
        offsets, sizes = (_sizes(file, _state(chunk).get(key)) for key in ("offsets", "sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise _damaged(file, f"has a chunk {sizes} at {offsets} of tensor {short(name)}, which is {shape}")
        if math.prod(sizes):
            place = _place(file, name, places.get((name, offsets)))
            chunks.append(Chunk(offsets, sizes, *place))
    if len(chunks) > MAX_CHUNKS:
        raise _damaged(file, f"cuts tensor {short(name)} into {len(chunks)} chunks; {MAX_CHUNKS} are the limit")
    if not _fill(shape, chunks):
        raise _damaged(file, f"has chunks of tensor {short(name)} that do not make up its shape {list(shape)}")
    return SavedTensor(name, dtype, shape, tuple(chunks))


def _place(file: Path, name: str, info: Any) -> tuple[Path, int, int]:
    if info is None:
        raise _damaged(file, f"does not say where a chunk of tensor {short(name)} lies")
    relative = _attribute(file, info, "relative_path", str)
    start, nbytes = (_attribute(file, info, key, int) for key in ("offset", "length"))
    if not _PLAIN_NAME.fullmatch(relative):
        raise _damaged(file, f"places tensor {short(name)} in {short(relative)}, which is no file of the folder")
    if start < 0 or nbytes < 0:
        raise _damaged(file, f"places tensor {short(name)} at bytes {start} to {start + nbytes}")
    if _state(info).get("transform_descriptors"):
        raise _damaged(file, f"holds tensor {short(name)} transformed", "save it without extensions")
    return file.parent / relative, start, nbytes


def _fill(shape: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether boxes lie inside a shape, apart from each other, and leave nothing out."""
    if not all(o + s <= n for chunk in chunks for o, s, n in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
        return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        return False
    starts = torch.tensor([chunk.offsets for chunk in chunks]).view(len(chunks), len(shape))
    ends = starts + torch.tensor([chunk.sizes for chunk in chunks]).view(len(chunks), len(shape))
    overlap = torch.ones(len(chunks), len(chunks), dtype=torch.bool)
    for start, end in zip(starts.T, ends.T, strict=True):  # one dim at a time
        overlap &= (start[:, None] < end[None]) & (start[None] < end[:, None])
    return int(overlap.sum()) == len(chunks)  # each with itself


def _state(record: Any) -> Mapping[str, Any]:
    state = record.state if isinstance(record, _Record) else None
    return state if isinstance(state, dict) else {}


def _attribute(file: Path, record: Any, name: str, kind: type) -> Any:
    value = _state(record).get(name)
    if type(value) is not kind and not (kind is _Record and isinstance(value, _Record)):
        raise _damaged(file, f"has {name} = {short(value)}, where a {kind.__name__.strip('_')} is needed")
    return value


def _sizes(file: Path, values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > 64 or not all(type(v) is int and 0 <= v < 2**63 for v in values):
        raise _damaged(file, f"has the size or offset {short(values)}")
    return values


def _damaged(file: Path, problem: str, hint: str = "copy the folder again, whole") -> CheckpointError:
    return CheckpointError(f"{file} {problem}", field="path", hint=hint, call="load")
