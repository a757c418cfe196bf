"""Sends weights to engines by a folder on a disk that both rank 0 and the engines can access.

The folder appears only when it is complete, with checksums. `AutoModelForCausalLM` can open the folder, unless frozen
weights are left out because the engines have them. An adapter is a subfolder in peft's format.
"""

from __future__ import annotations

import json
import shutil
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from actors.workers.weight_update import WeightUpdate, in_thread
from slimefsdp.checkpoint.export import AdapterFacts, write_model_folder, write_peft_folder
from slimefsdp.errors import ModelError, SlimeError, SyncError
from slimefsdp.io.files import record_of
from slimefsdp.io.safetensors_file import TensorSpec
from slimefsdp.io.safetensors_header import read_header
from slimefsdp.models.hf_folder import ModelFolder, hub_parts, read_model_folder
from slimefsdp.models.load_weights import OpenTensors
from slimefsdp.models.peft_folder import ADAPTER_FOLDER, MATRICES, TENSOR_FILE
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer

WEIGHTS = "weights"  # subfolder of run.dir
CHECKSUMS = "weights_sha256.json"
_LOOK_S = 0.1


class DiskUpdate(WeightUpdate):
    """A weight update by a folder; engines keep sampling with their old weights while the folder is written.

    When all engines have committed the update, the folders of earlier updates are removed.

    Args:
        folder: the parent of the folders of all updates, without other contents.
        source: the model's folder.
        dtype: the dtype of the sent tensors.
    """

    call = "receive_disk"
    keeps_nothing = False  # a thread writes a bucket's tensors, maybe even after the update has failed

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, folder: Path, source: ModelFolder, dtype: torch.dtype,
        **options: bool,
    ) -> None:  # fmt: skip
        super().__init__(actors, timeout_s, **options)
        self._folder, self._source, self._dtype = folder.absolute(), source, dtype
        self._begun: tuple[Any, ...] = ()
        self._path = self._folder
        self._coming: SimpleQueue[tuple[Bucket, threading.Event] | None] = SimpleQueue()
        self._writing: Future[None]

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **options: bool
    ) -> DiskUpdate:
        from slimefsdp.training.build import compute_dtype  # engines also import this file, but do not need this

        run_dir, dtype = trainer.config.run.dir, compute_dtype(trainer.config)
        assert run_dir is not None  # which the settings require
        return cls(
            actors,
            config.cluster.sync_timeout_s,
            folder=run_dir / WEIGHTS,
            source=trainer.folder,
            dtype=dtype,
            **options,
        )

    def begin(
        self, version: int, manifest: Manifest, kept: frozenset[str] = frozenset(), adapter_scale: float | None = None
    ) -> None:
        """Begins to write the folder; `commit` announces the update to the engines."""
        more = (kept,) if kept else ()
        self._begun = (version, manifest, *(more if adapter_scale is None else (kept, adapter_scale)))
        weights = {name: shape for name, shape in manifest.items() if name not in kept and not name.endswith(MATRICES)}
        self._path = self._folder / f"{version}_{uuid.uuid4().hex[:8]}"
        self._writing = in_thread(lambda: self._write(weights, adapter_scale), "weights on disk")

    def _write(self, weights: Manifest, adapter_scale: float | None) -> None:
        """Writes weights as they arrive; keeps an adapter's matrices in memory, and writes the matrices at the end."""
        matrices: list[tuple[str, torch.Tensor]] = []

        def without_matrices() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._tensors():
                if name.endswith(MATRICES):
                    matrices.append((name, tensor.clone()))
                else:
                    yield name, tensor

        if weights:
            write_weights(self._path, weights, without_matrices(), self._source, self._dtype)
        else:  # only the matrices of an adapter are sent
            weightless = list(without_matrices())
            assert not weightless
        if adapter_scale is not None:
            write_adapter(self._path, matrices, adapter_scale, self._source, self._dtype)

    def commit(self, version: int) -> None:
        """Completes the folder, has all engines load it, and removes the folders of earlier updates."""
        self._finish()
        self._coming.put(None)
        self._written(self._left_s())
        try:
            self._call("begin", *self._begun)
            self._call("receive_disk", str(self._path))
            self._call("commit", version)
        except BaseException:
            shutil.rmtree(self._path, ignore_errors=True)
            raise
        for other in self._folder.iterdir():
            if other != self._path:
                shutil.rmtree(other, ignore_errors=True)

    def _prepared(self, bucket: Bucket) -> Any:
        return bucket

    def _send(self, ready: Any) -> None:
        is_written = threading.Event()
        self._coming.put((ready, is_written))
        while not is_written.wait(_LOOK_S):
            if self._writing.done() or self._left_s() == 0:
                self._written(0.0)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of each bucket as it arrives, until `commit`."""
        while True:
            try:
                item = self._coming.get(timeout=self._left_s())
            except Empty:
                raise self._too_slow() from None
            if item is None:
                return
            bucket, is_written = item
            yield from bucket
            is_written.set()

    def _written(self, timeout_s: float) -> None:
        """Waits until the folder is written; raises SyncError if writing failed or took too long."""
        try:
            self._writing.result(timeout=timeout_s)
        except TimeoutError:
            raise self._too_slow() from None
        except SyncError:
            raise
        except SlimeError as error:
            raise SyncError(f"weights cannot be written: {error.message}", field="run.dir", hint=error.hint) from error

    def _too_slow(self) -> SyncError:
        return SyncError(
            f"weights were not written to {self._path} within {self._timeout_s:g} s",
            field="cluster.sync_timeout_s", hint="use a faster disk, or raise the timeout",
        )  # fmt: skip


def write_weights(
    path: Path, manifest: Manifest, tensors: Iterable[tuple[str, torch.Tensor]], source: ModelFolder, dtype: torch.dtype
) -> None:
    """Writes a new folder at `path` and waits until the disk has it. After any error, no folder is left.

    Args:
        manifest: name -> shape of each tensor, in the order of `tensors`.
        source: the folder to copy config.json and the tokenizer's files from.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    specs = [TensorSpec(name, dtype, shape) for name, shape in manifest.items()]
    write_model_folder(path, specs, tensors, source, checksum_file=CHECKSUMS)


