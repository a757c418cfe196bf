"""A rank's share of the run's tensors on disk, as safetensors with a JSON index, readable by any number of ranks.

Rank 3 writes `rank_00003.safetensors` (its rows of every tensor) and `rank_00003.json` (dtype, global shape and first
row of each, and the rank's own state such as its RNG). A reader fetches only the rows it holds, from whichever files
overlap them. Nothing here proves that the bytes are the saved ones: `CheckpointStore.verify` does, before any is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint import store
from slimefsdp.errors import CheckpointError, ModelError
from slimefsdp.io.checksummed_files import (
    io_reported,
    json_bytes,
    read_json,
    whole,
    write_checksum,
    write_with_checksum,
)
from slimefsdp.io.safetensors_file import DTYPE_NAMES, TensorFileWriter, TensorSpec, read_rows
from slimefsdp.io.safetensors_header import TensorEntry, read_header

_INDEX_NAME = re.compile(r"rank_(\d{5})\.json")


@dataclass(frozen=True, slots=True, eq=False)
class ShardedTensor:
    """Rows [start, start + local.shape[0]) of a tensor of `global_shape`; `start` counts rows of dim 0.

    A rank without a share holds zero rows. A tensor that every rank holds whole, and any 0-d one, has start 0 and its
    full shape.
    """

    local: torch.Tensor  # [rows, *global_shape[1:]], any device
    global_shape: tuple[int, ...]
    start: int

    @property
    def rows(self) -> int:
        """Rows held here; a 0-d tensor counts as one row."""
        return self.local.shape[0] if self.local.dim() else 1


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank's index says about one tensor."""

    dtype: str
    global_shape: tuple[int, ...]
    start: int
    rows: int


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    """One read: rows [start, stop) of the file's share of tensor `name`, into `target`."""

    name: str
    start: int
    stop: int
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ShardReads:
    """The rows that one rank needs of one file."""

    path: Path
    _copies: list[tuple[_Copy, TensorEntry]]

    def fill(self) -> None:
        """Read them into the tensors that were wanted, in place and bit for bit.

        CheckpointError if the disk refuses, when some may be read already.
        """
        with io_reported(self.path, "load"), self.path.open("rb") as file:
            for copy, entry in self._copies:
                read_rows(file, entry, copy.start, copy.stop, copy.target)


