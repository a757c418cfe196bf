"""Stores each rank's shards of a run's tensors as safetensors with a JSON index, readable by any number of ranks.

Rank 3 writes `rank_00003.safetensors` (its rows of every tensor, or some columns of these rows under tensor
parallelism) and `rank_00003.json` (dtype, global shape and position of each tensor, and the rank's own state such as
its RNG). A reading rank reads only the rows that it needs, from the files that have them. This module does not check
that the bytes are the saved ones; `CheckpointStore.verify` must be called first.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from slimefsdp.errors import CheckpointError, ModelError
from slimefsdp.io.files import (
    FileRecord,
    io_reported,
    json_bytes,
    read_json,
    whole,
    write_synced,
)
from slimefsdp.io.safetensors_file import DTYPE_NAMES, TORCH_DTYPES, TensorFileWriter, TensorSpec, read_rows
from slimefsdp.io.safetensors_header import TensorEntry, read_header

_BUFFER_BYTES = 1 << 20  # largest size of a buffer for rows of which only some columns are read
_INDEX_NAME = re.compile(r"rank_(\d{5})\.json")


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """Rows [start, start + rows) of a tensor of `global_shape`, or columns [column, column + columns) of these rows.

    Rows are indices of dim 0, columns indices of dim 1. A rank without a share has zero rows. A 0-d tensor, or a tensor
    that every rank holds whole, has start 0.
    """

    local: torch.Tensor  # [rows, columns, *global_shape[2:]], any device
    global_shape: tuple[int, ...]
    start: int
    column: int = 0

    @property
    def rows(self) -> int:
        """Returns the number of local rows; a 0-d tensor counts as one row."""
        return self.local.shape[0] if self.local.dim() else 1

    @property
    def columns(self) -> int:
        """Returns the number of local columns; a tensor without dim 1 counts as one column."""
        return _columns(tuple(self.local.shape))


def _columns(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) > 1 else 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """Locates the rows and columns of a tensor that a rank has written."""

    dtype: str
    global_shape: tuple[int, ...]
    start: int
    rows: int
    column: int
    columns: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        if len(self.global_shape) < 2:
            return (self.rows,) if self.global_shape else ()
        return (self.rows, self.columns, *self.global_shape[2:])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Locates rows [start, stop) x columns [left, right) of a tensor, which are inside a file's piece of it."""

    entry: TensorEntry
    piece: _Piece
    start: int
    stop: int
    left: int
    right: int

    def read(self, file: BinaryIO, tensor: ShardedTensor) -> None:
        """Reads these rows and columns into a tensor; its local shard must contain all of them."""
        first = self.start - self.piece.start
        # a 0-d tensor has no rows to slice
        target = (
            tensor.local[self.start - tensor.start : self.stop - tensor.start] if tensor.global_shape else tensor.local
        )
        if self.right - self.left == tensor.columns == self.piece.columns:
            read_rows(file, self.entry, first, first + self.stop - self.start, target)
            return
        target = target[:, self.left - tensor.column : self.right - tensor.column]
        row = torch.empty(self.entry.shape[1:], dtype=TORCH_DTYPES[self.entry.dtype])
        for part in target.split(max(1, _BUFFER_BYTES // row.nbytes)):
            rows = row.new_empty(len(part), *row.shape)
            read_rows(file, self.entry, first, first + len(part), rows)
            part.copy_(rows[:, self.left - self.piece.column : self.right - self.piece.column])
            first += len(part)


class SavedShards:
    """The tensors of a verified checkpoint folder, from any number of ranks.

    The constructor reads all indices. Headers of tensor files are read when they are needed.

    Raises:
        CheckpointError: a rank's index is missing or malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._headers: dict[int, dict[str, TensorEntry]] = {}
        self._pieces: dict[str, dict[int, _Piece]] = {}
        for rank in range(writing_ranks(folder)):
            for name, piece in _read_pieces(_index_path(folder, rank)).items():
                self._pieces.setdefault(name, {})[rank] = piece

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Returns name -> the spec of the whole tensor."""
        firsts = {name: next(iter(pieces.values())) for name, pieces in self._pieces.items()}
        return {name: TensorSpec(name, TORCH_DTYPES[piece.dtype], piece.global_shape) for name, piece in firsts.items()}

    def require_names(self, wanted: Collection[str]) -> None:
        """Raises a CheckpointError unless the saved tensors are exactly the wanted ones."""
        for name in sorted(self._pieces.keys() ^ wanted):
            if name in self._pieces:
                raise _refused(name, _index_path(self.folder, min(self._pieces[name])), "is saved, but not of this run")
            raise _refused(name, self.folder, "is not in the checkpoint")

    def read(self, name: str) -> torch.Tensor:
        """Reads one whole tensor into new memory. Raises the errors of `rows_of` and `fill`."""
        spec = self.specs[name]
        rows = spec.shape[0] if spec.shape else 1
        located = self.rows_of(name, spec, (0, rows), (0, _columns(spec.shape)))  # checked before memory is allocated
        tensor = ShardedTensor(torch.empty(spec.shape, dtype=spec.dtype), spec.shape, 0)
        fill([(rows, tensor) for rows in located])
        return tensor.local

    def rows_of(self, name: str, spec: TensorSpec, rows: tuple[int, int], columns: tuple[int, int]) -> list[_Rows]:
        """Locates a part of a tensor; what several ranks saved is read from the file of the first.

        Args:
            spec: dtype and global shape that the tensor must have.
            rows, columns: ranges [start, end) of indices of dim 0 and dim 1; (0, 1) where there is no such dimension.

        Raises:
            CheckpointError: they are not all saved with this dtype and global shape; the error names tensor and file.
        """
        dtype, shape = DTYPE_NAMES[spec.dtype], spec.shape
        for rank, piece in self._pieces[name].items():
            index = _index_path(self.folder, rank)
            if piece.dtype != dtype:
                raise _refused(name, index, f"is saved as {piece.dtype}, but is {dtype} here")
            if piece.global_shape != shape:
                shapes = f"{list(piece.global_shape)}, but has {list(shape)} here"
                raise _refused(name, index, f"is saved with global shape {shapes}")
        located, (start, stop), (column, last_column) = [], rows, columns
        ordered = sorted(self._pieces[name].items(), key=lambda item: (item[1].start, item[0]))
        # pieces with the same columns form a band, in which rows follow each other
        for left, right in sorted({(piece.column, piece.column + piece.columns) for _, piece in ordered}):
            right = min(right, last_column)
            if not left <= column < right:
                continue
            row = start
            for rank, piece in ordered:
                end = min(stop, piece.start + piece.rows)
                if piece.column == left and piece.start <= row < end:
                    located.append(_Rows(self._entry(name, rank, piece), piece, row, end, column, right))
                    row = end
            if row < stop:
                raise _refused(name, self.folder, f"lacks row {row} of {shape[0] if shape else 1}")
            column = right
        if column < last_column:
            raise _refused(name, self.folder, f"lacks column {column} of {_columns(shape)}")
        return located

    def _entry(self, name: str, rank: int, piece: _Piece) -> TensorEntry:
        """Returns the position of the tensor in a rank's file, after comparing the file's header with the index."""
        path = _tensor_path(self.folder, rank)
        if rank not in self._headers:
            with io_reported(path, "load"):
                try:
                    self._headers[rank] = read_header(path).tensors
                except ModelError as error:
                    raise _refused("tensors", path, f"cannot be read: {error.message}") from error
        entry = self._headers[rank].get(name)
        if entry is None or (entry.dtype, entry.shape) != (piece.dtype, piece.local_shape):
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise _refused(name, path, f"is {found}, unlike its index says")
        return entry


Reads = list[tuple[_Rows, ShardedTensor]]


def plan_reads(folder: Path, wanted: Mapping[str, ShardedTensor]) -> Reads:
    """Locates the rows of every wanted tensor, for `fill` to read; no other tensors may be saved.

    Raises:
        CheckpointError: a tensor is missing or surplus, has another dtype or global shape, or lacks rows, or a file
            cannot be read or contradicts its index. The error names tensor and file.
    """
    saved, reads = SavedShards(folder), []
    saved.require_names(wanted.keys())
    for name, tensor in wanted.items():
        _check_share(name, tensor)
        spec = TensorSpec(name, tensor.local.dtype, tensor.global_shape)
        rows = (tensor.start, tensor.start + tensor.rows)
        columns = (tensor.column, tensor.column + tensor.columns)
        reads += [(located, tensor) for located in saved.rows_of(name, spec, rows, columns)]
    return reads


def fill(reads: Reads) -> None:
    """Reads rows into the local tensors, file by file.

    Raises a CheckpointError if the disk fails; some rows are then read.
    """
    by_file: dict[Path, Reads] = {}
    for rows, tensor in reads:
        by_file.setdefault(rows.entry.file, []).append((rows, tensor))
    for path in sorted(by_file):
        with io_reported(path, "load"), path.open("rb", buffering=0) as file:
            for rows, tensor in by_file[path]:
                rows.read(file, tensor)


def write_shard(
    folder: Path, rank: int, tensors: Mapping[str, ShardedTensor], state: dict[str, Any]
) -> list[FileRecord]:
    """Writes this rank's two files, waits until they are on disk, and returns their records.

    Args:
        state: plain JSON (integers, lists, base64 strings).

    Raises:
        CheckpointError: a tensor's rows do not fit its global shape, a dtype is not supported, `state` is not JSON, or
            the disk is full or fails.
    """
    index: dict[str, Any] = {"tensors": {}, "state": state}
    for name, tensor in tensors.items():
        _check_share(name, tensor)
        index["tensors"][name] = {
            "dtype": DTYPE_NAMES[tensor.local.dtype],
            "global_shape": list(tensor.global_shape),
            "start": tensor.start,
            "rows": tensor.rows,
        }
        if tensor.columns != _columns(tensor.global_shape):
            index["tensors"][name] |= {"column": tensor.column, "columns": tensor.columns}
    text = json_bytes(index, "state")
    # wider dtypes come first, so that every tensor is aligned
    ordered = sorted(tensors.items(), key=lambda item: -item[1].local.dtype.itemsize)
    specs = [TensorSpec(name, tensor.local.dtype, tuple(tensor.local.shape)) for name, tensor in ordered]
    tensor_path, index_path = _tensor_path(folder, rank), _index_path(folder, rank)
    with io_reported(tensor_path, "save"), TensorFileWriter(tensor_path, specs) as file:
        for name, tensor in ordered:
            file.write(name, tensor.local)
    with io_reported(index_path, "save"):
        write_synced(index_path, text)
    return [
        file.close(),
        FileRecord(index_path.name, len(text), hashlib.sha256(text).hexdigest()),
    ]


def read_rank_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """Returns the `state` that `rank` saved, or None if fewer ranks wrote the checkpoint."""
    if rank >= writing_ranks(folder):
        return None
    path = _index_path(folder, rank)
    index, _ = read_json(path)
    if not isinstance(index, dict) or not isinstance(index.get("state"), dict):
        raise _refused("state", path, "is missing or no JSON object")
    return index["state"]


def writing_ranks(folder: Path) -> int:
    """Returns how many ranks wrote this checkpoint; raises a CheckpointError if an index is missing."""
    with io_reported(folder, "load"):
        ranks = sorted(int(match[1]) for path in folder.iterdir() if (match := _INDEX_NAME.fullmatch(path.name)))
    if not ranks or ranks != list(range(len(ranks))):
        absent = next(rank for rank in range(len(ranks) + 1) if rank not in ranks)
        raise _refused("rank", _index_path(folder, absent), "does not exist")
    return len(ranks)


def _tensor_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.safetensors"


def _index_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.json"


def _refused(name: str, path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{name} {problem} ({path})", field=name, hint="load a checkpoint of the same model and optimiser", call="load"
    )


def _check_share(name: str, tensor: ShardedTensor) -> None:
    local, shape = tensor.local, tensor.global_shape
    if local.dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
        raise CheckpointError(f"{name} is {local.dtype}", field=name, hint=f"convert it to one of {known}")
    total = shape[0] if shape else 1
    fits = local.dim() == len(shape) and local.shape[2:] == shape[2:]
    fits = fits and 0 <= tensor.start <= total - tensor.rows and 0 <= tensor.column <= _columns(shape) - tensor.columns
    if not fits:
        raise CheckpointError(
            f"{name}: a share {tuple(local.shape)} from row {tensor.start}, column {tensor.column} is outside {shape}",
            field=name,
            hint="pass the rows and columns that this rank holds, and the indices of the first ones",
        )


def _read_pieces(path: Path) -> dict[str, _Piece]:
    index, _ = read_json(path)
    try:
        pieces = {
            name: _Piece(
                str(p["dtype"]),
                shape := tuple(map(whole, p["global_shape"])),
                whole(p["start"]),
                whole(p["rows"]),
                whole(p.get("column", 0)),
                whole(p.get("columns", _columns(shape))),
            )
            for name, p in index["tensors"].items()
        }
        unknown = {piece.dtype for piece in pieces.values()} - TORCH_DTYPES.keys()
        if unknown:
            raise ValueError(f"dtype {min(unknown):.100}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused("tensors", path, f"cannot be understood: {error!r}") from error
    return pieces
