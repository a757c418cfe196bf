"""`slimefsdp convert`: models between Hugging Face folders, torch.distributed.checkpoint folders and checkpoints.

Folders are looked at before torch is imported; progress goes to stderr, and one line about the result to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimefsdp.errors import CheckpointError, byte_text
from slimefsdp.io.atomic_dir import require_free_folder
from slimefsdp.io.user_files import path_argument
from slimefsdp.models.hf_folder import check_architecture, read_model_folder

if TYPE_CHECKING:
    from slimefsdp.io.safetensors_file import TensorSpec

DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_convert_arguments(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The three conversions, each with its own arguments; returns their parsers."""
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    to_dcp = kinds.add_parser("hf-to-dcp", help="a Hugging Face folder to torch.distributed.checkpoint")
    to_dcp.add_argument(
        "source", type=path_argument, metavar="SRC", help="folder with config.json and safetensors weights"
    )
    to_dcp.set_defaults(convert=_hf_to_dcp)
    from_dcp = kinds.add_parser("dcp-to-hf", help="torch.distributed.checkpoint to a Hugging Face folder")
    from_dcp.add_argument("source", type=path_argument, metavar="SRC", help="folder with .metadata")
    from_dcp.set_defaults(convert=_dcp_to_hf)
    from_run = kinds.add_parser(
        "checkpoint-to-hf", help="a checkpoint of a run to a Hugging Face folder, of adapters to a PEFT folder"
    )
    from_run.add_argument(
        "source", type=path_argument, metavar="SRC", help="folder of a step, or run.dir: its newest whole one"
    )
    from_run.set_defaults(convert=_checkpoint_to_hf)
    for kind in (to_dcp, from_dcp, from_run):
        kind.add_argument(
            "target", type=path_argument, metavar="DST", help="new folder, which appears whole or not at all"
        )
    for kind in (from_dcp, from_run):
        default = "" if kind is from_dcp else "; default: the run's model.path"
        kind.add_argument(
            "--like", type=path_argument, required=kind is from_dcp, metavar="FOLDER",
            help=f"has config.json and the tokenizer; weights are not looked at{default}",
        )  # fmt: skip
        kind.add_argument("--dtype", choices=DTYPES, help="of the tensors written; default: each its own")
    return [to_dcp, from_dcp, from_run]


def convert_command(options: argparse.Namespace) -> int:
    """Runs one conversion; returns the exit status.

    Raises:
        SlimeError: what the folders lack or hold; nothing is left at DST.
    """
    require_free_folder(options.target, field="DST")
    if not options.source.is_dir():
        raise CheckpointError(f"{options.source} is no folder", field="SRC", hint="name the folder to read")
    specs = options.convert(options)
    dtypes = ", ".join(sorted({str(spec.dtype).removeprefix("torch.") for spec in specs}))
    size = byte_text(sum(spec.nbytes for spec in specs))
    written = f" as {options.dtype}" if getattr(options, "dtype", None) else ""
    print(f"{options.target}: {len(specs)} tensors, {size} of {dtypes}{written}")
    return 0


def _hf_to_dcp(options: argparse.Namespace) -> Sequence[TensorSpec]:
    source = read_model_folder(options.source, field="SRC")
    check_architecture(source, field="SRC")
    from slimefsdp.convert.convert import hugging_face_to_dcp

    return hugging_face_to_dcp(source, options.target, _note)


def _dcp_to_hf(options: argparse.Namespace) -> Sequence[TensorSpec]:
    like = read_model_folder(options.like, field="--like", with_weights=False)
    check_architecture(like, field="--like")
    if not (options.source / ".metadata").is_file():
        raise CheckpointError(
            f"{options.source} has no .metadata",
            field="SRC",
            hint="name a folder that torch.distributed.checkpoint wrote, not its parent",
        )
    from slimefsdp.convert.convert import dcp_to_hugging_face

    return dcp_to_hugging_face(options.source, options.target, like, dtype=options.dtype, note=_note)


def _checkpoint_to_hf(options: argparse.Namespace) -> Sequence[TensorSpec]:
    if options.like is not None:
        check_architecture(read_model_folder(options.like, field="--like", with_weights=False), field="--like")
    from slimefsdp.convert.convert import checkpoint_to_hugging_face

    return checkpoint_to_hugging_face(options.source, options.target, options.like, dtype=options.dtype, note=_note)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
