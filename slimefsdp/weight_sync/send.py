"""Sends a sharded model's weights to receivers: all ranks gather, and rank 0 calls the receivers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.distributed.consensus import gathered, run_on_first
from slimefsdp.results import SyncReport
from slimefsdp.weight_sync.gather import DEFAULT_BUCKET_BYTES, Bucket, Computed, full_weights
from slimefsdp.weight_sync.receive import Manifest, Receiver


class BeginAgain(Exception):
    """Requests that the whole update be sent again, because a receiver that represents several engines lost some."""


def stream_weights(
    named: Sequence[tuple[str, nn.Parameter]],
    receivers: Sequence[Receiver],
    *,
    version: int,
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    shard_group: dist.ProcessGroup,
    source: str | None = None,
    computed: Computed = MappingProxyType({}),
    adapter_scale: float | None = None,
) -> SyncReport:
    """Collective: begins, sends and commits one update on every receiver of rank 0.

    Optional attributes of a receiver: `takes_device_tensors`, to get tensors on the device; `keeps_nothing`, if it does
    not use a bucket after `receive` returns, so that tensors may be the parameters' own memory; and `has_frozen`, see
    `actors.engines.protocol.Engine`, so that frozen parameters are sent only once.

    Args:
        named: parameters sharded over `shard_group`, under the receivers' names.
        group: all ranks; if they hold several copies of the model, rank 0's copy is sent.
        dtype: dtype of the sent tensors.
        source: identifies the values of the frozen parameters; None: send all parameters.
        computed: see `full_weights`; none of these parameters counts as frozen.
        adapter_scale: the factor of the adapters among `named`; see `all_take_adapters`.

    Raises:
        SyncError: an update failed; raised on every rank, like any other error of a receiver. Unless all receivers took
            every bucket, none has committed.
    """
    start = time.perf_counter()
    manifest: Manifest = {name: tuple(parameter.shape) for name, parameter in named}
    frozen = [name for name, parameter in named if not parameter.requires_grad and name not in computed]
    copies = not all(getattr(receiver, "keeps_nothing", False) for receiver in receivers)
    # with several ranks, rank 0 holds a gathered bucket, two buckets that are being sent, and a copy that gloo makes
    bucket_bytes = DEFAULT_BUCKET_BYTES // (1 if dist.get_world_size(shard_group) == 1 else 4)
    while True:
        kept = frozenset(frozen if frozen and source and _have_frozen(receivers, source, group) else ())
        sent = [(name, parameter) for name, parameter in named if name not in kept]
        buckets = full_weights(
            sent, shard_group, dtype=dtype, bucket_bytes=bucket_bytes, copies=copies, computed=computed
        )
        try:
            begin_arguments: tuple[Any, ...] = (kept,) if kept else ()
            if adapter_scale is not None:
                begin_arguments = (kept, adapter_scale)
            run_on_first(lambda: _send(receivers, version, manifest, begin_arguments, buckets), group, buckets)  # noqa: B023
            break
        except BeginAgain:  # on every rank
            continue
    count = sum(parameter.numel() for _, parameter in sent) * dtype.itemsize
    failed = [failure for receiver in receivers for failure in getattr(receiver, "failed", ())]
    return SyncReport(version, count, time.perf_counter() - start, tuple(failed))


def _send(
    receivers: Sequence[Receiver],
    version: int,
    manifest: Manifest,
    begin_arguments: tuple[Any, ...],
    buckets: Iterator[Bucket],
) -> None:
    for receiver in receivers:
        receiver.begin(version, manifest, *begin_arguments)
    needs_host = not all(getattr(receiver, "takes_device_tensors", False) for receiver in receivers)
    copying: HostCopy | None = None
    while bucket := next(buckets, None):
        ready: HostCopy | None = HostCopy(bucket, is_needed=needs_host)
        if ready is not None and ready.is_under_way:
            ready, copying = copying, ready  # receivers take the previous bucket while this one is copied
        if ready is not None:
            _hand_over(ready, receivers)
        del bucket, ready  # freed before the next bucket is gathered
    if copying is not None:
        _hand_over(copying, receivers)
    for receiver in receivers:
        receiver.commit(version)


def all_take_adapters(receivers: Sequence[Receiver], group: dist.ProcessGroup) -> bool:
    """Collective: returns whether all of rank 0's receivers support adapters on a frozen base.

    The `begin` of such receivers has a fourth argument, the scale of the adapters.
    """
    answer = bool(receivers) and all(getattr(receiver, "takes_adapters", False) for receiver in receivers)
    answer_of_first: bool = gathered(answer, group)[0]
    return answer_of_first


def _hand_over(copy: HostCopy, receivers: Sequence[Receiver]) -> None:
    for receiver in receivers:
        is_for_device = getattr(receiver, "takes_device_tensors", False)
        receiver.receive(copy.bucket if is_for_device else copy.result())


def _have_frozen(receivers: Sequence[Receiver], source: str, group: dist.ProcessGroup) -> bool:
    """Collective: returns whether all receivers already have the frozen parameters."""
    answers: list[bool] = []

    def ask() -> None:
        answers.extend([hasattr(receiver, "has_frozen") and receiver.has_frozen(source) for receiver in receivers])

    run_on_first(ask, group)
    answers_of_first: list[bool] = gathered(answers, group)[0]
    return bool(answers_of_first) and all(answers_of_first)


class HostCopy:
    """Copies a bucket to the host in the background, from a CUDA device through pinned memory.

    Args:
        bucket: tensors on the host or on a device.
        is_needed: if False, nothing is copied.
    """

    def __init__(self, bucket: Bucket, *, is_needed: bool) -> None:
        self.bucket = bucket
        self._on_host, self._copied = bucket, None
        self.is_under_way = is_needed and any(tensor.device.type != "cpu" for _, tensor in bucket)
        if self.is_under_way:
            # torch caches freed pinned memory, so only a few buffers are ever allocated
            self._on_host = [
                (name, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True))
                for name, tensor in bucket
            ]
            self._copied = torch.cuda.current_stream(bucket[0][1].device).record_event()

    def result(self) -> Bucket:
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
