"""Weights to Ray actors through Ray's object store, and the form that a bucket has in it."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np
import torch

from actors.cluster.ray_errors import store
from actors.workers.weight_update import WeightUpdate
from slimefsdp.errors import ResourceError, SyncError
from slimefsdp.io.safetensors_file import memory_of
from slimefsdp.weight_sync.gather import Bucket

# name, dtype, shape, bytes and perhaps their sha256: numpy has no bfloat16, and plain arrays travel through the object
# store without a copy
WireBucket = list[tuple[Any, ...]]


class ObjectStoreUpdate(WeightUpdate):
    """An update of Ray actors that have `begin`, `receive` and `commit`."""

    call = "receive"

    def _prepared(self, bucket: Bucket) -> Any:
        """The bucket in the store: once, for every actor to read."""
        try:
            return store(pack_bucket(bucket, with_digests=self._checksums), "weights")
        except ResourceError as error:  # not the caller's rank alone: what a receiver raises reaches all ranks
            raise SyncError(f"weights cannot be sent: {error.message}", field=error.field, hint=error.hint) from error

    def _send(self, ready: Any) -> None:
        self._call("receive", ready)


def pack_bucket(bucket: Bucket, *, with_digests: bool = False) -> WireBucket:
    """Contiguous tensors as bytes that share their memory, for as long as they live."""
    packed: WireBucket = []
    for name, tensor in bucket:
        data = np.frombuffer(memory_of(tensor), np.uint8)
        digest = (_sha256(data),) if with_digests else ()
        packed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data, *digest))
    return packed


def unpack_bucket(bucket: WireBucket) -> Bucket:
    """The inverse; the tensors are read-only views, to be copied from.

    Raises:
        SyncError: one was altered on the way, where they came with digests.
    """
    for name, _, _, data, *digest in bucket:
        if digest and [_sha256(data)] != digest:
            raise altered(f"tensor {name!r}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # nobody writes to them
        return [
            (name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape))
            for name, dtype, shape, data, *_ in bucket
        ]


def altered(what: str) -> SyncError:
    """The error of what has another checksum than was sent with it."""
    return SyncError(
        f"weights did not arrive: {what} was altered on the way: its checksum is another one",
        field="rollout.weight_checksums",
        hint="send the update again; where it comes back, look for faulty memory, disks or network cards",
    )


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()
