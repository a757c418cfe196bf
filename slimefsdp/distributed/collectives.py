"""Counts and aborts this process's collectives, and classifies errors of torch.

gloo's calls wait in Python, and raise when a peer's connections close. NCCL's calls return at once; the host waits for
the device later, and a kernel whose peer is lost spins until the group's timeout. Ranks therefore report how many
collectives they have begun, which distinguishes a hanging rank from those that wait for it. When a peer is lost, the
communicators are aborted. Not yet run on a GPU.
"""

from __future__ import annotations

import re
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slimefsdp.errors import PeerFailed

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

    NCCL's must; gloo's raise by themselves when the peer's process ends.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def abort_collectives() -> None:
    """Aborts all collectives of this process permanently: waiting kernels return, and later collectives raise.

    Only for processes with `needs_abort`. The results of aborted collectives are undefined, and threads that wait for
    them may continue before this function returns. The caller must discard results from before the call on.

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
        hint="look at what ended that rank or held it up",
    )
