"""Maps the parameters of a model to the tensors of its folder: one to one, or to one tensor per expert.

In memory the experts of a layer are one parameter, [experts, rows, columns]. Folders on the hub and those that
`save_pretrained` writes have one tensor per projection of each expert. Only the reader and the writer of folders use
this module; all other code uses the model's own names. The tensor names are those of transformers'
`conversion_mapping.py`; a test compares them with what `save_pretrained` writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

# model type -> suffix of a parameter of all experts -> the projections stacked in it, in order
_EXPERT_TENSORS = {
    "qwen3_moe": {
        ".experts.gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
        ".experts.down_proj": ("down_proj.weight",),
    },
    "mixtral": {
        ".experts.gate_up_proj": ("w1.weight", "w3.weight"),
        ".experts.down_proj": ("w2.weight",),
    },
}
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}  # module name in memory, module name in the folder
_GPT2_PREFIX = "transformer."  # missing in the oldest folders, which hold only the decoder
# causal masks that old folders store like weights
_GPT2_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """Describes a tensor of a folder and the part of a parameter it fills: all, or rows [start, end) of one expert."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    end: int = 0


def hub_parts(model_type: str, parameter: str, shape: Sequence[int]) -> list[Part]:
    """Returns the tensors of a newly written folder for a parameter of this name and full shape, in order."""
    old, new = _RENAMED.get(model_type, ("", ""))
    name = parameter.replace(old, new) if old else parameter
    for suffix, tensors in _EXPERT_TENSORS.get(model_type, {}).items():
        if parameter.endswith(suffix):
            experts, rows, columns = shape
            height = rows // len(tensors)
            stem = name.removesuffix(suffix) + ".experts."
            return [
                Part(f"{stem}{expert}.{tensor}", (height, columns), expert, i * height, (i + 1) * height)
                for expert in range(experts)
                for i, tensor in enumerate(tensors)
            ]
    return [Part(name, tuple(shape))]


def stored_parts(model_type: str, parameter: str, shape: Sequence[int], stored: Container[str]) -> list[Part]:
    """Returns the tensors to fill a parameter from, given the names that a folder stores.

    A folder may also have the parameter under the model's own name (all experts in one tensor), or for GPT-2 without
    the prefix. If nothing matches, the result is that of `hub_parts`, so that an error names the current names.
    """
    whole = [parameter]
    if model_type == "gpt2":
        whole.append(parameter.removeprefix(_GPT2_PREFIX))
    for name in whole:
        if name in stored:
            return [Part(name, tuple(shape))]
    return hub_parts(model_type, parameter, shape)


def is_no_weight(model_type: str, tensor: str) -> bool:
    """Returns whether a tensor of a folder is a constant that the model computes itself."""
    return model_type == "gpt2" and _GPT2_MASK.fullmatch(tensor) is not None
