"""Knows the sizes of some models that are not on this machine, and the commands that make others.

`shapes/owner/name/config.json` holds what config.json of that model on the Hugging Face hub says of its architecture,
and `shapes/examples` the same of the models that scripts of this project write. There are no weights and no tokenizers.
"""

from __future__ import annotations

import os
from pathlib import Path

from slimefsdp.io.hub import HubId

_SHAPES = Path(__file__).parent / "shapes"
# a path as presets write it -> the command that makes it and all below it, and the shape of a model there
_MADE: dict[str, tuple[str, str]] = {
    "data/sort_digits": ("python scripts/make_sort_digits.py data/sort_digits", "examples/sort_digits"),
    "data/sort_digits_untied": (
        "python scripts/make_sort_digits.py data/sort_digits_untied --untied",
        "examples/sort_digits_untied",
    ),
    "runs/sort_digits_sft/model": ("slimefsdp train configs/sort_digits_sft.yaml", "examples/sort_digits"),
    "data/calculator": ("python scripts/make_calculator.py data/calculator", "examples/calculator"),
    "runs/calculator_sft/model": ("slimefsdp train configs/calculator_sft.yaml", "examples/calculator"),
    "runs/demo_llm/smollm2": ("bash scripts/demo_llm.sh", "examples/smollm2"),
    "runs/demo_llm/seed_0": ("bash scripts/demo_llm.sh", ""),
    ".venv-vllm": ("bash scripts/setup_vllm.sh", ""),
}


def made_by(path: Path) -> str | None:
    """Returns the command that makes what is at a path; None if it exists, or no script of ours makes it."""
    found = _entry(path)
    return None if found is None else found[0]


def shape_of(path: Path) -> Path | None:
    """Returns a folder with only config.json, for a hub id or a model that `made_by` would make; None if
    none is known.
    """
    hub_id = HubId.of(path)
    made = _entry(path)
    name = hub_id.name if hub_id is not None and made is None else made[1] if made is not None else ""
    return _SHAPES / name if name and (_SHAPES / name / "config.json").is_file() else None


def is_shape(folder: Path) -> bool:
    """Returns whether a model folder is one of `shape_of`."""
    return folder.is_relative_to(_SHAPES)


def _entry(path: Path) -> tuple[str, str] | None:
    for made, entry in _MADE.items():
        if path.is_relative_to(made) and not os.path.lexists(made):
            return entry
    return None
