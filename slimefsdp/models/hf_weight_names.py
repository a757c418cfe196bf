"""Maps the parameters of a model to the tensors of its folder: the same one, or one tensor per expert.

In memory the experts of a layer are one parameter, [experts, rows, columns]; folders on the hub, and those that
`save_pretrained` writes, hold a tensor for each expert's projection. Parameters keep the model's own names everywhere
else in this library; only the folder's reader and writer ask here. The names are those of transformers'
`conversion_mapping.py`; a test compares them with what `save_pretrained` writes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass

# model type -> the suffix of a parameter of all experts -> the projections stacked in it, in this order
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
_RENAMED = {"mixtral": (".mlp.", ".block_sparse_moe.")}  # module name in memory, and in the folder
_GPT2_PREFIX = "transformer."  # absent from the oldest folders, which hold the decoder alone
# causal masks that old folders hold as if they were weights
_GPT2_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of a folder and its place in a parameter: all of it, or rows [start, end) of one expert."""

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    start: int = 0
    end: int = 0


def hub_parts(model_type: str, parameter: str, shape: Sequence[int]) -> list[Part]:
    """Returns the tensors that a folder written today holds for a parameter of this name and full shape, in order."""
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

    A folder may also hold the parameter under the model's own name (experts in one tensor), or a GPT-2 without its
    prefix. Where nothing fits, the names of today: they are the ones to miss.
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
