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
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slimefsdp.checkpoint.manifest import io_reported, json_bytes, read_json, seal_file, write_synced
from slimefsdp.errors import CheckpointError

_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
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


@dataclass(frozen=True, slots=True)
class _Copy:
    """One read: rows [start, stop) of tensor `name`, counted globally, from a file whose first row is `file_start`."""

    name: str
    start: int
    stop: int
    file_start: int


def write_shard(folder: Path, rank: int, tensors: Mapping[str, ShardedTensor], state: dict[str, Any]) -> None:
    """Write, fsync and seal this rank's two files. `state` is plain JSON (integers, lists, base64 strings).

    CheckpointError if a share does not fit its global shape, a dtype is not supported, `state` is not JSON, or the disk
    refuses.
    """
    index: dict[str, Any] = {"tensors": {}, "state": state}
    shares: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        _check_share(name, tensor)
        index["tensors"][name] = {
            "dtype": _DTYPES[tensor.local.dtype],
            "global_shape": list(tensor.global_shape),
            "start": tensor.start,
            "rows": tensor.rows,
        }
        share = tensor.local.detach().cpu().contiguous()
        # tied tensors: safetensors refuses two names for one memory, and a reader may not tie them
        shares[name] = share.clone() if share.data_ptr() in seen else share
        seen.add(share.data_ptr())
    text = json_bytes(index, "state")
    tensor_path, index_path = _tensor_path(folder, rank), _index_path(folder, rank)
    with io_reported(tensor_path, "save"):
        try:
            save_file(shares, tensor_path)
        except SafetensorError as error:  # wraps what the operating system said
            raise OSError(str(error)) from error
        seal_file(tensor_path)
        write_synced(index_path, text)
        seal_file(index_path)


def read_shard(folder: Path, wanted: Mapping[str, ShardedTensor]) -> None:
    """Fill every local of `wanted`, which names all saved tensors, in place and bit for bit; other rows are not read.

    CheckpointError naming tensor and file if a tensor is missing or surplus, has another dtype or global shape, or if
    the files do not hold all its rows. All of that is checked on the indices before the first value changes.
    """
    ranks = range(writing_ranks(folder))
    pieces: dict[str, dict[int, _Piece]] = {}
    for rank in ranks:
        for name, piece in _read_pieces(_index_path(folder, rank)).items():
            pieces.setdefault(name, {})[rank] = piece
    for name in sorted(pieces.keys() ^ wanted.keys()):
        where = _index_path(folder, min(pieces[name])) if name in pieces else folder
        problem = "is saved, but this run has no such tensor" if name in pieces else "is not in the checkpoint"
        raise _refused(name, where, problem)
    copies: dict[int, list[_Copy]] = {rank: [] for rank in ranks}
    for name, tensor in wanted.items():
        _check_share(name, tensor)
        for rank, copy in _plan(folder, name, tensor, pieces[name]):
            copies[rank].append(copy)
    for rank in ranks:
        if copies[rank]:
            _fill(_tensor_path(folder, rank), copies[rank], wanted)


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
        f"{name} {problem} ({path})", field=name, hint="load a checkpoint of the same model and optimiser", phase="load"
    )


def _check_share(name: str, tensor: ShardedTensor) -> None:
    local, shape = tensor.local, tensor.global_shape
    if local.dtype not in _DTYPES:
        known = ", ".join(str(dtype) for dtype in _DTYPES)
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
            name: _Piece(str(p["dtype"]), tuple(map(int, p["global_shape"])), int(p["start"]), int(p["rows"]))
            for name, p in index["tensors"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _refused("tensors", path, f"cannot be understood: {error!r}") from error


def _plan(folder: Path, name: str, tensor: ShardedTensor, pieces: dict[int, _Piece]) -> list[tuple[int, _Copy]]:
    """(writing rank, read) pairs that cover this share once each; where several ranks hold a row, the first is read."""
    for rank, piece in pieces.items():
        if piece.dtype != (dtype := _DTYPES[tensor.local.dtype]):
            raise _refused(name, _index_path(folder, rank), f"is saved as {piece.dtype}, but is {dtype} here")
        if piece.global_shape != tensor.global_shape:
            shapes = f"{list(piece.global_shape)}, but has {list(tensor.global_shape)} here"
            raise _refused(name, _index_path(folder, rank), f"is saved with global shape {shapes}")
    plan = []
    row, stop = tensor.start, tensor.start + tensor.rows
    for rank, piece in sorted(pieces.items(), key=lambda item: (item[1].start, item[0])):
        end = min(stop, piece.start + piece.rows)
        if piece.start <= row < end:
            plan.append((rank, _Copy(name, row, end, piece.start)))
            row = end
    if row < stop:
        raise _refused(name, folder, f"lacks row {row} of {tensor.global_shape[0] if tensor.global_shape else 1}")
    return plan


@torch.no_grad()
def _fill(path: Path, copies: list[_Copy], wanted: Mapping[str, ShardedTensor]) -> None:
    with io_reported(path, "load"):
        try:
            with safe_open(path, framework="pt") as file:
                for copy in copies:
                    tensor = wanted[copy.name]
                    if tensor.global_shape:
                        target = tensor.local[copy.start - tensor.start : copy.stop - tensor.start]
                        saved = file.get_slice(copy.name)[copy.start - copy.file_start : copy.stop - copy.file_start]
                    else:  # a 0-d tensor has no rows to slice
                        target, saved = tensor.local, file.get_tensor(copy.name)
                    # copy_ alone would cast and broadcast without a word where a file contradicts its index
                    if saved.dtype != target.dtype or saved.shape != target.shape:
                        raise _refused(copy.name, path, f"is {saved.dtype} {list(saved.shape)}, unlike its index says")
                    target.copy_(saved)
        except SafetensorError as error:
            raise _refused("tensors", path, f"cannot be read: {error}") from error
