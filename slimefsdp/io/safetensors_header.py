"""The header of a safetensors file: where each tensor's bytes lie, every number in it checked before it is used.

Only the standard library is imported, and only the header is read. Its JSON is parsed by `parse_json_object`, which
suits any JSON that nobody vouches for. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimefsdp.errors import ModelError
from slimefsdp.io.user_files import open_plain, parse_json

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
COPY_AGAIN = "copy or download the file again"
# bits, not bytes: the format has types below one byte (https://github.com/huggingface/safetensors, Dtype::bitsize)
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_LFS_MARK = b"version https://git-lfs"
_abbreviation = reprlib.Repr()  # a hostile header can hold megabytes in one value
_abbreviation.maxstring = 200
short = _abbreviation.repr


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes at the absolute `offset` of `file`, row-major, little-endian.

    `dtype` is the format's own name, e.g. "BF16".
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file: 8 bytes little-endian length, that much JSON, tensor bytes without gaps.

    Raises:
        ModelError: the file breaks the format; the message names file, tensor and value. OSError: it cannot be read.
    """
    header, end, size = _read_json(file)
    header.pop("__metadata__", None)
    entries = {name: _checked_entry(file, name, info, end) for name, info in header.items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise ModelError(
                f"{file}: tensor {short(name)} starts at byte {entry.offset} instead of {end}: it {fault}",
                hint=COPY_AGAIN,
            )
        end += entry.nbytes
    if end != size:
        raise ModelError(f"{file} has {size} bytes, but its tensors end at byte {end}", hint=COPY_AGAIN)
    return entries


def read_metadata(file: Path) -> dict[str, str]:
    """What the writer of one safetensors file says of it beside its tensors.

    Raises:
        ModelError, OSError: as `read_header`, or it is no mapping of texts.
    """
    metadata: Any = _read_json(file)[0].get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{file} has __metadata__ {short(metadata)} instead of texts", hint=COPY_AGAIN)
    return metadata


def _read_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """(the JSON of the header, the byte at which it ends, bytes of the file)."""
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        refuse_lfs_pointer(file, stream.read(len(_LFS_MARK)))
        if size < 8:
            raise ModelError(f"{file} has {size} bytes, fewer than a safetensors header", hint=COPY_AGAIN)
        stream.seek(0)
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{file} claims a header of {header_bytes} bytes; it has {size}, and the limit is {MAX_HEADER_BYTES}",
                hint=f"{COPY_AGAIN}, or check that it is safetensors",
            )
        return parse_json_object(file, stream.read(header_bytes)), 8 + header_bytes, size


def parse_json_object(file: Path, raw: bytes) -> dict[str, Any]:
    """The object that `raw`, read from `file`, holds; ModelError if it is something else or names a key twice."""
    try:
        parsed = parse_json(raw)
    except ValueError as error:
        raise ModelError(f"{file} does not hold valid JSON: {error}", hint=COPY_AGAIN) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{file} holds a JSON {type(parsed).__name__} instead of an object", hint=COPY_AGAIN)
    return parsed


def refuse_lfs_pointer(file: Path, start: bytes) -> None:
    """Raise ModelError if the first bytes of `file` are those of a Git LFS pointer."""
    if start.startswith(_LFS_MARK):
        raise ModelError(f"{file} is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in the folder")


def _checked_entry(file: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    def refused(reason: str) -> ModelError:
        return ModelError(f"{file}: tensor {short(name)} {reason}", hint=COPY_AGAIN)

    if not isinstance(info, dict):
        raise refused(f"is described by {short(info)} instead of an object")
    dtype: Any = info.get("dtype")
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise refused(f"has dtype {short(dtype)}, none of {', '.join(sorted(DTYPE_BITS))}")
    if not _are_sizes(shape):
        raise refused(f"has shape {short(shape)} instead of whole numbers >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refused(f"has data_offsets {short(offsets)} instead of [begin, end]")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * bits != nbytes * 8:
        raise refused(f"of shape {short(shape)} and dtype {dtype} does not fill the {nbytes} bytes it is given")
    return TensorEntry(file, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    # the bounds keep products and messages short; no array library takes more than 64 dims
    return isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 2**63 for v in values)