def checked_weights(path: str | Path) -> ModelFolder:
    """Compares a folder's files with its checksums, and returns the folder.

    Raises:
        SyncError: the folder does not exist, or was cut or altered.
    """
    with _whole(Path(path)):
        folder = read_model_folder(path)
        _compare({entry.file for entry in folder.tensors.values()}, folder.path / CHECKSUMS)
    return folder


def write_adapter(
    path: Path, matrices: Sequence[tuple[str, torch.Tensor]], scale: float, source: ModelFolder, dtype: torch.dtype
) -> None:
    """Writes an adapter into the folder of an update at `path`, and waits until the disk has it.

    Args:
        matrices: (name in memory, tensor) of the unsharded matrices A and B of linear modules.
        scale: the factor on B A x.

    Raises:
        CheckpointError: the disk is full or fails.
    """
    rank = next(len(tensor) for name, tensor in matrices if name.endswith(MATRICES[0]))
    facts = AdapterFacts(rank, scale * rank, source.path, None, str(dtype).removeprefix("torch."))
    specs = [TensorSpec(name, dtype, tuple(tensor.shape)) for name, tensor in matrices]
    write_peft_folder(path / ADAPTER_FOLDER, specs, matrices, facts, checksum_file=CHECKSUMS)


def checked_adapter(path: str | Path) -> set[str]:
    """Compares the adapter in the folder of an update with its checksum; returns the matrices' names in memory.

    Raises:
        SyncError: the adapter does not exist, or was cut or altered.
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
        cause = error.message if isinstance(error, SlimeError) else error
        raise SyncError(
            f"weights did not arrive: {path} is not a whole folder of weights: {cause}",
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
    """Yields those tensors of the manifest that the folder has.

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
                rows = tensor if part.expert is None else tensor[part.expert, part.start : part.end]
                try:
                    files.read(part.name, 0, rows.view(-1))
                except (ModelError, KeyError) as error:
                    cause = error.message if isinstance(error, ModelError) else f"{part.name} is missing"
                    raise SyncError(
                        f"weights did not arrive: {cause}",
                        field="rollout.weight_transport",
                        hint="send the update again",
                    ) from error
            yield name, tensor
