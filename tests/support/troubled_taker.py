"""Actors that take weights by every transport without a model, and fail where they are told to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from actors.engines.protocol import EngineInfo, Manifest, TensorInfo
from actors.workers.disk_update import checked_weights, read_weights
from actors.workers.watchdog import Watched
from actors.workers.weight_update import unpack_bucket
from slimefsdp.errors import SyncError
from slimefsdp.weight_sync.broadcast import BroadcastError, BroadcastGroup, Rendezvous
from slimefsdp.weight_sync.buckets import check_digest, opened, packed_bytes, unpack

HOUR_S = 3600.0


class TroubledTaker(Watched):
    """Keeps tensors; `plan` names a call, how often it goes well before, and what happens then."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self._plan: tuple[str, int, str] = ("", 0, "")
        self._met = self._flips = False
        self._manifest: Manifest = {}
        self._group: BroadcastGroup | None = None

    def plan(self, call: str, after: int, trouble: str) -> None:
        self._plan = (call, after, trouble)

    def forget(self) -> None:
        """As it was when it began, but for the group."""
        self.version, self.tensors, self._plan, self._met = None, {}, ("", 0, ""), False
        self._flips = False

    @ray.method(concurrency_group="control")
    def met_trouble(self) -> bool:
        return self._met

    def pid(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def holds(self) -> tuple[int | None, dict[str, torch.Tensor]]:
        return self.version, self.tensors

    def info(self) -> EngineInfo:
        self._meet_trouble("info")
        return EngineInfo("taker", 1, "float32", None, ("object_store", "broadcast"))

    def join(self, meeting: Rendezvous) -> None:
        self._meet_trouble("join")
        if self._group is not None:
            self._group.close()
        try:
            self._group = BroadcastGroup(*meeting)
        except BroadcastError as error:
            raise _of_group(error) from error

    def begin(self, version: int, manifest: Manifest) -> None:
        self._meet_trouble("begin")
        self.version, self.tensors, self._manifest = None, {}, manifest

    def receive(self, bucket: Any) -> None:
        self._meet_trouble("receive")
        self.tensors |= {name: tensor.clone() for name, tensor in unpack_bucket(bucket)}

    def receive_broadcast(self, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        self._meet_trouble("receive")
        assert self._group is not None
        flat = torch.empty(packed_bytes(tensors), dtype=torch.uint8)
        try:
            self._group.broadcast(flat)
        except BroadcastError as error:
            raise _of_group(error) from error
        if self._flips:
            flat[len(flat) // 2] ^= 1
        check_digest(flat, digest)
        self.tensors |= unpack(flat, tensors)

    def receive_ipc(self, handle: Any, tensors: Sequence[TensorInfo], digest: str | None = None) -> None:
        self._meet_trouble("receive")
        data = opened(handle)[: packed_bytes(tensors)].clone()
        check_digest(data, digest)
        self.tensors |= unpack(data, tensors)

    def receive_disk(self, path: str) -> None:
        self._meet_trouble("receive")
        self.tensors |= read_weights(checked_weights(path), self._manifest)

    def commit(self, version: int) -> None:
        self._meet_trouble("commit")
        self.version = version

    def _meet_trouble(self, call: str) -> None:
        planned, after, trouble = self._plan
        if call != planned:
            return
        self._plan = (call, after - 1, trouble)
        if after > 0:
            return
        self._met = True
        if trouble == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif trouble == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(HOUR_S)  # this thread may run on until another one has taken the signal
        elif trouble == "is late":
            time.sleep(HOUR_S)
        elif trouble == "flips a bit":
            self._flips = True
        elif trouble == "raises":
            raise KeyError(f"as planned for {call}")


def _of_group(error: BroadcastError) -> SyncError:
    made = SyncError(str(error), field="update_weights")
    made.is_of_group = True
    return made
