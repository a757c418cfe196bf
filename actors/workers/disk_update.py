"""Weights to engines by a folder on a disk that they and rank 0 see."""

from __future__ import annotations

import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from actors.workers.weight_update import WeightUpdate, in_thread
from actors.workers.weights_folder import write_adapter, write_weights
from slimefsdp.errors import SlimeError, SyncError
from slimefsdp.models.hf_folder import ModelFolder
from slimefsdp.models.peft_folder import MATRICES
from slimefsdp.training.build import compute_dtype
from slimefsdp.weight_sync.gather import Bucket
from slimefsdp.weight_sync.receive import Manifest

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer

WEIGHTS = "weights"  # below run.dir
_LOOK_S = 0.1


class DiskUpdate(WeightUpdate):
    """An update of engines (`actors.engines.protocol.Engine`), which keep their weights while the folder is written.

    Once all have committed, the folders of earlier updates are removed.

    Args:
        folder: for the folders of updates, and nothing else.
        source: the model's folder.
        dtype: of the tensors that are sent.
    """

    call = "receive_disk"
    keeps_nothing = False  # a thread writes a bucket, and may do so still when the update has failed

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, folder: Path, source: ModelFolder, dtype: torch.dtype,
        **how: bool,
    ) -> None:  # fmt: skip
        super().__init__(actors, timeout_s, **how)
        self._folder, self._source, self._dtype = folder.absolute(), source, dtype
        self._begun: tuple[Any, ...] = ()
        self._path = self._folder
        self._coming: SimpleQueue[tuple[Bucket, threading.Event] | None] = SimpleQueue()
        self._writing: Future[None]

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **how: bool
    ) -> DiskUpdate:
        """Makes an update of the trainer's weights; see `WeightUpdate`."""
        run_dir, dtype = trainer.config.run.dir, compute_dtype(trainer.config)
        assert run_dir is not None  # which the settings require
        return cls(
            actors, config.cluster.sync_timeout_s, folder=run_dir / WEIGHTS, source=trainer.folder, dtype=dtype, **how
        )

    def begin(
        self, version: int, manifest: Manifest, kept: frozenset[str] = frozenset(), adapter_scale: float | None = None
    ) -> None:
        """Starts to write the folder; engines are told when it is complete."""
        more = (kept,) if kept else ()
        self._begun = (version, manifest, *(more if adapter_scale is None else (kept, adapter_scale)))
        weights = {name: shape for name, shape in manifest.items() if name not in kept and not name.endswith(MATRICES)}
        self._path = self._folder / f"{version}_{uuid.uuid4().hex[:8]}"
        self._writing = in_thread(lambda: self._write(weights, adapter_scale), "weights on disk")

    def _write(self, weights: Manifest, adapter_scale: float | None) -> None:
        """Writes weights as they come, and then the matrices of an adapter, which come between them."""
        matrices: list[tuple[str, torch.Tensor]] = []

        def without_matrices() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._tensors():
                if name.endswith(MATRICES):
                    matrices.append((name, tensor.clone()))
                else:
                    yield name, tensor

        if weights:
            write_weights(self._path, weights, without_matrices(), self._source, self._dtype)
        else:  # matrices alone
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
        """Yields the tensors to write as they come."""
        while True:
            try:
                found = self._coming.get(timeout=self._left_s())
            except Empty:
                raise self._too_slow() from None
            if found is None:
                return
            bucket, is_written = found
            yield from bucket
            is_written.set()

    def _written(self, timeout_s: float) -> None:
        """Waits until the folder is written.

        Raises:
            SyncError: the folder could not be written, or not in time.
        """
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