def write_shard(folder: Path, rank: int, tensors: Mapping[str, ShardedTensor], state: dict[str, Any]) -> None:
    """Write and fsync this rank's two files, with checksums. `state` is plain JSON (integers, lists, base64 strings).

    CheckpointError if a share does not fit its global shape, a dtype is not supported, `state` is not JSON, or the disk
    refuses.
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
    text = json_bytes(index, "state")
    # wider dtypes first, as the format wants it
    ordered = sorted(tensors.items(), key=lambda item: -item[1].local.dtype.itemsize)
    specs = [TensorSpec(name, tensor.local.dtype, tuple(tensor.local.shape)) for name, tensor in ordered]
    tensor_path, index_path = _tensor_path(folder, rank), _index_path(folder, rank)
    store.at_point("shard")
    with io_reported(tensor_path, "save"):
        with TensorFileWriter(tensor_path, specs) as file:
            for position, (name, tensor) in enumerate(ordered):
                if position == len(ordered) // 2:
                    store.at_point("shard: half of the tensors are written")
                file.write(name, tensor.local)
        store.at_point("shard: the tensor file is written")
        write_checksum(tensor_path, file.close())
        store.at_point("shard: the tensor file has its checksum")
    with io_reported(index_path, "save"):
        write_with_checksum(index_path, text)
    store.at_point("shard: both files have their checksums")


def plan_reads(folder: Path, wanted: Mapping[str, ShardedTensor]) -> list[ShardReads]:
    """What `wanted`, which names all saved tensors, needs of each file; no value changes before `fill`.

    CheckpointError naming tensor and file if a tensor is missing or surplus, has another dtype or global shape, lacks
    rows, or if a file cannot be read or contradicts its index.
    """
    pieces: dict[str, dict[int, _Piece]] = {}
    for rank in range(writing_ranks(folder)):
        for name, piece in _read_pieces(_index_path(folder, rank)).items():
            pieces.setdefault(name, {})[rank] = piece
    for name in sorted(pieces.keys() ^ wanted.keys()):
        where = _index_path(folder, min(pieces[name])) if name in pieces else folder
        problem = "is saved, but this run has no such tensor" if name in pieces else "is not in the checkpoint"
        raise _refused(name, where, problem)
    copies: dict[int, list[_Copy]] = {}
    for name, tensor in wanted.items():
        _check_share(name, tensor)
        for rank, copy in _plan(folder, name, tensor, pieces[name]):
            copies.setdefault(rank, []).append(copy)
    return [_located(_tensor_path(folder, rank), copies[rank], rank, pieces) for rank in sorted(copies)]


def read_rank_state(folder: Path, rank: int) -> dict[str, Any] | None:
    """The `state` that `rank` saved; None if fewer ranks wrote the checkpoint."""
    if rank >= writing_ranks(folder):
        return None
    path = _index_path(folder, rank)
    index, _ = read_json(path)
    if not isinstance(index, dict) or not isinstance(index.get("state"), dict):
        raise _refused("state", path, "is missing or no JSON object")
    return index["state"]


def writing_ranks(folder: Path) -> int:
    """How many ranks wrote this checkpoint; CheckpointError if their numbers have gaps or there are none."""
    with io_reported(folder, "load"):
        found = sorted(int(match[1]) for path in folder.iterdir() if (match := _INDEX_NAME.fullmatch(path.name)))
    if not found or found != list(range(len(found))):
        absent = next(rank for rank in range(len(found) + 1) if rank not in found)
        raise _refused("rank", _index_path(folder, absent), "does not exist")
    return len(found)


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
    if local.dim() != len(shape) or local.shape[1:] != shape[1:] or not 0 <= tensor.start <= total - tensor.rows:
        raise CheckpointError(
            f"{name}: a share {tuple(local.shape)} from row {tensor.start} lies outside {shape}",
            field=name,
            hint="pass the rows that this rank holds, and the first one's number",
        )


def _read_pieces(path: Path) -> dict[str, _Piece]:
    index, _ = read_json(path)
    try:
        return {
            name: _Piece(str(p["dtype"]), tuple(map(whole, p["global_shape"])), whole(p["start"]), whole(p["rows"]))
            for name, p in index["tensors"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused("tensors", path, f"cannot be understood: {error!r}") from error


def _plan(folder: Path, name: str, tensor: ShardedTensor, pieces: dict[int, _Piece]) -> list[tuple[int, _Copy]]:
    """(writing rank, read) pairs that cover this share once each; where several ranks hold a row, the first is read."""
    for rank, piece in pieces.items():
        if piece.dtype != (dtype := DTYPE_NAMES[tensor.local.dtype]):
            raise _refused(name, _index_path(folder, rank), f"is saved as {piece.dtype}, but is {dtype} here")
        if piece.global_shape != tensor.global_shape:
            shapes = f"{list(piece.global_shape)}, but has {list(tensor.global_shape)} here"
            raise _refused(name, _index_path(folder, rank), f"is saved with global shape {shapes}")
    plan = []
    row, stop = tensor.start, tensor.start + tensor.rows
    for rank, piece in sorted(pieces.items(), key=lambda item: (item[1].start, item[0])):
        end = min(stop, piece.start + piece.rows)
        if piece.start <= row < end:
            # a 0-d tensor has no rows to slice
            target = tensor.local[row - tensor.start : end - tensor.start] if tensor.global_shape else tensor.local
            plan.append((rank, _Copy(name, row - piece.start, end - piece.start, target)))
            row = end
    if row < stop:
        raise _refused(name, folder, f"lacks row {row} of {tensor.global_shape[0] if tensor.global_shape else 1}")
    return plan


def _located(path: Path, copies: list[_Copy], rank: int, pieces: dict[str, dict[int, _Piece]]) -> ShardReads:
    """The reads with the places in the file, whose header says the same as the index of `rank`."""
    with io_reported(path, "load"):
        try:
            entries = read_header(path)
        except ModelError as error:
            raise _refused("tensors", path, f"cannot be read: {error.message}") from error
    for copy in copies:
        piece, entry = pieces[copy.name][rank], entries.get(copy.name)
        shape = (piece.rows, *piece.global_shape[1:]) if piece.global_shape else ()
        if entry is None or (entry.dtype, entry.shape) != (piece.dtype, shape):
            found = "missing" if entry is None else f"{entry.dtype} {list(entry.shape)}"
            raise _refused(copy.name, path, f"is {found}, unlike its index says")
    return ShardReads(path, [(copy, entries[copy.name]) for copy in copies])
