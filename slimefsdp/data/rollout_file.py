"""A rollout batch as one safetensors file: a tensor for each field it has, under the field's name and in its dtype.

The file's metadata holds a sha256 of the tensors' names, dtypes, shapes and bytes, which reading compares. A file that
has none, written by an earlier version or by another program, is read without that.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slimefsdp.config_messages import short_repr
from slimefsdp.data.fields import DTYPES, REQUIRED, refuse, refuse_unknown
from slimefsdp.errors import BatchError

_STORED_DTYPES = {"int64": "I64", "float32": "F32", "float64": "F64", "bool": "BOOL"}  # numpy's name -> the format's
_HINT = "pass a file written by RolloutBatch.save"
_DIGEST = "sha256"


def require_path(path: object) -> None:
    """Raise BatchError for what names no file."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise BatchError(f"path={short_repr(path)} is not a path", field="path", hint="name a file")


def write_fields(path: Path, fields: Mapping[str, Any]) -> None:
    """Write the file; whatever fails, `path` holds the old content or all of the new. Raises OSError."""
    tensors = {name: np.asarray(value, dtype=DTYPES[name]) for name, value in fields.items()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            save_file(tensors, temporary, metadata={_DIGEST: _digest(tensors)})
        except SafetensorError as error:  # its word for what the disk refuses
            raise OSError(str(error)) from error
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # before the rename, or a power cut could leave the new name on an empty file
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a file of `write_fields` by name, with exactly the dtypes that it writes.

    BatchError names the file if it is missing, is no safetensors file, was changed after it was written, or holds other
    tensors than the fields'. Sizes and values are not looked at.
    """
    where = os.fspath(path)
    try:
        if Path(where).exists() and not Path(where).is_file():  # a pipe would block
            raise BatchError(f"{where} cannot be read as a safetensors file: it is no plain file", hint=_HINT)
        with safe_open(path, framework="np") as file:
            names = sorted(file.keys())
            for name in names:
                if name not in DTYPES:
                    refuse_unknown(name, DTYPES, f"a field of RolloutBatch (in {where})")
            for name in REQUIRED:
                if name not in names:
                    refuse(name, f"tensor {name} is missing (in {where})", _HINT)
            for name in names:
                stored, wanted = file.get_slice(name).get_dtype(), _STORED_DTYPES[DTYPES[name].name]
                if stored != wanted:
                    refuse(name, f"tensor {name} is {stored}; it must be {wanted} (in {where})", _HINT)
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: half a character in the path
        raise BatchError(f"{where} cannot be read as a safetensors file: {error}", hint=_HINT) from error
    if _DIGEST in metadata:
        is_damaged = metadata[_DIGEST] != _digest(tensors)
    else:  # a name and a value as long as a digest's may be one, damaged; others are notes of other writers
        is_damaged = any((len(name), len(value)) == (len(_DIGEST), 64) for name, value in metadata.items())
    if is_damaged:
        raise BatchError(
            f"{where} was damaged or changed after it was written: its tensors are not those of its digest",
            hint="restore the file from a copy, or record the batch again",
        )
    return tensors


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Of names, dtypes, shapes and bytes."""
    names = sorted(tensors)
    described = [[name, _STORED_DTYPES[tensors[name].dtype.name], list(tensors[name].shape)] for name in names]
    digest = hashlib.sha256(json.dumps(described).encode())
    for name in names:
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
