"""Weights as a folder on a disk that trainer and engines see: it is there whole or not at all, with its checksums.

It is what `AutoModelForCausalLM` opens, as far as its weights go: frozen ones that engines hold may be left out. An
adapter that is sent as such is a folder in it, of peft's format.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from slimefsdp.checkpoint.export import AdapterFacts, write_model_folder, write_peft_folder
from slimefsdp.errors import ModelError, SlimeError, SyncError
from slimefsdp.io.files import record_of
from slimefsdp.io.safetensors_file import TensorSpec
from slimefsdp.io.safetensors_header import read_header
from slimefsdp.models.hf_folder import ModelFolder, read_model_folder
from slimefsdp.models.hf_weight_names import hub_parts
from slimefsdp.models.load_weights import OpenTensors
from slimefsdp.models.peft_folder import ADAPTER_FOLDER, MATRICES, TENSOR_FILE
from slimefsdp.weight_sync.receive import Manifest

CHECKSUMS = "weights_sha256.json"


def write_weights(
    path: Path, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], source: ModelFolder, dtype: torch.dtype
) -> None:
    """A new folder at `path`; on disk when this returns.

    Args:
        manifest: of the tensors, in the order in which they come.
        source: where config.json and the tokenizer's files come from.

    Raises:
        CheckpointError: the disk refused; nothing is left there, as after any other error.
    """
    specs = [TensorSpec(name, dtype, shape) for name, shape in manifest.items()]
    write_model_folder(path, specs, tensors, source, checksum_file=CHECKSUMS)


def checked_weights(path: str | Path) -> ModelFolder:
    """The folder, after its files were compared with its checksums.

    Raises:
        SyncError: it is not there, was cut or altered.
    """
    with _whole(Path(path)):
        folder = read_model_folder(path)
        _compare({entry.file for entry in folder.tensors.values()}, folder.path / CHECKSUMS)
    return folder


def write_adapter(
    path: Path, matrices: Sequence[tuple[str, torch.Tensor]], scale: float, source: ModelFolder, dtype: torch.dtype
) -> None:
    """An adapter in a folder of weights at `path`, which may hold nothing else; on disk when this returns.

    Args:
        matrices: whole A and B of linear modules, under their names in memory.
        scale: what B A x is multiplied by.

    Raises:
        CheckpointError: the disk refused.
    """
    rank = next(len(tensor) for name, tensor in matrices if name.endswith(MATRICES[0]))
    facts = AdapterFacts(rank, scale * rank, source.path, None, str(dtype).removeprefix("torch."))
    specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in matrices]
    write_peft_folder(path / ADAPTER_FOLDER, specs, matrices, facts, checksum_file=CHECKSUMS)


def checked_adapter(path: str | Path) -> set[str]:
    """The matrices of the adapter in a folder of weights, by their names in memory, compared with their checksum.

    Raises:
        SyncError: it is not there, was cut or altered.
    """
    file = Path(path) / ADAPTER_FOLDER / TENSOR_FILE
    with _whole(Path(path)):
        _compare({file}, file.with_name(CHECKSUMS))
        return {name.removeprefix("base_model.model.").removesuffix(".weight") for name in read_header(file).tensors}


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (SlimeError, OSError, ValueError, AttributeError) as error:
        said = error.message if isinstance(error, SlimeError) else error
        raise SyncError(
            f"weights did not arrive: {path} is no whole folder of weights: {said}",
            field="rollout.weight_transport",
            hint="send the update again; engines must see run.dir under the trainer's path",
        ) from error


def _compare(files: Collection[Path], checksum_file: Path) -> None:
    checksums = json.loads(checksum_file.read_text())
    if {file.name for file in files} != checksums.keys():
        raise ValueError(f"{CHECKSUMS} is of other files")
    for file in files:
        if checksums[file.name] != record_of(file).sha256:
            raise ValueError(f"{file.name} was altered: its checksum is another one")


def read_weights(folder: ModelFolder, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of the manifest that the folder has, one at a time.

    Raises:
        SyncError: a file cannot be read.
    """
    with OpenTensors(folder.tensors) as files:
        for name, shape in manifest.items():
            parts = hub_parts(folder.model_type, name, shape)
            if parts[0].name not in folder.tensors:
                continue
            tensor = torch.empty(shape, dtype=files.dtype(parts[0].name))
            for part in parts:
                place = tensor if part.expert is None else tensor[part.expert, part.start : part.end]
                try:
                    files.read(part.name, 0, place.view(-1))
                except (ModelError, KeyError) as error:
                    raise SyncError(f"weights did not arrive: {error}", field="rollout.weight_transport") from error
            yield name, tensor
