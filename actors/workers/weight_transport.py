"""Weights through Ray's object store: one copy in, any number of receivers out, every wait with a deadline."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from actors.cluster.ray_errors import store
from actors.workers.futures import CallFuture
from slimefsdp.errors import ResourceError, SyncError, WorkerHung
from slimefsdp.weight_sync.gather import Bucket
from slimefsdp.weight_sync.receive import Manifest

# name, dtype, shape and bytes: numpy has no bfloat16, and plain arrays travel through the object store without a copy
WireBucket = list[tuple[str, str, tuple[int, ...], np.ndarray]]


class ObjectStoreReceiver:
    """Sends to several Ray actors that have `begin`, `receive` and `commit`; on rank 0 it stands for all of them.

    Args:
        timeout_s: for one whole update, from `begin` to the end of `commit`.

    Every method raises SyncError when a receiver fails, dies or is late.
    """

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors = actors
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def begin(self, version: int, manifest: Manifest) -> None:
        """Announces an update to all."""
        self._deadline = time.monotonic() + self._timeout_s
        self._all("begin", version, manifest)

    def receive(self, bucket: Bucket) -> None:
        """Stores the bucket once and has every actor read it."""
        try:
            stored = store(pack_bucket(bucket), "weights")
        except ResourceError as error:  # not the caller's rank alone: what a receiver raises reaches all ranks
            raise SyncError(f"weights cannot be sent: {error.message}", field=error.field, hint=error.hint) from error
        self._all("receive", stored)

    def commit(self, version: int) -> None:
        """Ends the update on all."""
        self._all("commit", version)

    def _all(self, name: str, *args: Any) -> None:
        refs = [getattr(actor, name).remote(*args) for actor in self._actors]
        try:
            left_s = max(0.0, self._deadline - time.monotonic())
            CallFuture(refs, name=name, timeout_s=left_s, first_only=False).result()
        except SyncError:
            raise
        except WorkerHung as error:
            raise SyncError(
                f"weights did not arrive: receiver {error.rank} has not answered {name} after {self._timeout_s:g} s",
                field="cluster.sync_timeout_s",
                hint="restart the receiver, or raise cluster.sync_timeout_s",
            ) from error
        except Exception as error:  # whatever a receiver raises, the sending ranks must all learn of it as one error
            raise SyncError(
                f"weights did not arrive: {name} failed at a receiver: {error}",
                field="update_weights",
                hint="restart the receiver; none may sample until a later update reaches it",
            ) from error


def pack_bucket(bucket: Bucket) -> WireBucket:
    """Tensors as bytes that share their memory."""
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.view(torch.uint8).numpy())
        for name, tensor in bucket
    ]


def unpack_bucket(bucket: WireBucket) -> Bucket:
    """The inverse; the tensors are read-only views, to be copied from."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes to them
        return [
            (name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape))
            for name, dtype, shape, data in bucket
        ]
