"""Writes full tensors as a folder that `AutoModelForCausalLM.from_pretrained` opens, one tensor in memory at a time.

What each file will hold is planned from names and shapes before the first tensor is asked for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slimefsdp.errors import CheckpointError
from slimefsdp.io.atomic_dir import new_folder
from slimefsdp.io.checksummed_files import Checksum
from slimefsdp.io.safetensors_file import TensorFileWriter, TensorSpec
from slimefsdp.models.hf_folder import INDEX_FILE, SINGLE_FILE, ModelFolder
from slimefsdp.models.hf_weight_names import hub_parts

EXPORT_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def write_model_folder(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    source: ModelFolder,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
    checksum_file: str | None = None,
) -> None:
    """A Hugging Face folder at `path` from a stream of full tensors; config and tokenizer files come from `source`.

    Each tensor is on the disk before the next is asked for, so a producer may reuse its memory. Peak memory, besides
    what the producer holds, is one tensor in another dtype. A head tied to the embedding is simply not in the stream.

    Args:
        path: a folder that is absent or empty; missing parents are made.
        specs: the parameters under their names in memory, in the order in which they come.
        tensors: (name, full tensor), as announced. The first is asked for only when `path` is known to be free.
        source: where config.json and the tokenizer files are taken from.
        dtype: a name in `EXPORT_DTYPES`, for the floating-point tensors; None keeps each tensor's own. config.json
            states what was written.
        max_shard_bytes: a file ends before it would exceed this; a tensor that alone exceeds it has its own.
        checksum_file: name of one in which the sha256 and size of each file of weights stand, as JSON; None: of none.

    Raises:
        CheckpointError: `path` is taken, `dtype` is unknown or too narrow for a value, a name comes twice, the stream
            is not what was announced, or the disk refused. Nothing is left behind at `path` or beside it, also when
            `tensors` raises.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} is unknown", field="dtype", hint=f"use one of {', '.join(EXPORT_DTYPES)}"
        )
    files = _planned_files(specs, source.model_type, None if dtype is None else EXPORT_DTYPES[dtype], max_shard_bytes)
    with new_folder(path) as folder:
        for file in source.extra_files:
            shutil.copyfile(file, folder / file.name)
        written = [spec for held in files.values() for spec in held]
        _write_json(folder / "config.json", _config_with_dtype(source.config, written))
        if len(files) > 1:
            weight_map = {spec.name: file_name for file_name, held in files.items() for spec in held}
            total_bytes = sum(spec.nbytes for spec in written)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / INDEX_FILE, index)
        checksums = _write_weights(folder, files, _in_hub_names(tensors, source.model_type))
        if checksum_file is not None:
            _write_json(folder / checksum_file, {name: asdict(one) for name, one in checksums.items()})


def _planned_files(
    specs: Sequence[TensorSpec], model_type: str, dtype: torch.dtype | None, max_bytes: int
) -> dict[str, list[TensorSpec]]:
    """File name -> what it will hold: successive tensors, as many as fit, each aligned to its own dtype."""
    files: list[list[TensorSpec]] = []
    file_bytes = 0
    seen: set[str] = set()
    for spec in specs:
        to_dtype = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        for part in hub_parts(model_type, spec.name, spec.shape):
            if part.name in seen:
                raise CheckpointError(f"tensor {part.name!r} came twice", field="specs", hint="pass each tensor once")
            seen.add(part.name)
            written = TensorSpec(part.name, to_dtype, part.shape)
            if not files or file_bytes + written.nbytes > max_bytes or file_bytes % to_dtype.itemsize:
                files.append([])
                file_bytes = 0
            files[-1].append(written)
            file_bytes += written.nbytes
    if not files:
        raise CheckpointError("there is no tensor to write", field="specs", hint="pass the model's full tensors")
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": held for i, held in enumerate(files, start=1)}


def _in_hub_names(tensors: Iterable[tuple[str, torch.Tensor]], model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as folders hold them: experts apart, as views of the parameter they share in memory."""
    for name, tensor in tensors:
        for part in hub_parts(model_type, name, tensor.shape):
            yield part.name, tensor if part.expert is None else tensor[part.expert, part.start : part.end]
        del tensor  # before the next one is made


def _write_weights(
    folder: Path, files: dict[str, list[TensorSpec]], parts: Iterator[tuple[str, torch.Tensor]]
) -> dict[str, Checksum]:
    """Writes the files and returns the checksum of each."""
    checksums = {}
    for file_name, held in files.items():
        with TensorFileWriter(folder / file_name, held, metadata={"format": "pt"}) as writer:
            for spec in held:
                name, tensor = next(parts, ("nothing", torch.empty(0)))
                if (name, tuple(tensor.shape)) != (spec.name, spec.shape):
                    raise _unannounced(
                        f"{name} {list(tensor.shape)} came, {spec.name} {list(spec.shape)} was announced"
                    )
                writer.write(name, in_dtype(name, tensor, spec.dtype))
                del tensor
            checksums[file_name] = writer.close()
    if (more := next(parts, None)) is not None:
        raise _unannounced(f"{more[0]} came and was not announced")
    return checksums


def _unannounced(problem: str) -> CheckpointError:
    return CheckpointError(problem, field="tensors", hint="pass the tensors of specs, in that order")


def in_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in another dtype; refused where a finite value would become infinite."""
    if tensor.dtype == dtype:
        return tensor
    converted = tensor.detach().to(dtype)
    if not converted.numel() or all(torch.isfinite(bound) for bound in converted.aminmax()):
        return converted  # seen without the memory that counting takes
    if converted.isinf().sum().item() > tensor.isinf().sum().item():
        raise CheckpointError(
            f"{name} holds {tensor[tensor.isfinite()].abs().max().item():g}, which is infinite in {dtype}",
            field="dtype",
            hint="use a dtype with a wider range, e.g. bfloat16",
        )
    return converted


def _config_with_dtype(config: dict[str, Any], written: Sequence[TensorSpec]) -> dict[str, Any]:
    """Returns `config` with the dtype that holds every tensor, under its key: `torch_dtype` before transformers 4.56,
    `dtype` since."""
    dtype: torch.dtype | None = None
    for spec in written:
        if spec.dtype.is_floating_point:
            dtype = torch.promote_types(dtype or spec.dtype, spec.dtype)
    if dtype is None:
        return config
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    return config | dict.fromkeys(keys, str(dtype).removeprefix("torch."))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
