"""Writes full tensors as a folder that `AutoModelForCausalLM.from_pretrained` opens, one shard in memory at a time.

The folder appears whole or not at all: it is written beside its final place, flushed to disk, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from slimefsdp.errors import CheckpointError
from slimefsdp.models.folder import INDEX_FILE, SINGLE_FILE, ModelFolder
from slimefsdp.models.hub_names import hub_parts

EXPORT_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def write_model_folder(
    path: str | Path,
    buckets: Iterable[list[tuple[str, torch.Tensor]]],
    source: ModelFolder,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """A Hugging Face folder at `path` from a stream of full tensors; config and tokenizer files come from `source`.

    Tensors are copied before the next bucket is asked for, so a producer may reuse its buffers. Peak memory is one
    shard, one tensor, and two buckets (the last is alive while the next is made). A head tied to the embedding is
    simply not in the stream.

    Args:
        path: a folder that is absent or empty; missing parents are made.
        buckets: lists of (the parameter's name in memory, full tensor). The first is asked for only when `path` is
            known to be free.
        source: where config.json and the tokenizer files are taken from.
        dtype: a name in `EXPORT_DTYPES`, for the floating-point tensors; None keeps each tensor's own. config.json
            states what was written.
        max_shard_bytes: a shard is closed before it would exceed this; a tensor that alone exceeds it has its own.

    Raises:
        CheckpointError: `path` is taken, `dtype` is unknown or too narrow for a value, a name comes twice, no tensor
            came, or the disk refused. Nothing is left behind at `path` or beside it, also when `buckets` raises.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} is unknown", field="dtype", hint=f"use one of {', '.join(EXPORT_DTYPES)}"
        )
    target = Path(path).expanduser().resolve()
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        require_free_folder(target)
        partial.mkdir(parents=True)
        _write_files(partial, buckets, source, None if dtype is None else EXPORT_DTYPES[dtype], max_shard_bytes)
        for file in [*partial.iterdir(), partial]:
            _fsync(file)
        partial.rename(target)  # fails if someone else filled the target meanwhile; replaces an empty folder
        _fsync(target.parent)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{target} could not be written: {error}", field="path", hint="check the space and the permissions there"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename


def require_free_folder(path: str | Path) -> None:
    """Raises CheckpointError unless `path` is absent or an empty folder: an export never overwrites."""
    target = Path(path).expanduser().resolve()
    if target.is_dir():
        taken = next((child.name for child in target.iterdir()), None)
        if taken is not None:
            message = f"{target} is not empty (it holds {taken!r})"
        elif target.is_mount():  # a container's volume: nothing can be renamed onto it
            message = f"{target} is a mount point, which cannot be replaced"
        else:
            return
    elif target.exists():
        message = f"{target} is a file"
    else:
        return
    raise CheckpointError(message, field="path", hint="choose another folder, or one inside it")


def _write_files(
    folder: Path,
    buckets: Iterable[list[tuple[str, torch.Tensor]]],
    source: ModelFolder,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    for file in source.extra_files:
        shutil.copyfile(file, folder / file.name)
    config_file = folder / "config.json"
    config_file.touch()
    file_mode = config_file.stat().st_mode
    shards: list[list[str]] = []  # tensor names of each
    total_bytes = 0
    written_dtype: torch.dtype | None = None
    for shard in _shards(_copied(_in_hub_names(buckets, source.model_type), dtype), max_shard_bytes):
        shards.append(list(shard))
        file = folder / _unnumbered(len(shards))
        save_file(shard, file, metadata={"format": "pt"})
        # safetensors makes files that only their owner can read, but a rollout server may be another user
        file.chmod(file_mode)
        for tensor in shard.values():
            total_bytes += tensor.nbytes
            if tensor.is_floating_point():
                written_dtype = torch.promote_types(written_dtype or tensor.dtype, tensor.dtype)
    if not shards:
        raise CheckpointError("no tensor came to be written", field="buckets", hint="pass the model's full tensors")
    _name_shards(folder, shards, total_bytes)
    _write_json(config_file, _config_with_dtype(source.config, written_dtype))


def _in_hub_names(
    buckets: Iterable[list[tuple[str, torch.Tensor]]], model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors one by one, as folders hold them: experts apart, as views of the parameter they share in memory."""
    for bucket in buckets:
        for name, tensor in bucket:
            for part in hub_parts(model_type, name, tensor.shape):
                yield part.name, tensor if part.expert is None else tensor[part.expert, part.start : part.end]


def _copied(
    tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, each in contiguous host memory of its own, floating ones in `dtype`."""
    for name, tensor in tensors:
        to_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copied = tensor.detach().to("cpu", to_dtype, copy=True, memory_format=torch.contiguous_format)
        if _is_narrower(to_dtype, tensor.dtype) and copied.isinf().sum().item() > tensor.isinf().sum().item():
            raise CheckpointError(
                f"{name} holds {tensor[tensor.isfinite()].abs().max().item():g}, which is infinite in {to_dtype}",
                field="dtype",
                hint="use a dtype with a wider range, e.g. bfloat16",
            )
        yield name, copied


def _is_narrower(dtype: torch.dtype, than: torch.dtype) -> bool:
    return dtype != than and torch.finfo(dtype).max < torch.finfo(than).max


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Successive tensors in groups of at most `max_bytes`; a group is emptied when the next one is asked for."""
    shard: dict[str, torch.Tensor] = {}
    shard_bytes = 0
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise CheckpointError(f"tensor {name!r} came twice", field="buckets", hint="pass each tensor once")
        seen.add(name)
        if shard and shard_bytes + tensor.nbytes > max_bytes:
            yield shard
            shard.clear()  # the caller still holds this dict: without this, two shards would be alive
            shard_bytes = 0
        shard[name] = tensor
        shard_bytes += tensor.nbytes
    if shard:
        yield shard


def _unnumbered(shard: int) -> str:
    return f"shard-{shard}.safetensors"


def _name_shards(folder: Path, shards: list[list[str]], total_bytes: int) -> None:
    """Gives the files the names that transformers expects, which need the number of shards; several get an index."""
    if len(shards) == 1:
        (folder / _unnumbered(1)).rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / _unnumbered(number)).rename(folder / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)


def _config_with_dtype(config: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    """`config` stating `dtype` under the key it uses: `torch_dtype` before transformers 4.56, `dtype` since."""
    if dtype is None:
        return config
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | dict.fromkeys(keys, str(dtype).removeprefix("torch."))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
