"""`slimefsdp convert` converts models between Hugging Face, torch.distributed.checkpoint and checkpoint folders.

Folders are checked before torch is imported; progress goes to stderr, and one line about the result to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimefsdp.errors import CheckpointError, byte_text
from slimefsdp.io.files import require_free_folder
from slimefsdp.models.hf_folder import check_architecture, read_model_folder

if TYPE_CHECKING:
    from slimefsdp.io.safetensors_file import TensorSpec


def hf_to_dcp_command(source: Path, target: Path) -> int:
    """Converts a Hugging Face folder to torch.distributed.checkpoint.

    Raises:
        SlimeError: what is wrong with the folders; nothing is left at DST. The other conversions raise it, too.
    """
    _require_folders(source, target)
    folder = read_model_folder(source, field="SRC")
    check_architecture(folder, field="SRC")
    from slimefsdp.convert.convert import hugging_face_to_dcp

    return _print_result(target, hugging_face_to_dcp(folder, target, _note))


def dcp_to_hf_command(source: Path, target: Path, like: Path, dtype: str | None) -> int:
    """Converts a torch.distributed.checkpoint folder to a Hugging Face folder with the config.json of `like`."""
    _require_folders(source, target)
    like_folder = read_model_folder(like, field="--like", with_weights=False)
    check_architecture(like_folder, field="--like")
    if not (source / ".metadata").is_file():
        raise CheckpointError(
            f"{source} has no .metadata",
            field="SRC",
            hint="name a folder that torch.distributed.checkpoint wrote, not its parent",
        )
    from slimefsdp.convert.convert import dcp_to_hugging_face

    return _print_result(target, dcp_to_hugging_face(source, target, like_folder, dtype=dtype, note=_note), dtype)


def checkpoint_to_hf_command(source: Path, target: Path, like: Path | None, dtype: str | None) -> int:
    """Converts a run's checkpoint to a Hugging Face folder, or its adapters to a PEFT folder."""
    _require_folders(source, target)
    if like is not None:
        check_architecture(read_model_folder(like, field="--like", with_weights=False), field="--like")
    from slimefsdp.convert.convert import checkpoint_to_hugging_face

    return _print_result(target, checkpoint_to_hugging_face(source, target, like, dtype=dtype, note=_note), dtype)


def _require_folders(source: Path, target: Path) -> None:
    require_free_folder(target, field="DST")
    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder", field="SRC", hint="name the folder to read")


def _print_result(target: Path, specs: Sequence[TensorSpec], dtype: str | None = None) -> int:
    dtypes = ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
    size = byte_text(sum(spec.nbytes for spec in specs))
    print(f"{target}: {len(specs)} tensors, {size} of {dtypes}{f' as {dtype}' if dtype else ''}")
    return 0


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
