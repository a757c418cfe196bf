"""Provides the configurations of some models that are not on this machine, and the commands that make others.

`shapes/owner/name/config.json` holds the architecture part of config.json of a model on the Hugging Face hub;
`shapes/examples` holds those of models that this project's scripts write. There are no weights and no tokenizers.
"""

from __future__ import annotations

import os
from pathlib import Path

from slimefsdp.io.hub import HubId

_SHAPES = Path(__file__).parent / "shapes"
# path in presets -> the command that makes it and everything below it, and the shape of the model there
_COMMANDS: dict[str, tuple[str, str]] = {
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
    """Returns the command that makes the file or folder at a path; None if it exists or no script makes it."""
    entry = _entry(path)
    return None if entry is None else entry[0]


def shape_of(path: Path) -> Path | None:
    """Returns a folder that has only config.json, for a hub id or a model that `made_by` knows; None for others."""
    hub_id = HubId.of(path)
    entry = _entry(path)
    name = hub_id.name if hub_id is not None and entry is None else entry[1] if entry is not None else ""
    return _SHAPES / name if name and (_SHAPES / name / "config.json").is_file() else None


def is_shape(folder: Path) -> bool:
    return folder.is_relative_to(_SHAPES)


def _entry(path: Path) -> tuple[str, str] | None:
    for target, entry in _COMMANDS.items():
        if path.is_relative_to(target) and not os.path.lexists(target):
            return entry
    return None
