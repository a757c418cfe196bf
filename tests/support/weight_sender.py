"""Rank 0 of a broadcast group: a model's weights on their way to one engine, as a trainer sends them."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from actors.engines.protocol import TensorInfo
from slimefsdp.weight_sync.broadcast import BroadcastGroup, Rendezvous, TorchBroadcastGroup


class WeightSender:
    """Sends tensors by name; they may change between updates.

    Args:
        tensors: what `named_weights` of a trainer's model holds.
        bucket_bytes: a bucket is at most so large, or one tensor.
        timeout_s: of the group.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = 50_000, timeout_s: float = 60
    ) -> None:
        self.tensors = dict(tensors)
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._group: BroadcastGroup | None = None
        self._side = ThreadPoolExecutor(1)

    def join(self, engine: Any) -> None:
        """A new group of this sender and the engine."""
        self.leave()
        # asked first: an actor that is in `join` answers nothing until rank 0 is there
        made = TorchBroadcastGroup if engine.info().group == "torch" else BroadcastGroup
        listener = socket.create_server(("127.0.0.1", 0))
        meeting = Rendezvous("127.0.0.1", listener.getsockname()[1], 0, 2, "gloo", self.timeout_s)
        joined = self._side.submit(engine.join, meeting._replace(rank=1))
        self._group = made(*meeting, listener=listener)
        joined.result()

    def leave(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def manifest(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self.tensors.items():
            size = sum(held.numel() * held.element_size() for _, held in bucket)
            if bucket and size + tensor.numel() * tensor.element_size() > self.bucket_bytes:
                yield bucket
                bucket = []
            bucket.append((name, tensor))
        yield bucket

    def broadcast(self, engine: Any, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Returns when the engine has it; raises what the engine raised."""
        assert self._group is not None
        layout, flat = self._group.packed(bucket)
        received = self._side.submit(engine.receive_broadcast, [TensorInfo(*one) for one in layout])
        self._group.broadcast(flat)
        received.result()

    def send(self, engine: Any, version: int) -> None:
        """One whole update."""
        engine.begin(version, self.manifest)
        for bucket in self.buckets():
            self.broadcast(engine, bucket)
        engine.commit(version)

    @torch.no_grad()
    def change(self, seed: int, by: float = 0.1) -> None:
        """Other weights, close to the ones before."""
        noise = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            tensor.mul_(1 + by * torch.randn(tensor.shape, generator=noise))
