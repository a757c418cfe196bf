"""Writes safetensors files from the memory of tensors, and reads them into the memory of tensors.

A file is written in one pass, without copies of tensors: each chunk is hashed and written while it is in the CPU's
cache. Files are not memory-mapped for reading, since mapped pages would count as resident memory. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slimefsdp import heartbeat
from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import FileRecord
from slimefsdp.io.safetensors_header import TensorEntry

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK_BYTES = 1 << 20  # small enough to stay in the CPU's cache between hashing and writing


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Describes a tensor for the header, which is written before the tensors' bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFileWriter:
    """Writes one safetensors file, tensor by tensor; a context manager.

    Args:
        path: the file to write; an existing file is overwritten.
        specs: every tensor in the order of writing. Wider dtypes come first, so that each tensor is aligned, which the
            safetensors library requires.
        metadata: the header's `__metadata__`.

    Raises:
        CheckpointError: a name or dtype is not valid in the format, or the order leaves a tensor unaligned.
        OSError: the disk is full or fails, raised by the constructor and by every method.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], *, metadata: dict[str, str] | None = None) -> None:
        self._path = path
        header = _header(path, specs, metadata)
        self._left = list(reversed(specs))
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._record: FileRecord | None = None
        self._file = path.open("wb", buffering=0)
        try:
            self._append(memoryview(header))
        except OSError:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Appends the next tensor of `specs`, which may be on any device and have any strides.

        Raises:
            CheckpointError: this is not the next tensor of `specs`.
        """
        spec = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        wanted = self._left[-1] if self._left else None
        if spec != wanted:
            raise _refused(self._path, name, f"is {spec}, but {wanted or 'the end of the file'} comes next")
        # torch may conjugate or negate lazily, without changing the memory
        for piece in _pieces(tensor.detach().resolve_conj().resolve_neg(), _CHUNK_BYTES // tensor.dtype.itemsize):
            on_host = piece.cpu().contiguous()  # keeps the memory alive that is written below
            self._append(memory_of(on_host))
        self._left.pop()
        heartbeat.tick()

    def close(self) -> FileRecord:
        """Waits until the whole file is on disk; a repeated call returns the same record.

        Raises:
            CheckpointError: tensors of `specs` are missing.
        """
        if self._record is None:
            if self._left:
                raise _refused(self._path, self._left[-1].name, "was announced and not written")
            os.fsync(self._file.fileno())
            self._file.close()
            self._record = FileRecord(self._path.name, self._bytes, self._hash.hexdigest())
        return self._record

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._file.close()

    def _append(self, data: memoryview) -> None:
        self._hash.update(data)
        while data:
            written = self._file.write(data)
            assert written  # a blocking raw file writes at least one byte, or raises
            self._bytes += written
            data = data[written:]


@torch.no_grad()
def read_rows(
    stream: BinaryIO,
    entry: TensorEntry,
    start: int,
    end: int,
    target: torch.Tensor,
    *,
    buffer_bytes: int = 1 << 20,
) -> None:
    """Reads rows [start, end) of dim 0 of a saved tensor into `target`, and converts them to target's dtype.

    Rows are read directly into contiguous host memory of the same dtype; for any other target they pass a buffer.

    Args:
        stream: the open file `entry.file`, buffered or not; its position does not matter.
        start, end: rows to read; 0 and 1 for a 0-d tensor.
        target: [end - start, *entry.shape[1:]] on any device with any strides; 0-d for a 0-d tensor.
        buffer_bytes: largest size of the buffer.

    Raises:
        OSError: the file ends too early or cannot be read; part of `target` may be changed.
        CheckpointError: torch does not have the saved tensor's dtype.
    """
    if entry.dtype not in TORCH_DTYPES:
        raise _refused(entry.file, "a tensor", f"is {entry.dtype}, which cannot be read")
    dtype = TORCH_DTYPES[entry.dtype]
    rows, row_shape = (entry.shape[0], entry.shape[1:]) if entry.shape else (1, ())
    assert 0 <= start <= end <= rows and target.shape == (entry.shape and (end - start, *row_shape)), entry
    offset = entry.offset + start * math.prod(row_shape) * dtype.itemsize
    target = target.detach()
    if target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous():
        _read_exactly(stream, entry, offset, memory_of(target))
        heartbeat.tick()
        return
    buffer = torch.empty(min(buffer_bytes // dtype.itemsize, target.numel()), dtype=dtype)
    for piece in _pieces(target, max(1, buffer_bytes // dtype.itemsize)):
        raw = buffer[: piece.numel()]
        _read_exactly(stream, entry, offset, memory_of(raw))
        piece.copy_(raw.view(piece.shape))
        offset += raw.nbytes
        heartbeat.tick()


def _header(path: Path, specs: Sequence[TensorSpec], metadata: dict[str, str] | None) -> bytes:
    """Returns the header: its length, then JSON padded with spaces so that tensors start at a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for spec in specs:
        if spec.name in entries or spec.name == "__metadata__":
            raise _refused(path, spec.name, "is a name that is taken")
        if spec.dtype not in DTYPE_NAMES:
            raise _refused(path, spec.name, f"is {spec.dtype}, none of {', '.join(map(str, DTYPE_NAMES))}")
        if offset % spec.dtype.itemsize:
            raise _refused(path, spec.name, f"would begin unaligned, at byte {offset}: wider dtypes come first")
        entries[spec.name] = {
            "dtype": DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _pieces(tensor: torch.Tensor, max_elements: int) -> Iterator[torch.Tensor]:
    """Yields views of the tensor, in row-major order, with at most `max_elements` elements each."""
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(max_elements)
    elif tensor.numel() <= max_elements:
        yield tensor
    else:
        rows = max_elements // tensor[0].numel()
        for part in tensor.split(rows) if rows else tensor:
            yield from _pieces(part, max_elements)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a contiguous host tensor without a copy; valid while the tensor lives."""
    # numpy would make the storage non-resizable, so that the tensor's memory could no longer be freed by a sleep
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _read_exactly(stream: BinaryIO, entry: TensorEntry, offset: int, memory: memoryview) -> None:
    while memory:
        count = os.preadv(stream.fileno(), [memory], offset)
        if count == 0:
            raise OSError(errno.EIO, f"ends at byte {offset}, {len(memory)} too early", str(entry.file))
        memory, offset = memory[count:], offset + count


def _refused(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{name} {problem} ({path})", field=name, hint="write the tensors that were announced, in that order"
    )
