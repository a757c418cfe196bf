"""Sends one weight update to several Ray actors with one deadline, and drops or reports actors that fail.

A subclass of `WeightUpdate` is a transport, which defines how a bucket travels. A new transport also needs a line in
transports.py and its name in config/rollout.py. The trainer on rank 0 uses an update as if it were a single receiver.
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

WireBucket = list[tuple[Any, ...]]
"""(name, dtype, shape, data) of each tensor, and a sha256 if requested.

The data is an array of bytes: numpy has no bfloat16, and Ray's object store hands arrays over without a copy.
"""
_READY_S = 5.0  # timeout of getting an answer that Ray reports as ready
AGAIN = "restart the receiver; none may sample until a later update reaches it"


class WeightUpdate:
    """The base class of all transports.

    A bucket is sent while the trainer gathers the next bucket: `receive` only waits until the previous bucket arrived.

    Args:
        actors: the receivers.
        timeout_s: limit on the whole update, from `begin` to the end of `commit`. The time starts again when a receiver
            is dropped.
        drops: True means that the update continues without receivers that fail, and lists them in `failed`, until no
            receiver is left. False means that every method raises SyncError if a receiver fails, dies or is late.
        checksums: whether receivers verify the weights' checksums.
    """

    call: ClassVar[str]  # the receivers' method by which this transport's weights arrive
    takes_device_tensors = False
    keeps_nothing = True  # whether a bucket's tensors may be overwritten once `_prepared` returns

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
        """Returns an update of the trainer's weights.

        Args:
            trainer: the Trainer of rank 0.
            config: the settings of the run.
            before: the previous update by this transport, or None; its group or buffers may be used again.
            options: `drops` (go on without failed receivers) and `checksums`, as in the constructor.
        """
        return cls(actors, config.cluster.sync_timeout_s, **options)

    def has_frozen(self, source: str) -> bool:
        """Returns whether all receivers are engines that already have the frozen weights of `source`."""
        return self._all_have("has_frozen") and all(self._call("has_frozen", source).values())

    @property
    def takes_adapters(self) -> bool:
        """Returns whether all receivers are engines that may keep adapters separate from the weights."""
        return self._all_have("takes_adapters")

    def _all_have(self, name: str) -> bool:
        return all(hasattr(actor, name) for actor in self._left.values())

    def begin(self, version: int, manifest: Manifest, *more: Any) -> None:
        """Announces an update to all receivers.

        Args:
            more: the names of frozen weights that are not sent again, and the adapters' scale, if there are any.
        """
        self._call("begin", version, manifest, *more)

    def receive(self, bucket: Bucket) -> None:
        """Waits until the previous bucket has arrived, and begins to send this bucket."""
        ready = self._prepared(bucket)
        self._finish()
        self._sending = in_thread(lambda: self._send(ready), "weights")

    def commit(self, version: int) -> None:
        """Ends the update: has every receiver commit this version."""
        self._finish()
        self._call("commit", version)

    def _prepared(self, bucket: Bucket) -> Any:
        """Returns the argument of `_send` for a bucket; called while the previous bucket is still being sent."""
        raise NotImplementedError

    def _send(self, ready: Any) -> None:
        """Sends a prepared bucket and waits until all receivers have it.

        In this base class, `ready` has the arguments of the receivers' method `call`.
        """
        self._call(self.call, *ready)

    def _finish(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    # ------------------------------------------------------------------ calls and their errors

    def _call(self, name: str, *args: Any) -> dict[int, Any]:
        """Calls a method of all receivers; returns index of the receiver -> answer, without receivers that failed."""
        waiting = {getattr(actor, name).remote(*args): index for index, actor in self._left.items()}
        answers, errors = self._answers(waiting, name, self._deadline, lambda errors: bool(errors) and not self._drops)
        if self._drops or not errors:
            errors |= {index: self._late(index, name) for index in waiting.values()}
        self._drop({index: as_sync_error(error, index, name) for index, error in errors.items()})
        return answers

    def _answers(
        self, waiting: dict[Any, int], name: str, deadline: float, is_over: Callable[[dict[int, Exception]], bool]
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Waits until all receivers have answered, the deadline has passed, or `is_over` returns True.

        Args:
            waiting: reference of a pending call -> index of its receiver; entries with an answer are removed.
            deadline: a time of time.monotonic().
            is_over: is called with the errors so far.

        Returns:
            Index of the receiver -> answer, and index of the receiver -> error.
        """
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        while waiting and not is_over(errors):
            left_s = deadline - time.monotonic()
            ready = ray.wait(list(waiting), num_returns=1, timeout=min(SLICE_S, max(0.0, left_s)))[0]
            for ref in ready:
                index = waiting.pop(ref)
                limit_s = max(_READY_S, left_s)
                answer = CallFuture([ref], name=name, timeout_s=limit_s, first_only=True, first_rank=index)
                try:
                    answers[index] = answer.result()
                except Exception as error:  # a receiver can raise anything
                    errors[index] = error
            if not ready and left_s <= 0:
                break
        return answers, errors

    def _drop(self, errors: Mapping[int, SyncError]) -> None:
        """Drops the receivers that have errors; raises an error instead if `drops` is False or no receiver is left."""
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
    """Turns the error of a receiver into the error that all sending ranks raise."""
    if isinstance(error, SyncError):
        return error
    cause = error.message if isinstance(error, SlimeError) else error
    problem = f"weights did not arrive: {name} failed at receiver {index}: {cause}"
    sync_error = SyncError(problem, field="update_weights", hint=AGAIN)
    sync_error.__cause__ = error
    return sync_error


def in_thread(action: Callable[[], Any], name: str) -> Future[Any]:
    """Runs an action in a new daemon thread; returns the future of its result."""
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
    """An update through Ray's object store, to any Ray actors that have `begin`, `receive` and `commit`."""

    call = "receive"

    def _prepared(self, bucket: Bucket) -> Any:
        try:
            return (store(pack_bucket(bucket, with_digests=self._checksums), "weights"),)
        except ResourceError as error:  # all ranks raise a SyncError of rank 0; only rank 0 raises other errors
            raise SyncError(f"weights cannot be sent: {error.message}", field=error.field, hint=error.hint) from error


def pack_bucket(bucket: Bucket, *, with_digests: bool = False) -> WireBucket:
    """Returns contiguous tensors as arrays of bytes, which share the tensors' memory."""
    packed: WireBucket = []
    for name, tensor in bucket:
        data = np.frombuffer(memory_of(tensor), np.uint8)
        digest = (_sha256(data),) if with_digests else ()
        packed.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data, *digest))
    return packed


def unpack_bucket(bucket: WireBucket) -> Bucket:
    """Returns the tensors that `pack_bucket` packed, as views that must only be read.

    Raises:
        SyncError: a tensor does not have the digest that it was sent with.
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
    """Returns the error for received data whose checksum differs from the sender's."""
    return SyncError(
        f"weights did not arrive: {what} was altered on the way: its checksum is another one",
        field="rollout.weight_checksums",
        hint="send the update again; where it comes back, look for faulty memory, disks or network cards",
    )


def _sha256(data: np.ndarray) -> str:
    return hashlib.sha256(data.data).hexdigest()
