"""`slimefsdp convert` converts models between Hugging Face, torch.distributed.checkpoint and checkpoint folders.

Folders are checked before torch is imported; progress goes to stderr, and one line about the result to stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actors.cli.arguments import examples, one_of, path
from slimefsdp.errors import CheckpointError, byte_text
from slimefsdp.io.files import require_free_folder
from slimefsdp.models.hf_folder import check_architecture, read_model_folder

if TYPE_CHECKING:
    from slimefsdp.io.safetensors_file import TensorSpec

_DTYPES = ("bfloat16", "float16", "float32", "float64")
_Source = Annotated[Path, typer.Argument(parser=path, metavar="SRC", help="Folder to read.")]
_Target = Annotated[
    Path, typer.Argument(parser=path, metavar="DST", help="New folder, which appears whole or not at all.")
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        parser=one_of(_DTYPES), metavar="|".join(_DTYPES), help="Dtype of the written tensors. Default: unchanged."
    ),
]
_LIKE = "Folder with config.json and the tokenizer; weights in it are ignored."

commands = typer.Typer(
    help="Convert models between Hugging Face, torch.distributed.checkpoint and checkpoint folders, offline.",
)


@commands.command(name="hf-to-dcp", epilog=examples("slimefsdp convert hf-to-dcp model dcp"))
def hf_to_dcp(source: _Source, target: _Target) -> int:
    """Write a Hugging Face folder as torch.distributed.checkpoint."""
    _require_folders(source, target)
    folder = read_model_folder(source, field="SRC")
    check_architecture(folder, field="SRC")
    from slimefsdp.convert.convert import hugging_face_to_dcp

    return _print_result(target, hugging_face_to_dcp(folder, target, _note))


@commands.command(name="dcp-to-hf", epilog=examples("slimefsdp convert dcp-to-hf dcp model --like Qwen3-0.6B"))
def dcp_to_hf(
    source: _Source,
    target: _Target,
    like: Annotated[Path, typer.Option(parser=path, metavar="FOLDER", help=_LIKE)],
    dtype: _Dtype = None,
) -> int:
    """Write a torch.distributed.checkpoint folder as a Hugging Face folder."""
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


@commands.command(name="checkpoint-to-hf", epilog=examples("slimefsdp convert checkpoint-to-hf runs/first model"))
def checkpoint_to_hf(
    source: Annotated[
        Path, typer.Argument(parser=path, metavar="SRC", help="A checkpoint's folder, or run.dir for the newest one.")
    ],
    target: _Target,
    like: Annotated[
        Path | None, typer.Option(parser=path, metavar="FOLDER", help=f"{_LIKE} Default: the run's model.path.")
    ] = None,
    dtype: _Dtype = None,
) -> int:
    """Write a run's checkpoint as a Hugging Face folder, or its adapters as a PEFT folder."""
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
