"""Weights to Ray actors, through Ray's object store or by broadcast: every wait has a deadline."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from actors.cluster.ray_errors import store
from actors.workers.futures import CallFuture
from slimefsdp.errors import ResourceError, SyncError, WorkerHung
from slimefsdp.weight_sync.broadcast import BroadcastError, BroadcastGroup, TorchBroadcastGroup
from slimefsdp.weight_sync.gather import Bucket
from slimefsdp.weight_sync.receive import Manifest

# name, dtype, shape and bytes: numpy has no bfloat16, and plain arrays travel through the object store without a copy
WireBucket = list[tuple[str, str, tuple[int, ...], np.ndarray]]


class _Update:
    """What both transports share: an update to several Ray actors, each call with what is left of one deadline.

    A bucket is sent while the next one is gathered: `receive` waits for the one before it, and never for its own.
    """

    takes_device_tensors = False

    def __init__(self, actors: Sequence[Any], timeout_s: float) -> None:
        self._actors = list(actors)
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._sending: Future[None] | None = None

    def begin(self, version: int, manifest: Manifest) -> None:
        """Announces an update to all."""
        self._deadline = time.monotonic() + self._timeout_s
        self._all("begin", version, manifest)

    def receive(self, bucket: Bucket) -> None:
        """Begins to send a bucket, once the one before it is there."""
        self._finish()
        sending: Future[None] = Future()
        threading.Thread(target=self._send_aside, args=(bucket, sending), name="weights", daemon=True).start()
        self._sending = sending

    def commit(self, version: int) -> None:
        """Ends the update on all."""
        self._finish()
        self._all("commit", version)

    def _send(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def _send_aside(self, bucket: Bucket, sending: Future[None]) -> None:
        try:
            self._send(bucket)
            sending.set_result(None)
        except BaseException as error:  # for whoever waits
            sending.set_exception(error)

    def _finish(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    def _all(self, name: str, *args: Any) -> None:
        self._answers([getattr(actor, name).remote(*args) for actor in self._actors], name)

    def _answers(self, refs: Sequence[Any], name: str) -> list[Any]:
        try:
            found: list[Any] = CallFuture(refs, name=name, timeout_s=self._left_s(), first_only=False).result()
            return found
        except SyncError:
            raise
        except WorkerHung as error:
            raise self._late(f"receiver {error.rank} has not answered {name}") from error
        except Exception as error:  # whatever a receiver raises, the sending ranks must all learn of it as one error
            raise SyncError(
                f"weights did not arrive: {name} failed at a receiver: {error}",
                field="update_weights",
                hint="restart the receiver; none may sample until a later update reaches it",
            ) from error

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self, what: str) -> SyncError:
        return SyncError(
            f"weights did not arrive: {what} after {self._timeout_s:g} s",
            field="cluster.sync_timeout_s",
            hint="restart the receiver, or raise cluster.sync_timeout_s",
        )


class ObjectStoreReceiver(_Update):
    """Sends to several Ray actors that have `begin`, `receive` and `commit`; on rank 0 it stands for all of them.

    Args:
        timeout_s: for one whole update, from `begin` to the end of `commit`.

    Every method raises SyncError when a receiver fails, dies or is late.
    """

    def _send(self, bucket: Bucket) -> None:
        """Stores the bucket once and has every actor read it."""
        try:
            stored = store(pack_bucket(bucket), "weights")
        except ResourceError as error:  # not the caller's rank alone: what a receiver raises reaches all ranks
            raise SyncError(f"weights cannot be sent: {error.message}", field=error.field, hint=error.hint) from error
        self._all("receive", stored)


class BroadcastReceiver(_Update):
    """Broadcasts to engines (`actors.rollout.protocol.Engine`) in a group that they and rank 0 form.

    The group stays from update to update; where one has failed, the next one forms another.

    Args:
        address: of this machine, as engines reach it.
        device: of the tensors that are sent; NCCL on CUDA, else gloo.
        is_shared: engines are on the same device, where NCCL takes one process alone; gloo copies through the host.
        timeout_s: for one whole update, from `begin` to the end of `commit`.

    Every method raises SyncError when an engine fails, dies or is late.
    """

    takes_device_tensors = True

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, address: str, device: torch.device, is_shared: bool = False
    ) -> None:
        super().__init__(actors, timeout_s)
        self._address = address
        self._backend = "nccl" if device.type == "cuda" and not is_shared else "gloo"
        self._group: BroadcastGroup | None = None

    def serves(self, actors: Sequence[Any]) -> bool:
        """Whether these are the engines of its group, in this order."""
        return self._group is not None and self._actors == list(actors)

    def begin(self, version: int, manifest: Manifest) -> None:
        """Announces an update to all, after the group has formed."""
        self._deadline = time.monotonic() + self._timeout_s
        if self._group is None:
            self._form()
        super().begin(version, manifest)

    def close(self) -> None:
        """Leaves the group; idempotent."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _form(self) -> None:
        infos = self._answers([one.info.remote() for one in self._actors], "info")
        counts = [info.processes for info in infos]
        made = TorchBroadcastGroup if infos[0].group == "torch" else BroadcastGroup  # engines of a run are of one kind
        firsts = [1 + sum(counts[:index]) for index in range(len(counts))]
        world_size, backend = 1 + sum(counts), self._backend
        listener = socket.create_server((self._address, 0))
        port = listener.getsockname()[1]
        joining = [
            actor.join.remote(self._address, port, first, world_size, backend, self._timeout_s)
            for actor, first in zip(self._actors, firsts, strict=True)
        ]
        group = self._beside(
            lambda: made(self._address, port, 0, world_size, backend, self._timeout_s, listener=listener),
            joining,
            "join",
        )
        self._group = group

    def _send(self, bucket: Bucket) -> None:
        group = self._group
        assert group is not None
        layout, flat = group.packed(bucket)
        receiving = [actor.receive_broadcast.remote(layout) for actor in self._actors]
        try:
            self._beside(lambda: group.broadcast(flat), receiving, "receive_broadcast")
        except SyncError:
            self.close()
            raise

    def _beside(self, action: Callable[[], Any], refs: Sequence[Any], name: str) -> Any:
        """What an action returns that ends when engines do their part; it is not waited for where one has failed."""
        done: Future[Any] = Future()

        def act() -> None:
            try:
                done.set_result(action())
            except BaseException as error:  # for whoever waits
                done.set_exception(error)

        threading.Thread(target=act, name="broadcast", daemon=True).start()
        self._answers(refs, name)
        try:
            return done.result(timeout=self._left_s())
        except TimeoutError:
            raise self._late(f"{name} has not ended here") from None
        except BroadcastError as error:
            raise SyncError(
                f"weights did not arrive: {error}",
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
