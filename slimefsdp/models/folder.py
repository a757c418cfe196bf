"""Reads a local Hugging Face model folder down to where each tensor's bytes lie, and refuses a malformed one by name.

Only the standard library is imported, and only headers are read, so that the command line can judge a model in a
fraction of a second. Nothing in a folder is trusted: every length, offset and file name is checked before it is used.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from slimefsdp.errors import ModelError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EXTRA_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "added_tokens.json",
)
# bits, not bytes: the format has types below one byte (https://github.com/huggingface/safetensors, Dtype::bitsize)
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_LFS_MARK = b"version https://git-lfs"
_COPY_AGAIN = "copy or download the file again"
_abbreviation = reprlib.Repr()  # a hostile header can hold megabytes in one value
_abbreviation.maxstring = 200
_short = _abbreviation.repr


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


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked local folder: absolute path, config.json, where every tensor lies, the tokenizer files it has."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorEntry]
    extra_files: tuple[Path, ...]

    @property
    def model_type(self) -> str:
        model_type: str = self.config["model_type"]
        return model_type

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding as config.json says; None where it does not say."""
        return self.config.get("vocab_size")

    @property
    def tie_word_embeddings(self) -> bool | None:
        """None where config.json does not say: the architecture's default then decides."""
        return self.config.get("tie_word_embeddings")


def read_model_folder(path: str | Path, *, field: str = "model.path") -> ModelFolder:
    """The folder's configuration and the location of every tensor, without reading any tensor.

    The weights are the files that `model.safetensors.index.json` names; without one, `model.safetensors` alone where it
    exists (as transformers reads it), else all `*.safetensors` files together.

    Args:
        path: a local folder; `~` is expanded. Hub ids are not resolved.
        field: the setting that errors name.

    Raises:
        ModelError: anything missing or malformed; the message names the file and the value.
    """
    try:
        return _read(path)
    except ModelError as error:
        error.field = field
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: `~name` of an unknown user
        raise ModelError(f"{path} cannot be read: {error}", field=field, hint="make the folder readable") from error


def _read(path: str | Path) -> ModelFolder:
    folder = Path(path).expanduser().absolute()
    if not folder.exists():
        raise ModelError(
            f"{str(path)!r} does not exist",
            hint="give a local folder: only those are read, so download a hub model first "
            "(`hf download ID --local-dir FOLDER`)",
        )
    if not folder.is_dir():
        raise ModelError(f"{folder} is a file", hint="give the folder that holds it and config.json")
    config = _read_config(folder / "config.json")
    index = _read_index(folder / INDEX_FILE)
    tensors: dict[str, TensorEntry] = {}
    for file in _weight_files(folder, index):
        for name, entry in _read_header(file).items():
            if name in tensors:
                raise ModelError(
                    f"tensor {_short(name)} is in two files, {tensors[name].file} and {file}",
                    hint="keep the files of one checkpoint only",
                )
            tensors[name] = entry
    for name, file_name in (index or {}).items():
        if name not in tensors or tensors[name].file != folder / file_name:
            raise ModelError(
                f"{folder / INDEX_FILE} places tensor {_short(name)} in {file_name!r}, which does not hold it",
                hint="download the index and its files again, from one revision",
            )
    extra_files = tuple(folder / name for name in EXTRA_FILES if (folder / name).is_file())
    return ModelFolder(folder, config, tensors, extra_files)


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelError(
            f"{file.parent} has no config.json",
            hint="give the folder that `save_pretrained` or `hf download` wrote, not its parent",
        )
    config = _parse_json_object(file, _read_small(file))
    expected: tuple[tuple[str, type, bool], ...] = (
        ("model_type", str, True),
        ("vocab_size", int, False),
        ("tie_word_embeddings", bool, False),
    )
    for key, kind, is_required in expected:
        value = config.get(key)
        # type(), not isinstance: True is no vocabulary size
        if type(value) is not kind and (is_required or value is not None):
            raise ModelError(
                f"{file} has {key} = {_short(value)}, where {kind.__name__} is needed",
                hint="restore the model's own config.json",
            )
    return config


