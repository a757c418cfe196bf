"""Sends one weight update to several Ray actors, with one deadline, and decides what becomes of those that fail.

A subclass says how a bucket travels. A new transport needs a module with its subclass, a line in transports.py and its
name in config/rollout.py. To the trainer on rank 0 an update is one receiver that stands for all actors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import ray

from actors.workers.futures import SLICE_S, CallFuture
from slimefsdp import heartbeat
from slimefsdp.errors import SlimeError, SyncError
from slimefsdp.results import FailedReceiver
from slimefsdp.weight_sync.gather import Bucket
from slimefsdp.weight_sync.receive import Manifest

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer

_HERE_S = 5.0  # for an answer that Ray says is here
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
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **how: bool
    ) -> WeightUpdate:
        """Makes an update of the trainer's weights.

        Args:
            trainer: of rank 0.
            config: of the run.
            before: the last update by this transport, whose group or buffers may be taken over; None: it is the first.
            how: `drops` and `checksums`.
        """
        return cls(actors, config.cluster.sync_timeout_s, **how)

    def has_frozen(self, source: str) -> bool:
        """Whether all receivers are engines that have the frozen weights of `source`."""
        return self._all_have("has_frozen") and all(self._call("has_frozen", source).values())

    @property
    def takes_adapters(self) -> bool:
        """Whether all receivers have adapters of their own, as embedded engines may."""
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
        """Prepares what `_send` is given, while the bucket before is on its way."""
        raise NotImplementedError

    def _send(self, ready: Any) -> None:
        """Sends a prepared bucket; returns when all receivers have it."""
        raise NotImplementedError

    def _finish(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

    # ------------------------------------------------------------------ calls, and what comes of them

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
            found = ray.wait(list(waiting), num_returns=1, timeout=min(SLICE_S, max(0.0, left_s)))[0]
            for ref in found:
                index = waiting.pop(ref)
                one = CallFuture([ref], name=name, timeout_s=max(_HERE_S, left_s), first_only=True, first_rank=index)
                try:
                    answers[index] = one.result()
                except Exception as error:  # whatever a receiver raises
                    errors[index] = error
            if not found and left_s <= 0:
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
            first.error.others += tuple(f"receiver {one.receiver}: {one.error.message}" for one in others)
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
    said = error.message if isinstance(error, SlimeError) else error
    made = SyncError(
        f"weights did not arrive: {name} failed at receiver {index}: {said}", field="update_weights", hint=AGAIN
    )
    made.__cause__ = error
    return made


def in_thread(action: Callable[[], Any], name: str) -> Future[Any]:
    """Runs an action on a thread of its own that does not keep the process alive."""
    done: Future[Any] = Future()

    def act() -> None:
        try:
            done.set_result(action())
        except BaseException as error:  # for whoever waits
            done.set_exception(error)

    threading.Thread(target=act, name=name, daemon=True).start()
    return done
