"""Writes adapters as a folder that `PeftModel.from_pretrained(base, folder)` opens, one matrix in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint.hf_export import in_dtype
from slimefsdp.errors import CheckpointError
from slimefsdp.io.atomic_dir import new_folder
from slimefsdp.io.hub import HubId, id_of_snapshot
from slimefsdp.io.safetensors_file import TensorFileWriter, TensorSpec
from slimefsdp.models.peft_folder import BASE_DIGEST, BASE_DTYPE, CONFIG_FILE, TENSOR_FILE, tensor_name


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """What a folder says of its adapters."""

    rank: int  # there may be room for more in the matrices, which is not written
    alpha: float
    base: Path  # the folder of the model that they are of
    base_digest: str
    base_dtype: str


def write_peft_folder(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    facts: AdapterFacts,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """A PEFT folder at `path` from a stream of whole matrices; an id of the hub in place of its folder in the cache.

    Args:
        path: a folder that is absent or empty; missing parents are made.
        specs: of the matrices under the names `<module>.lora_A` and `<module>.lora_B`, in the order in which they come.
        dtype: of what is written; None: each matrix's own.

    Raises:
        CheckpointError: `path` is taken, `dtype` is too narrow for a value, or the disk refused. Nothing is left behind
            at `path` or beside it, also when `tensors` raises.
    """
    written = [
        TensorSpec(_peft_name(spec.name), dtype or spec.dtype, _shape(spec.name, spec.shape, facts.rank))
        for spec in specs
    ]
    modules = list(dict.fromkeys(spec.name.rpartition(".")[0] for spec in specs))
    with new_folder(path) as folder:
        text = json.dumps(_config(facts, modules), indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        metadata = {"format": "pt", BASE_DIGEST: facts.base_digest, BASE_DTYPE: facts.base_dtype}
        with TensorFileWriter(folder / TENSOR_FILE, written, metadata=metadata) as writer:
            for spec, (name, tensor) in zip(written, tensors, strict=True):
                rows, columns = spec.shape
                writer.write(_peft_name(name), in_dtype(name, tensor[:rows, :columns].contiguous(), spec.dtype))


def _shape(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Of a matrix without the rows of A, or columns of B, that are room for a larger rank."""
    return (rank, shape[1]) if name.endswith("lora_A") else (shape[0], rank)


def _peft_name(name: str) -> str:
    module, _, matrix = name.rpartition(".")
    if matrix not in ("lora_A", "lora_B"):
        raise CheckpointError(f"{name} is no matrix of an adapter", field="specs", hint="pass those of adapters alone")
    return tensor_name(module, matrix.removeprefix("lora_"))


def _config(facts: AdapterFacts, modules: list[str]) -> dict[str, Any]:
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
