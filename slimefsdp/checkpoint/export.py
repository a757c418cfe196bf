"""Writes full tensors to a folder that transformers or peft can open, with one tensor in memory at a time.

The content of each file is planned from names and shapes before the first tensor is requested.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimefsdp.errors import CheckpointError
from slimefsdp.io.files import FileRecord, new_folder
from slimefsdp.io.hub import HubId, id_of_snapshot
from slimefsdp.io.safetensors_file import TensorFileWriter, TensorSpec
from slimefsdp.models.hf_folder import INDEX_FILE, SINGLE_FILE, ModelFolder, hub_parts
from slimefsdp.models.peft_folder import BASE_DIGEST, BASE_DTYPE, CONFIG_FILE, TENSOR_FILE, stack_modules, tensor_name

EXPORT_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
Named = Iterable[tuple[str, torch.Tensor]]


def write_model_folder(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Named,
    source: ModelFolder,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5 * 2**30,
    checksum_file: str | None = None,
) -> None:
    """Writes a Hugging Face folder from a stream of full tensors; config and tokenizer files come from `source`.

    Each tensor is on the disk before the next is requested, so the producer may reuse its memory. In addition to the
    producer's memory, at most one converted copy of a tensor exists at a time. The stream does not contain a head that
    is tied to the embedding.

    Args:
        path: a folder that is absent or empty; missing parents are made.
        specs: the parameters by their names in memory, in the order of the stream.
        tensors: (name, full tensor) for each of `specs`. The first is requested only after `path` was found to be free.
        source: the folder that config.json and the tokenizer files are taken from.
        dtype: a name in `EXPORT_DTYPES`, for the floating-point tensors; None keeps the dtype of each tensor. The dtype
            in config.json follows.
        max_shard_bytes: largest size of a file of weights; a larger tensor has a file of its own.
        checksum_file: the name of a JSON file to write, with the sha256 of each file of weights; None means no such
            file.

    Raises:
        CheckpointError: `path` is taken, `dtype` is unknown or too narrow for a value, a name occurs twice, the stream
            differs from `specs`, or the disk is full or fails. After any error, including errors of `tensors`, nothing
            is left on the disk.
    """
    if dtype is not None and dtype not in EXPORT_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} is unknown", field="dtype", hint=f"use one of {', '.join(EXPORT_DTYPES)}"
        )
    files = _planned_files(specs, source.model_type, None if dtype is None else EXPORT_DTYPES[dtype], max_shard_bytes)
    with new_folder(path) as folder:
        for file in source.extra_files:
            shutil.copyfile(file, folder / file.name)
        written = [spec for file_specs in files.values() for spec in file_specs]
        _write_json(folder / "config.json", _config_with_dtype(source.config, written))
        if len(files) > 1:
            weight_map = {spec.name: file_name for file_name, file_specs in files.items() for spec in file_specs}
            total_bytes = sum(spec.nbytes for spec in written)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            _write_json(folder / INDEX_FILE, index)
        records = _write_weights(folder, files, _in_hub_names(tensors, source.model_type))
        if checksum_file is not None:
            _write_json(folder / checksum_file, {record.name: record.sha256 for record in records})


def _planned_files(
    specs: Sequence[TensorSpec], model_type: str, dtype: torch.dtype | None, max_bytes: int
) -> dict[str, list[TensorSpec]]:
    """Returns file name -> specs.

    A file has as many successive tensors as fit, and each is aligned to its own dtype.
    """
    files: list[list[TensorSpec]] = []
    file_bytes = 0
    names: set[str] = set()
    for spec in specs:
        to_dtype = dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype
        for part in hub_parts(model_type, spec.name, spec.shape):
            if part.name in names:
                raise CheckpointError(f"tensor {part.name!r} came twice", field="specs", hint="pass each tensor once")
            names.add(part.name)
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
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file_specs for i, file_specs in enumerate(files, 1)}


def _in_hub_names(tensors: Named, model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors under the names of a Hugging Face folder.

    A layer's experts, which are one parameter in memory, are split.
    """
    for name, tensor in tensors:
        for part in hub_parts(model_type, name, tensor.shape):
            yield part.name, tensor if part.expert is None else tensor[part.expert, part.start : part.end]
        del tensor  # before the producer makes the next tensor


