"""Sends a sharded model's weights to receivers: all ranks gather, and rank 0 talks to the receivers."""

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
    """Asks for the whole update again: a receiver that stands for several has lost some of them."""


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
    """Begins, feeds and commits one update on every receiver of rank 0; a collective call.

    A receiver may have `takes_device_tensors`, to be given tensors on the device; `keeps_nothing`, if it has read a
    bucket when `receive` returns, so that tensors may be the parameters' own memory; and `has_frozen`, as of
    `actors.engines.protocol.Engine`, where it need not be sent frozen parameters twice.

    Args:
        named: parameters sharded over `shard_group`, under the names the receivers know.
        group: all ranks; if they hold several copies of the model, rank 0's copy is sent.
        dtype: of the tensors that are sent.
        source: a name for the present values of the frozen parameters; None: all parameters are sent.
        computed: as of `full_weights`; none of these counts as frozen.
        adapter_scale: the factor of the adapters among `named`; see `all_take_adapters`.

    Raises:
        SyncError: or whatever a receiver raised, on every rank. No receiver has committed unless all took every bucket.
    """
    start = time.perf_counter()
    manifest: Manifest = {name: tuple(parameter.shape) for name, parameter in named}
    frozen = [name for name, parameter in named if not parameter.requires_grad and name not in computed]
    copies = not all(getattr(receiver, "keeps_nothing", False) for receiver in receivers)
    # several ranks: rank 0 holds what it gathered beside the two that it sends by turns, and gloo gathers into a copy
    bucket_bytes = DEFAULT_BUCKET_BYTES // (1 if dist.get_world_size(shard_group) == 1 else 4)
    while True:
        kept = frozenset(frozen if frozen and source and _have_frozen(receivers, source, group) else ())
        sent = [(name, parameter) for name, parameter in named if name not in kept]
        buckets = full_weights(
            sent, shard_group, dtype=dtype, bucket_bytes=bucket_bytes, copies=copies, computed=computed
        )
        try:
            more: tuple[Any, ...] = (kept,) if kept else ()
            if adapter_scale is not None:
                more = (kept, adapter_scale)
            run_on_first(lambda: _send(receivers, version, manifest, more, buckets), group, buckets)  # noqa: B023
            break
        except BeginAgain:  # on every rank
            continue
    count = sum(parameter.numel() for _, parameter in sent) * dtype.itemsize
    failed = [one for receiver in receivers for one in getattr(receiver, "failed", ())]
    return SyncReport(version, count, time.perf_counter() - start, tuple(failed))


def _send(
    receivers: Sequence[Receiver], version: int, manifest: Manifest, more: tuple[Any, ...], buckets: Iterator[Bucket]
) -> None:
    for receiver in receivers:
        receiver.begin(version, manifest, *more)
    needs_host = not all(getattr(receiver, "takes_device_tensors", False) for receiver in receivers)
    coming: HostCopy | None = None
    while bucket := next(buckets, None):
        ready: HostCopy | None = HostCopy(bucket, is_needed=needs_host)
        if ready is not None and ready.is_under_way:
            ready, coming = coming, ready  # receivers take the one before while this one comes
        if ready is not None:
            _hand_over(ready, receivers)
        del bucket, ready  # before the next one is gathered
    if coming is not None:
        _hand_over(coming, receivers)
    for receiver in receivers:
        receiver.commit(version)


def all_take_adapters(receivers: Sequence[Receiver], group: dist.ProcessGroup) -> bool:
    """Whether all of rank 0's receivers have adapters on top of a frozen base; a collective call.

    The `begin` of such receivers has a fourth argument, the scale of the adapters.
    """
    answer = bool(receivers) and all(getattr(receiver, "takes_adapters", False) for receiver in receivers)
    of_first: bool = gathered(answer, group)[0]
    return of_first


def _hand_over(copy: HostCopy, receivers: Sequence[Receiver]) -> None:
    for receiver in receivers:
        is_for_device = getattr(receiver, "takes_device_tensors", False)
        receiver.receive(copy.bucket if is_for_device else copy.result())


def _have_frozen(receivers: Sequence[Receiver], source: str, group: dist.ProcessGroup) -> bool:
    """Whether all receivers have the frozen parameters already; a collective call."""
    answers: list[bool] = []

    def ask() -> None:
        answers.extend([hasattr(one, "has_frozen") and one.has_frozen(source) for one in receivers])

    run_on_first(ask, group)
    of_first: list[bool] = gathered(answers, group)[0]
    return bool(of_first) and all(of_first)


class HostCopy:
    """Copies a bucket to the host in the background, from a CUDA device through pinned memory.

    Args:
        bucket: on the host already, or on a device.
        is_needed: if not, nothing is copied.
    """

    def __init__(self, bucket: Bucket, *, is_needed: bool) -> None:
        self.bucket = bucket
        self._on_host, self._copied = bucket, None
        self.is_under_way = is_needed and any(tensor.device.type != "cpu" for _, tensor in bucket)
        if self.is_under_way:
            # torch keeps pinned memory that is freed and hands it out again, so these are a few buffers by turns
            self._on_host = [
                (name, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True))
                for name, tensor in bucket
            ]
            self._copied = torch.cuda.current_stream(bucket[0][1].device).record_event()

    def result(self) -> Bucket:
        """Waits for the copy and returns the tensors in host memory."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
