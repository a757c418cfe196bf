"""Sends one weight update to several Ray actors, with one deadline, and decides what becomes of those that fail.

A subclass says how a bucket travels. A new transport needs a subclass, its line in transports.py and its name in
config/rollout.py. To the trainer on rank 0 an update is one receiver that stands for all actors.
"""

from __future__ import annotations

import hashlib
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import ray
import torch

from actors.cluster.ray_errors import store
from actors.workers.futures import SLICE_S, CallFuture
from slimefsdp import heartbeat
from slimefsdp.errors import ResourceError, SlimeError, SyncError
from slimefsdp.io.safetensors_file import memory_of
from slimefsdp.results import FailedReceiver
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer

# name, dtype, shape, bytes and perhaps their sha256: numpy has no bfloat16, and plain arrays travel through the object
# store without a copy
WireBucket = list[tuple[Any, ...]]
_HERE_S = 5.0  # timeout of getting an answer that Ray reports as ready
AGAIN = "restart the receiver; none may sample until a later update reaches it"


class WeightUpdate:
    """The base of all transports.

    A bucket is sent while the next one is gathered: `receive` waits until the bucket before has arrived, and never for
    its own.

    Args:
        actors: the receivers.
        timeout_s: for the whole update, from `begin` to the end of `commit`. When a receiver is dropped, the others get
            this time again.
        drops: the update goes on without receivers that fail, as long as one is left; `failed` lists them. Otherwise
            every method raises SyncError when a receiver fails, dies or is late.
        checksums: receivers verify what they get.
    """

    call: ClassVar[str]  # the receivers' method by which this transport's weights arrive
    takes_device_tensors = False
    keeps_nothing = True  # of a bucket's tensors, once `_prepared` returns

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, drops: bool = False, checksums: bool = False
    ) -> None:
        self.failed: list[FailedReceiver] = []
        self._left = dict(enumerate(actors))
        self._timeout_s = timeout_s
        self._drops = drops
        self._checksums = checksums
        self._deadline = time.monotonic() + timeout_s
        self._sending: Future[None] | None = None

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **options: bool
    ) -> WeightUpdate:
        """Makes an update of the trainer's weights.

        Args:
            trainer: of rank 0.
            config: of the run.
            before: the last update by this transport, whose group or buffers may be taken over; None: it is the first.
            options: `drops` and `checksums`.
        """
        return cls(actors, config.cluster.sync_timeout_s, **options)

    def has_frozen(self, source: str) -> bool:
        """Returns whether all receivers are engines that have the frozen weights of `source`."""
        return self._all_have("has_frozen") and all(self._call("has_frozen", source).values())

    @property
    def takes_adapters(self) -> bool:
        """Returns whether all receivers may have adapters of their own, as embedded engines may."""
        return self._all_have("takes_adapters")

    def _all_have(self, name: str) -> bool:
        return all(hasattr(actor, name) for actor in self._left.values())

    def begin(self, version: int, manifest: Manifest, *more: Any) -> None:
        """Announces an update to all; `more` is what `stream_weights` says of frozen weights and adapters."""
        self._call("begin", version, manifest, *more)

    def receive(self, bucket: Bucket) -> None:
        """Begins to send a bucket, once the one before it has arrived."""
        ready = self._prepared(bucket)
        self._finish()
        self._sending = in_thread(lambda: self._send(ready), "weights")

    def commit(self, version: int) -> None:
        """Ends the update on all."""
        self._finish()
        self._call("commit", version)

    def _prepared(self, bucket: Bucket) -> Any:
        """Prepares the argument of `_send`, while the bucket before is on its way."""
        raise NotImplementedError

    def _send(self, ready: Any) -> None:
        """Sends a prepared bucket, by default the arguments of the receivers' `call`; returns when all have it."""
        self._call(self.call, *ready)

    def _finish(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    # ------------------------------------------------------------------ calls and their errors

    def _call(self, name: str, *args: Any) -> dict[int, Any]:
        """Calls a method of all receivers; returns the answers of those that did not fail, by receiver."""
        waiting = {getattr(actor, name).remote(*args): index for index, actor in self._left.items()}
        answers, errors = self._answers(waiting, name, self._deadline, lambda found: bool(found) and not self._drops)
        if self._drops or not errors:
            errors |= {index: self._late(index, name) for index in waiting.values()}
        self._drop({index: as_sync_error(error, index, name) for index, error in errors.items()})
        return answers

    def _answers(
        self, waiting: dict[Any, int], name: str, deadline: float, is_over: Callable[[dict[int, Exception]], bool]
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Waits for answers until all are there, the deadline has passed, or `is_over` says so.

        Args:
            waiting: receivers by their pending call; keeps those that have not answered.
            is_over: is given the errors so far.

        Returns:
            The answers and the errors, by receiver.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        while waiting and not is_over(errors):
            left_s = deadline - time.monotonic()
            ready = ray.wait(list(waiting), num_returns=1, timeout=min(SLICE_S, max(0.0, left_s)))[0]
            for ref in ready:
                index = waiting.pop(ref)
                answer = CallFuture([ref], name=name, timeout_s=max(_HERE_S, left_s), first_only=True, first_rank=index)
                try:
                    answers[index] = answer.result()
                except Exception as error:  # a receiver can raise anything
                    errors[index] = error
            if not ready and left_s <= 0:
                break
        return answers, errors

    def _drop(self, errors: Mapping[int, SyncError]) -> None:
        """Drops these receivers, if the update may go on without them.

        Raises:
            SyncError: it may not, or none is left.
        """
        if not errors:
            return
        for index, error in sorted(errors.items()):
            if not self._drops:
                raise error
            del self._left[index]
            self.failed.append(FailedReceiver(index, error))
        if not self._left:
            first, *others = self.failed
            first.error.others += tuple(f"receiver {other.receiver}: {other.error.message}" for other in others)
            raise first.error
        self._deadline = time.monotonic() + self._timeout_s
        heartbeat.tick()

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self, index: int, name: str) -> SyncError:
        return SyncError(
            f"weights did not arrive: receiver {index} has not answered {name} after {self._timeout_s:g} s",
            field="cluster.sync_timeout_s",
            hint="restart the receiver, or raise cluster.sync_timeout_s",
        )


def as_sync_error(error: Exception, index: int, name: str) -> SyncError:
    """Turns whatever a receiver raised into the error that all sending ranks raise."""
    if isinstance(error, SyncError):
        return error
    cause = error.message if isinstance(error, SlimeError) else error
    problem = f"weights did not arrive: {name} failed at receiver {index}: {cause}"
    sync_error = SyncError(problem, field="update_weights", hint=AGAIN)
    sync_error.__cause__ = error
    return sync_error


def in_thread(action: Callable[[], Any], name: str) -> Future[Any]:
    """Runs an action on a thread of its own that does not keep the process alive."""
    done: Future[Any] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # raised by `result`
            done.set_exception(error)

    threading.Thread(target=act, name=name, daemon=True).start()
    return done


# ---------------------------------------------------------------------- through Ray's object store


class ObjectStoreUpdate(WeightUpdate):
    """An update of Ray actors that have `begin`, `receive` and `commit`, through Ray's object store."""

    call = "receive"

    def _prepared(self, bucket: Bucket) -> Any:
        """Stores the bucket once, for every actor to read."""
        try:
            return (store(pack_bucket(bucket, with_digests=self._checksums), "weights"),)
        except ResourceError as error:  # a receiver's errors reach all ranks, others would stay on this one
            raise SyncError(f"weights cannot be sent: {error.message}", field=error.field, hint=error.hint) from error


def pack_bucket(bucket: Bucket, *, with_digests: bool = False) -> WireBucket:
    """Returns contiguous tensors as bytes that share their memory."""
    packed: WireBucket = []
    for name, tensor in bucket:
        data = np.frombuffer(memory_of(tensor), np.uint8)
        digest = (_sha256(data),) if with_digests else ()
        packed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data, *digest))
    return packed


def unpack_bucket(bucket: WireBucket) -> Bucket:
    """Returns the tensors that `pack_bucket` packed, as read-only views, to be copied from.

    Raises:
        SyncError: a tensor was altered in transit, if they came with digests.
    """
    for name, _, _, data, *digest in bucket:
        if digest and [_sha256(data)] != digest:
            raise altered(f"tensor {name!r}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")  # the views are only read
        return [
            (name, torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape))
            for name, dtype, shape, data, *_ in bucket
        ]


def altered(what: str) -> SyncError:
    """Returns the error for data whose checksum differs from the sender's."""
    return SyncError(
        f"weights did not arrive: {what} was altered on the way: its checksum is another one",
        field="rollout.weight_checksums",
        hint="send the update again; where it comes back, look for faulty memory, disks or network cards",
    )


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()