def _write_weights(
    folder: Path, files: dict[str, list[TensorSpec]], parts: Iterator[tuple[str, torch.Tensor]]
) -> list[FileRecord]:
    records = []
    for file_name, specs in files.items():
        with TensorFileWriter(folder / file_name, specs, metadata={"format": "pt"}) as writer:
            for spec in specs:
                name, tensor = next(parts, ("nothing", torch.empty(0)))
                if (name, tuple(tensor.shape)) != (spec.name, spec.shape):
                    raise _unannounced(
                        f"{name} {list(tensor.shape)} came, {spec.name} {list(spec.shape)} was announced"
                    )
                writer.write(name, in_dtype(name, tensor, spec.dtype))
                del tensor
            records.append(writer.close())
    if (more := next(parts, None)) is not None:
        raise _unannounced(f"{more[0]} came and was not announced")
    return records


def _unannounced(problem: str) -> CheckpointError:
    return CheckpointError(problem, field="tensors", hint="pass the tensors of specs, in that order")


def in_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the tensor in another dtype; raises a CheckpointError if a finite value would become infinite."""
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
    """Returns `config` with a dtype that can hold every tensor; its key was `torch_dtype` before transformers 4.56."""
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


# ---------------------------------------------------------------------- adapters


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    rank: int  # only this many rows of A and columns of B are written
    alpha: float
    base: Path  # the folder of the base model
    base_digest: str | None  # None means that readers do not compare it
    base_dtype: str


def write_peft_folder(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Named,
    facts: AdapterFacts,
    *,
    dtype: torch.dtype | None = None,
    checksum_file: str | None = None,
) -> None:
    """Writes a stream of whole matrices to a folder that `PeftModel.from_pretrained(base, folder)` can open.

    If the base model's folder is in the cache of the hub, the written folder names the base model by its hub id.

    Args:
        path, checksum_file: as in `write_model_folder`.
        specs: the matrices in the order of the stream. Their names are `<module>.lora_A` and `<module>.lora_B`, and for
            stacks of experts `<module>.<parameter>_lora_A` and `.._lora_B`. The stacks of a module have the module's
            order.
        dtype: dtype to write; None keeps the dtype of each matrix.

    Raises:
        CheckpointError: `path` is taken, `dtype` is too narrow for a value, or the disk is full or fails. After any
            error, including errors of `tensors`, nothing is left on the disk.
    """
    owners = {spec.name: _owner_and_matrix(spec.name) for spec in specs}
    stacks = list(dict.fromkeys(owners[spec.name][0] for spec in specs if len(spec.shape) == 3))
    in_peft = stack_modules(stacks)
    modules = list(dict.fromkeys(owners[spec.name][0] for spec in specs if len(spec.shape) == 2))
    written = []
    for spec in specs:
        owner, matrix = owners[spec.name]
        *stack, rows, columns = spec.shape
        ranks = facts.rank * math.prod(stack)
        shape = (ranks, columns) if matrix == "A" else (rows, ranks)
        written.append(TensorSpec(tensor_name(in_peft.get(owner, owner), matrix), dtype or spec.dtype, shape))
    with new_folder(path) as folder:
        text = json.dumps(_adapter_config(facts, modules, stacks), indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        metadata = {"format": "pt", BASE_DTYPE: facts.base_dtype}
        if facts.base_digest is not None:
            metadata[BASE_DIGEST] = facts.base_digest
        with TensorFileWriter(folder / TENSOR_FILE, written, metadata=metadata) as writer:
            for spec, (name, tensor) in zip(written, tensors, strict=True):
                writer.write(spec.name, in_dtype(name, _in_peft_layout(name, tensor, facts.rank), spec.dtype))
            record = writer.close()
        if checksum_file is not None:
            _write_json(folder / checksum_file, {record.name: record.sha256})


def _owner_and_matrix(name: str) -> tuple[str, str]:
    """Returns the module or the stack of experts that a matrix adapts, and `A` or `B`."""
    match = re.fullmatch(r"(.+)[._]lora_([AB])", name)
    if not match:
        raise CheckpointError(f"{name} is no matrix of an adapter", field="specs", hint="pass those of adapters alone")
    return match[1], match[2]


def _in_peft_layout(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns a matrix in peft's layout, without the zeros that pad the adapter's rank to lora.rank."""
    is_a = name.endswith("lora_A")
    tensor = tensor[..., :rank, :] if is_a else tensor[..., :rank]
    if tensor.ndim == 3:
        tensor = tensor.flatten(0, 1) if is_a else tensor.permute(1, 2, 0).flatten(1, 2)
    return tensor.contiguous()


def _adapter_config(facts: AdapterFacts, modules: list[str], stacks: list[str]) -> dict[str, Any]:
    hub_id = id_of_snapshot(facts.base) or HubId(str(facts.base))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub_id.name,
        "revision": hub_id.revision,
        "inference_mode": True,
        "r": facts.rank,
        "lora_alpha": int(facts.alpha) if facts.alpha.is_integer() else facts.alpha,
        "target_modules": modules,
        "target_parameters": stacks or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
