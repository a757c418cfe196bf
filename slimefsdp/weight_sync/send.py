"""Sending a sharded model's weights to receivers: rank 0 talks to them, all ranks gather."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.consensus import run_on_first
from slimefsdp.results import SyncReport
from slimefsdp.weight_sync.gather import full_weights
from slimefsdp.weight_sync.receive import Manifest, Receiver


def stream_weights(
    named: Sequence[tuple[str, nn.Parameter]],
    receivers: Sequence[Receiver],
    *,
    version: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    shard_group: dist.ProcessGroup,
) -> SyncReport:
    """Collective: begins, feeds and commits one update on every receiver; only rank 0's receivers are used.

    Args:
        named: parameters sharded over `shard_group`, under the names the receivers know.
        group: all ranks; where they hold several copies of the model, that of rank 0 is sent.
        dtype: what travels.

    Raises:
        SyncError: or whatever a receiver raised, on every rank; no receiver has committed unless all took every bucket.
    """
    start = time.perf_counter()
    manifest: Manifest = {name: tuple(parameter.shape) for name, parameter in named}
    buckets = full_weights(named, shard_group, dtype=dtype)

    def send() -> None:
        for receiver in receivers:
            receiver.begin(version, manifest)
        for bucket in buckets:
            on_host = None
            for receiver in receivers:
                if getattr(receiver, "takes_device_tensors", False):
                    receiver.receive(bucket)
                    continue
                on_host = on_host or [(name, tensor.cpu()) for name, tensor in bucket]
                receiver.receive(on_host)
        for receiver in receivers:
            receiver.commit(version)

    run_on_first(send, group, buckets)
    sent = sum(parameter.numel() for _, parameter in named) * dtype.itemsize
    return SyncReport(version, sent, time.perf_counter() - start)
