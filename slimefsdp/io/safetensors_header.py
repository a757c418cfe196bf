"""Reads from a safetensors file's header where its tensors are; the safetensors library checks the header.

`slimefsdp.io.safetensors_file` reads the tensors, without the library's memory map. This module imports neither torch
nor numpy, so that the command line can check a model folder quickly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from slimefsdp.errors import ModelError
from slimefsdp.io.user_files import open_plain, parse_json, read_plain

COPY_AGAIN = "copy or download the file again"
_MAX_JSON_BYTES = 100_000_000  # the limit of the safetensors library for its headers
_LFS_MARK = b"version https://git-lfs"
# some dtypes of the format have less than 8 bits (https://github.com/huggingface/safetensors, Dtype::bitsize)
_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Locates a tensor: `nbytes` bytes at byte `offset` of `file`, row-major and little-endian.

    `dtype` is the format's name of the dtype, such as "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorFile:
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_header(file: Path) -> TensorFile:
    """Reads the header of a safetensors file.

    Raises:
        ModelError: the file violates the format. OSError: the file cannot be read.
    """
    with open_plain(file) as stream:  # the library would block on a pipe
        start = stream.read(len(_LFS_MARK))
    _refuse_lfs_pointer(file, start)
    try:
        with safe_open(file, "numpy") as library:
            # the library has checked that the tensors, in this order, fill the file without gaps
            slices = {name: library.get_slice(name) for name in library.offset_keys()}
            described = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()]
            metadata = dict(sorted((library.metadata() or {}).items()))  # the library's order is random
    except (SafetensorError, MemoryError) as error:  # MemoryError: the file's length exceeds the address space
        raise ModelError(f"{file} is no sound safetensors file: {error!s:.300}", hint=COPY_AGAIN) from error
    offset, tensors = 8 + int.from_bytes(start[:8], "little"), {}
    for name, dtype, shape in described:
        if dtype not in _DTYPE_BITS:  # from a newer release of the library
            raise ModelError(f"{file}: tensor {name:.200} has the unknown dtype {dtype}", hint="update slimefsdp")
        tensors[name] = TensorEntry(file, dtype, shape, offset, math.prod(shape) * _DTYPE_BITS[dtype] // 8)
        offset += tensors[name].nbytes
    # tensors without elements have the offset of their successor, and the library returns them in random order
    ordered = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes, item[0]))
    return TensorFile(dict(ordered), metadata)


def read_json_object(file: Path) -> dict[str, Any]:
    """Reads a JSON object from an untrusted file, such as a config.json.

    Raises:
        ModelError: the file is not a JSON object, or has a key twice. OSError: the file cannot be read.
    """
    raw = read_plain(file, _MAX_JSON_BYTES)
    _refuse_lfs_pointer(file, raw)
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        raise ModelError(f"{file} does not hold valid JSON: {error}", hint=COPY_AGAIN) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{file} holds a JSON {type(parsed).__name__} instead of an object", hint=COPY_AGAIN)
    return parsed


def _refuse_lfs_pointer(file: Path, start: bytes) -> None:
    if start.startswith(_LFS_MARK):
        raise ModelError(f"{file} is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in the folder")