def _read_index(file: Path) -> dict[str, str] | None:
    """Tensor name -> file name as the index says, every name checked to stay in the folder; None without an index."""
    if not file.is_file():
        return None
    weight_map = _parse_json_object(file, _read_small(file)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{file} has no weight_map, or an empty one", hint=_COPY_AGAIN)
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not file_name.endswith(".safetensors"):
            raise ModelError(
                f"{file} places tensor {_short(name)} in {_short(file_name)}, which is no .safetensors file",
                hint="give a safetensors checkpoint",
            )
        # by name only: Hugging Face caches hold legitimate links to ../../blobs
        parts = PurePosixPath(file_name.replace("\\", "/")).parts
        if ".." in parts or file_name.startswith(("/", "\\")) or PureWindowsPath(file_name).drive:
            raise ModelError(
                f"{file} places tensor {_short(name)} in {_short(file_name)}, outside the folder",
                hint="do not use this folder unless you wrote it: a sound index names files beside it",
            )
    return weight_map


def _weight_files(folder: Path, index: dict[str, str] | None) -> list[Path]:
    single = folder / SINGLE_FILE
    if index is not None:
        if single.is_file() and SINGLE_FILE not in index.values():
            raise ModelError(
                f"{folder} has {SINGLE_FILE} and an index that does not name it",
                hint="remove the one that is not the model: readers differ in which they take",
            )
        files = sorted({folder / name for name in index.values()})
    elif single.is_file():
        files = [single]
    else:
        files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    for file in files:
        if not file.is_file():
            reason = (
                "is a link to nothing" if file.is_symlink() else "is no regular file" if file.exists() else "is missing"
            )
            raise ModelError(f"{file} {reason}", hint="finish the download, or copy the folder with its links resolved")
    if not files:
        pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLE_SUFFIXES)
        if pickles:
            raise ModelError(
                f"{folder} has no .safetensors file, only {pickles[0]!r}: pickle checkpoints are refused",
                hint="convert it with `save_pretrained` if you trust it: loading it can run code",
            )
        raise ModelError(f"{folder} has no .safetensors file", hint="finish the download, or give another folder")
    return files


def _read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file: 8 bytes little-endian length, that much JSON, tensor bytes without gaps."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        _refuse_lfs_pointer(file, stream.read(len(_LFS_MARK)))
        if size < 8:
            raise ModelError(f"{file} has {size} bytes, fewer than a safetensors header", hint=_COPY_AGAIN)
        stream.seek(0)
        header_bytes = int.from_bytes(stream.read(8), "little")
        if header_bytes > min(_MAX_HEADER_BYTES, size - 8):
            raise ModelError(
                f"{file} claims a header of {header_bytes} bytes; it has {size}, and the limit is {_MAX_HEADER_BYTES}",
                hint=f"{_COPY_AGAIN}, or check that it is safetensors",
            )
        header = _parse_json_object(file, stream.read(header_bytes))
    header.pop("__metadata__", None)
    end = 8 + header_bytes
    entries = {name: _checked_entry(file, name, info, end) for name, info in header.items()}
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if entry.offset != end:
            fault = "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            raise ModelError(
                f"{file}: tensor {_short(name)} starts at byte {entry.offset} instead of {end}: it {fault}",
                hint=_COPY_AGAIN,
            )
        end += entry.nbytes
    if end != size:
        raise ModelError(f"{file} has {size} bytes, but its tensors end at byte {end}", hint=_COPY_AGAIN)
    return entries


def _checked_entry(file: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    def refused(reason: str) -> ModelError:
        return ModelError(f"{file}: tensor {_short(name)} {reason}", hint=_COPY_AGAIN)

    if not isinstance(info, dict):
        raise refused(f"is described by {_short(info)} instead of an object")
    dtype: Any = info.get("dtype")
    shape: Any = info.get("shape")
    offsets: Any = info.get("data_offsets")
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise refused(f"has dtype {_short(dtype)}, none of {', '.join(sorted(DTYPE_BITS))}")
    if not _are_sizes(shape):
        raise refused(f"has shape {_short(shape)} instead of whole numbers >= 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refused(f"has data_offsets {_short(offsets)} instead of [begin, end]")
    nbytes = offsets[1] - offsets[0]
    if math.prod(shape) * bits != nbytes * 8:
        raise refused(f"of shape {_short(shape)} and dtype {dtype} does not fill the {nbytes} bytes it is given")
    return TensorEntry(file, dtype, tuple(shape), data_start + offsets[0], nbytes)


def _are_sizes(values: Any) -> bool:
    # the bounds keep products and messages short; no array library takes more than 64 dims
    return isinstance(values, list) and len(values) <= 64 and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _read_small(file: Path) -> bytes:
    if file.stat().st_size > _MAX_HEADER_BYTES:
        raise ModelError(f"{file} has more than {_MAX_HEADER_BYTES} bytes", hint=_COPY_AGAIN)
    raw = file.read_bytes()
    _refuse_lfs_pointer(file, raw)
    return raw


def _refuse_lfs_pointer(file: Path, start: bytes) -> None:
    if start.startswith(_LFS_MARK):
        raise ModelError(f"{file} is a Git LFS pointer, not the file itself", hint="run `git lfs pull` in the folder")


def _parse_json_object(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_dict_without_duplicates)
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested without end
        raise ModelError(f"{file} does not hold valid JSON: {error}", hint=_COPY_AGAIN) from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{file} holds a JSON {type(parsed).__name__} instead of an object", hint=_COPY_AGAIN)
    return parsed


def _dict_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {_short(key)} occurs twice")
        result[key] = value
    return result
