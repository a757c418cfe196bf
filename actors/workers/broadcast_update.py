"""Sends weights to engines by broadcast, in a process group of rank 0 and the engines' processes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import ray
import torch
from ray.exceptions import RayError

from actors.workers.weight_update import AGAIN, WeightUpdate, as_sync_error, in_thread
from slimefsdp.errors import SyncError
from slimefsdp.weight_sync.broadcast import BroadcastGroup, Rendezvous, TorchBroadcastGroup
from slimefsdp.weight_sync.buckets import Bucket, digest_of
from slimefsdp.weight_sync.progress import Manifest
from slimefsdp.weight_sync.send import BeginAgain

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer

_FREED_S = 10.0  # limit on the time in which engines notice that the group was closed, and answer
_PING_S = 5.0


class BroadcastUpdate(WeightUpdate):
    """A weight update by broadcast. Later updates of the same engines use the same process group.

    An engine that fails breaks the group. If the update continues without this engine, the remaining members form a new
    group, and `BeginAgain` asks the sender to repeat the whole update. If it is not known which engine failed, all
    members try once more.

    Args:
        address: the address at which engines reach this machine.
        device: the device of the sent tensors; the group uses NCCL on CUDA, otherwise gloo.
        is_shared: whether engines use the trainer's GPUs. Then the group uses gloo, since NCCL allows only one process
            per GPU.
        before: the previous update by this transport. Its group is used again for the same engines, otherwise closed.
    """

    call = "receive_broadcast"
    takes_device_tensors = True

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, address: str, device: torch.device,
        is_shared: bool = False, before: BroadcastUpdate | None = None, **options: bool,
    ) -> None:  # fmt: skip
        super().__init__(actors, timeout_s, **options)
        self._address = address
        self._backend = "nccl" if device.type == "cuda" and not is_shared else "gloo"
        self._group: BroadcastGroup | None = None
        self._suspects: set[int] = set()
        if before is not None and list(before._left.values()) == list(actors):
            self._group, before._group = before._group, None
        elif before is not None:
            before.close()

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **options: bool
    ) -> BroadcastUpdate:
        address, is_shared = address_for(config.rollout.engine_urls), config.rollout.placement == "colocated"
        timeout_s, device = config.cluster.sync_timeout_s, trainer.mesh.device
        return cls(actors, timeout_s, address=address, device=device, is_shared=is_shared, before=before, **options)

    def begin(self, version: int, manifest: Manifest, *more: Any) -> None:
        """Forms the group if there is none, and announces an update to all engines."""
        while True:
            while self._group is None:
                self._form()
            members = list(self._left)
            self._call("begin", version, manifest, *more)
            if members == list(self._left):
                return
            self.close()

    def commit(self, version: int) -> None:
        """Ends the update: has every engine commit this version. Closes the group if an engine failed."""
        members = list(self._left)
        super().commit(version)
        if members != list(self._left):
            self.close()

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _form(self) -> None:
        """Forms the group; if that fails, drops the engines that caused the failure, and leaves `_group` None."""
        infos = self._call("info")
        firsts, world_size = {}, 1
        for index, info in infos.items():
            firsts[index], world_size = world_size, world_size + info.processes
        kind = TorchBroadcastGroup if next(iter(infos.values())).group == "torch" else BroadcastGroup
        try:
            listener = socket.create_server((self._address, 0))
        except OSError as error:
            problem = f"weights cannot be sent: engines cannot be waited for at {self._address}: {error}"
            hint = "see that the machine has this address, and a free port and file descriptor"
            raise SyncError(problem, field="update_weights", hint=hint) from error
        port, is_given_up = listener.getsockname()[1], threading.Event()
        meeting = Rendezvous(self._address, port, 0, world_size, self._backend, self._timeout_s)

        def form() -> BroadcastGroup:
            return kind(*meeting, listener=listener, is_given_up=is_given_up)

        joining = {
            self._left[index].join.remote(meeting._replace(rank=first)): index for index, first in firsts.items()
        }
        forming = in_thread(form, "join")
        errors = self._together(forming, joining, "join", is_given_up.set)
        if errors is None:
            self._group = forming.result(timeout=0)
            return
        missing = getattr(forming.exception(timeout=0) if forming.done() else None, "missing", ())
        absent = {
            index
            for index, first in firsts.items()
            if any(first <= rank < first + infos[index].processes for rank in missing)
        }
        self._blame(errors, joining, set() if self._left_s() else absent, "join")

    def _prepared(self, bucket: Bucket) -> Any:
        group = self._group  # read once: the thread that sends the previous bucket may close the group
        if group is None:  # the previous bucket failed, and `_finish` raises the error next
            return None
        layout, flat = group.packed(bucket)
        return layout, flat, (digest_of(flat),) if self._checksums else ()

    def _send(self, ready: Any) -> None:
        group, (layout, flat, digest) = self._group, ready
        assert group is not None
        receiving = {actor.receive_broadcast.remote(layout, *digest): index for index, actor in self._left.items()}
        sending = in_thread(lambda: group.broadcast(flat), "broadcast")
        errors = self._together(sending, receiving, "receive_broadcast", self.close)
        if errors is not None:
            self._blame(errors, receiving, set(), "receive_broadcast")
            raise BeginAgain

    def _together(
        self, own: Future[Any], waiting: dict[Any, int], name: str, give_up: Callable[[], None]
    ) -> dict[int, Exception] | None:
        """Waits for a collective action of rank 0 and the engines.

        Args:
            own: the future of rank 0's part.
            waiting: reference of a pending call -> index of its engine; entries with an answer are removed.
            give_up: ends rank 0's part, so that engines that wait for rank 0 raise.

        Returns:
            None if all parts succeeded; otherwise index of the engine -> its error. This is empty if no engine reports
            an error: rank 0's part failed, or answers are missing.
        """

        def is_broken(errors: dict[int, Exception]) -> bool:
            return bool(errors) or (own.done() and own.exception(timeout=0) is not None)

        _, errors = self._answers(waiting, name, self._deadline, is_broken)
        if not waiting and not is_broken(errors):
            try:
                own.result(timeout=self._left_s())
                return None
            except Exception:  # only rank 0's part was late or failed
                pass
        give_up()
        errors |= self._answers(waiting, name, time.monotonic() + _FREED_S, lambda _: False)[1]
        return errors

    def _blame(self, errors: Mapping[int, Exception], silent: Mapping[Any, int], absent: set[int], name: str) -> None:
        """Drops the engines that broke the group.

        Args:
            errors: index of an engine -> its error. If the error has `is_of_group`, another engine may be the cause.
            silent: reference of a pending call -> index of the engine that has not answered the call.
            absent: indices of engines that did not join, for an unknown reason.
        """
        failures = {index: as_sync_error(error, index, name) for index, error in errors.items()}
        failures |= {index: self._late(index, name) for index in silent.values()}
        at_fault = {index for index, error in failures.items() if not error.is_of_group and index in errors}
        at_fault |= {index for index in silent.values() if not self._answers_at_all(index)}
        at_fault = at_fault or absent or self._suspects & (failures.keys() or self._left.keys())
        if not (at_fault or self._drops):
            at_fault = set(failures)
        self._drop({index: failures.get(index) or self._broken() for index in at_fault})
        if not at_fault:
            if not self._drops:
                raise self._broken()
            self._suspects |= set(failures or self._left)  # dropped if the group breaks again
            self._deadline = time.monotonic() + self._timeout_s

    def _answers_at_all(self, index: int) -> bool:
        try:
            ray.get(self._left[index].progress.remote(), timeout=_PING_S)
        except RayError:
            return False
        return True

    def _broken(self) -> SyncError:
        return SyncError(
            f"weights did not arrive: the broadcast group broke, or took more than {self._timeout_s:g} s",
            field="update_weights", hint=AGAIN,
        )  # fmt: skip


def address_for(urls: Sequence[str] | None) -> str:
    """Returns the address of this machine in its connections to the servers at these URLs.

    Without URLs, or if all URLs are loopback addresses, returns the node's address in Ray. On a cluster of one machine,
    that is a loopback address, too, which other machines cannot reach.
    """
    own = set()
    for url in urls or ():
        parts = urlsplit(url)
        with suppress(OSError):  # the server cannot be found, and the update will report that
            family, _, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                own.add(probe.getsockname()[0])
    others = sorted(address for address in own if not ip_address(address).is_loopback)
    return others[0] if others else ray.util.get_node_ip_address()
