"""What a checkpoint and the run that loads it must have in common, and what they may differ in with a warning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimefsdp.errors import CheckpointError
from slimefsdp.io.checksummed_files import json_bytes

# keys of config.json that change no number of a model without dropout; those that begin with _ are left out as well
_WITHOUT_EFFECT = frozenset(
    [
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "embd_pdrop",
        "attn_pdrop",
        "resid_pdrop",
        "embd_dropout",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)
_ABSENT = "not set"


def architecture_of(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json that decide what the model computes."""
    return {key: value for key, value in model_config.items() if key not in _WITHOUT_EFFECT and not key.startswith("_")}


def check_info(info: Mapping[str, Any], file: Path) -> None:
    """Whether what a checkpoint says of itself has the entries that a load reads.

    Raises:
        CheckpointError: naming the first one that is missing or of another type, and `file`.
    """
    kinds = dict.fromkeys(("identity", "mesh", "config", "loop_state"), dict)
    for name, kind in {**kinds, "reference_follows": bool, "updates_taken": int, "skipped_in_a_row": int}.items():
        if type(info.get(name)) is not kind or (kind is int and info[name] < 0):
            what = "count" if kind is int else kind.__name__
            raise CheckpointError(
                f"{name} is {info.get(name, _ABSENT)!r:.100} in {file}, which is no {what}",
                field=name,
                hint="load a checkpoint that this version wrote",
                call="load",
            )
    coefficient = info.get("kl_coefficient")
    if type(coefficient) is not float or not 0 <= coefficient < math.inf:
        raise CheckpointError(
            f"kl_coefficient is {coefficient!r:.100} in {file}, which is no number >= 0",
            field="kl_coefficient",
            hint="load a checkpoint that this version wrote",
            call="load",
        )


def check_loop_state(loop_state: object) -> None:
    """Whether a checkpoint can hold what its caller gives along.

    Raises:
        CheckpointError: it is no dict, or would not come back equal from JSON.
    """
    if loop_state is not None and type(loop_state) is not dict:
        raise CheckpointError(
            f"loop_state is a {type(loop_state).__name__}", field="loop_state", hint="give a dict of plain JSON"
        )
    json_bytes({"info": {"loop_state": loop_state or {}}}, "loop_state")  # as deep as in the manifest


def check_identity(saved: Mapping[str, Any], own: Mapping[str, Any], file: Path) -> None:
    """Whether values saved under one identity can be loaded under another; nested mappings are compared key by key.

    Raises:
        CheckpointError: naming the first field that differs, both values and `file`.
    """
    for name in [*own, *(name for name in saved if name not in own)]:
        there, here = saved.get(name, _ABSENT), own.get(name, _ABSENT)
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            check_identity(there, here, file)
        elif there != here:
            raise CheckpointError(
                f"{name} is {there} in {file}, but {here} in this run",
                field=name,
                hint="load a checkpoint of the same model, master dtype, optimiser, frozen parameters and adapters",
                call="load",
            )


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Returns one phrase for each of this run's values that differs from what was saved under its name."""
    return [
        f"{name} is {value} (saved: {saved[name]})"
        for name, value in own.items()
        if name in saved and saved[name] != value
    ]
