"""Writes adapters as a folder that `PeftModel.from_pretrained(base, folder)` opens, one matrix in memory at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slimefsdp.checkpoint.hf_export import in_dtype
from slimefsdp.errors import CheckpointError
from slimefsdp.io.atomic_dir import new_folder
from slimefsdp.io.hub import HubId, id_of_snapshot
from slimefsdp.io.safetensors_file import TensorFileWriter, TensorSpec
from slimefsdp.models.peft_folder import BASE_DIGEST, BASE_DTYPE, CONFIG_FILE, TENSOR_FILE, stack_modules, tensor_name


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """Describes the adapters of a folder."""

    rank: int  # there may be room for more in the matrices, which is not written
    alpha: float
    base: Path  # the folder of the model that they are of
    base_digest: str | None  # None: nobody asks for it
    base_dtype: str


def write_peft_folder(
    path: str | Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    facts: AdapterFacts,
    *,
    dtype: torch.dtype | None = None,
    checksum_file: str | None = None,
) -> None:
    """A PEFT folder at `path` from a stream of whole matrices; an id of the hub in place of its folder in the cache.

    Args:
        path: a folder that is absent or empty; missing parents are made.
        specs: of the matrices under the names `<module>.lora_A` and `<module>.lora_B`, of stacks of experts
            `<module>.<parameter>_lora_A` and `.._lora_B`, in the order in which they come; stacks of a module in its
            order.
        dtype: of what is written; None: each matrix's own.
        checksum_file: name of one in which the sha256 and size of the file of tensors stand, as JSON; None: of none.

    Raises:
        CheckpointError: `path` is taken, `dtype` is too narrow for a value, or the disk refused. Nothing is left behind
            at `path` or beside it, also when `tensors` raises.
    """
    places = _places(spec.name for spec in specs)
    written = [
        TensorSpec(tensor_name(*places[spec.name]), dtype or spec.dtype, _shape(spec.name, spec.shape, facts.rank))
        for spec in specs
    ]
    modules = list(dict.fromkeys(places[spec.name][0] for spec in specs if len(spec.shape) == 2))
    stacks = list(dict.fromkeys(_adapted(spec.name)[0] for spec in specs if len(spec.shape) == 3))
    with new_folder(path) as folder:
        text = json.dumps(_config(facts, modules, stacks), indent=2, sort_keys=True)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        metadata = {"format": "pt", BASE_DTYPE: facts.base_dtype}
        if facts.base_digest is not None:
            metadata[BASE_DIGEST] = facts.base_digest
        with TensorFileWriter(folder / TENSOR_FILE, written, metadata=metadata) as writer:
            for spec, (name, tensor) in zip(written, tensors, strict=True):
                writer.write(spec.name, in_dtype(name, _laid_out(name, tensor, facts.rank), spec.dtype))
            checksum = writer.close()
        if checksum_file is not None:
            (folder / checksum_file).write_text(json.dumps({TENSOR_FILE: asdict(checksum)}) + "\n", encoding="utf-8")


def _laid_out(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Returns a matrix in peft's layout, cut to the adapter's rank: adapters are stored padded to lora.rank."""
    is_a = name.endswith("lora_A")
    tensor = tensor[..., :rank, :] if is_a else tensor[..., :rank]
    if tensor.ndim == 3:
        tensor = tensor.flatten(0, 1) if is_a else tensor.permute(1, 2, 0).flatten(1, 2)
    return tensor.contiguous()


def _shape(name: str, shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Returns the shape that `_laid_out` gives a matrix in the PEFT file."""
    *stack, rows, columns = shape
    ranks = rank * math.prod(stack)
    return (ranks, columns) if name.endswith("lora_A") else (rows, ranks)


def _adapted(name: str) -> tuple[str, str]:
    """Returns what a matrix is of, a module or a stack of experts, and which of the two it is."""
    found = re.fullmatch(r"(.+)[._]lora_([AB])", name)
    if not found:
        raise CheckpointError(f"{name} is no matrix of an adapter", field="specs", hint="pass those of adapters alone")
    return found[1], found[2]


def _places(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns, for the name of each matrix, its module in peft and whether it is A or B."""
    found = {name: _adapted(name) for name in names}
    stacks = dict.fromkeys(of for name, (of, _) in found.items() if not name.startswith(f"{of}."))
    inside = stack_modules(stacks)
    return {name: (inside.get(of, of), matrix) for name, (of, matrix) in found.items()}


def _config(facts: AdapterFacts, modules: list[str], stacks: list[str]) -> dict[str, Any]:
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
