"""Lets ranks agree on values and errors, counts and aborts a process's collectives, and classifies errors of torch.

No rank may enter a collective that another rank will never join, so `run_together` raises the same error on all ranks.
gloo's calls wait in Python, and raise when a peer's connections close. NCCL's calls return at once; the host waits for
the device later, and a kernel whose peer is lost spins until the group's timeout. Ranks therefore report how many
collectives they have begun, which distinguishes a hanging rank from ranks that wait for it. When a peer is lost, the
communicators are aborted. Not yet run on a GPU.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slimefsdp.errors import PeerFailed, SlimeError, portable

_T = TypeVar("_T")


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collective: returns the values of all ranks, in rank order; they must be picklable."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def all_equal(value: str, group: dist.ProcessGroup) -> bool:
    """Collective: returns whether the value is the same on every rank; ranks exchange only its sha256."""
    digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), dtype=np.int64)
    largest, inverted_smallest = np.split(_largest([*digest, *~digest], group), 2)
    return bool((largest == ~inverted_smallest).all())


def any_true(value: bool, group: dist.ProcessGroup) -> bool:
    return bool(_largest([int(value)], group)[0])


def _largest(values: Sequence[int], group: dist.ProcessGroup) -> np.ndarray:
    """Collective: returns the elementwise maximum over the ranks, int64."""
    largest = torch.tensor(np.array(values, dtype=np.int64), device=distributed_c10d._get_object_coll_device(group))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return largest.cpu().numpy()


def run_together(action: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Collective: runs `action`, which has no collectives, on every rank; each rank returns its own result.

    If any rank fails, all ranks raise the first error in rank order. A typed error names the rank that raised it; this
    is also so in `run_on_first`.
    """
    result, error = attempt(action)
    _raise_together(error, group)
    return cast(_T, result)


def run_on_first(action: Callable[[], object], group: dist.ProcessGroup, stream: Iterable[object] = ()) -> None:
    """Collective: runs `action` on rank 0; all ranks raise its error.

    Args:
        stream: a collective iterable that `action` consumes. The other ranks iterate over it at the same time, and rank
            0 finishes the iteration if the action fails.
    """
    _, error = attempt(action) if dist.get_rank(group) == 0 else (None, None)
    deque(stream, maxlen=0)  # frees each item before it takes the next
    _raise_together(error, group)


def from_first(action: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    """Collective: runs `action` on rank 0; every rank returns its picklable result, or raises its error."""
    result, error = attempt(action) if dist.get_rank(group) == 0 else (None, None)
    _raise_together(error, group)
    results = [result]
    dist.broadcast_object_list(results, group_src=0, group=group)
    return cast(_T, results[0])


def _raise_together(error: Exception | None, group: dist.ProcessGroup) -> None:
    if any_true(error is not None, group):
        raise_first(gathered(sendable(error), group), error, group)


def sendable(error: Exception | None) -> Exception | None:
    """Returns a picklable form of an error; an error that cannot be pickled would leave peers waiting."""
    return None if error is None else portable(error)


def raise_first(errors: Sequence[Exception | None], own: Exception | None, group: dist.ProcessGroup) -> None:
    """Raises the first error in rank order, the same on every rank.

    Args:
        errors: the gathered errors of all ranks; None for a rank without an error.
        own: this rank's error.
    """
    for rank, error in enumerate(errors):
        if error is not None:
            if own is not None and rank == dist.get_rank(group):
                error = own  # on the rank that raised it, the original keeps its traceback
            if isinstance(error, SlimeError) and error.rank is None:
                error.rank = dist.get_global_rank(group, rank)
            raise error


def attempt(action: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """Runs an action; returns (result, None), or (None, error) if it raises."""
    try:
        return action(), None
    except Exception as error:
        return None, error


# ---------------------------------------------------------------------- collectives that hang

# other groups, such as those of saves, are used outside of calls or only by some ranks
_COUNTED = ("default_pg", "mesh_")


def collectives_begun(device_type: str) -> int:
    """Returns the number of collectives that this process has begun in the default group and the groups of meshes.

    All ranks begin the same collectives, so the rank with the smallest number keeps the others waiting. May be called
    from any thread, also while a collective is stuck.

    Args:
        device_type: device type of the backend that is counted, cpu or cuda.
    """
    begun = 0
    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc.startswith(_COUNTED):
            with suppress(RuntimeError):  # the group has no such backend, or is being destroyed
                backend = group._get_backend(torch.device(device_type))
                begun += backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return begun


def needs_abort() -> bool:
    """Returns whether collectives must be aborted when a peer is lost.

    Collectives of NCCL must; collectives of gloo raise by themselves when the peer's process ends.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def abort_collectives() -> None:
    """Aborts all collectives of this process permanently: waiting kernels return, and later collectives raise.

    Only for processes with `needs_abort`. The results of aborted collectives are undefined, and threads that wait for
    them may continue before this function returns. The caller must discard all results of collectives from then on.

    Raises:
        RuntimeError: a communicator cannot be aborted.
    """
    distributed_c10d._abort_process_group()


# ---------------------------------------------------------------------- errors of torch

# gloo names its source file in most errors; errors of a connection that was closed after a timeout have only this text
_GLOO = re.compile(
    r"gloo/.*(connection (closed|reset|refused|abort)|broken pipe|(read|write) error|short (read|write)|timed out"
    r"|no route to host|network is (down|unreachable))"
    r"|^Application timeout caused pair closure",
    re.IGNORECASE | re.DOTALL,
)
_NCCL = re.compile(
    r"ncclRemoteError|remote (process|peer)|connection (closed|reset|refused)|communicator was aborted|time(d )?out",
    re.IGNORECASE,
)

# parts of messages of RuntimeErrors from torch's allocators and other libraries that allocate
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether the device, the host or Python ran out of memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def lost_a_peer(error: BaseException) -> bool:
    """Returns whether this rank failed only because another rank failed, or came too late to a collective."""
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError):
        return True  # the rendezvous store is another rank's
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def peer_failed(error: BaseException) -> PeerFailed:
    """Returns the typed error for an error that `lost_a_peer` accepts, including torch's message."""
    reason = str(error).partition("\n")[0]
    return PeerFailed(
        f"another rank is gone, or did not come in time: {reason}",
        field="cluster.call_timeout_s" if re.search("time(d )?out", reason, re.IGNORECASE) else "process_group",
        hint="look at what ended or delayed that rank",
    )
