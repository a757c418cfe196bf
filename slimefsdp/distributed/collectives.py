"""Observes and aborts this process's collectives, and tells what an error of torch means.

gloo's calls wait in Python, and raise when a peer's connections close. NCCL's do neither: the host goes on and waits
elsewhere, for the device, and a kernel whose peer has gone spins until the group's timeout. So a rank says how many
collectives it has begun, which distinguishes a hanging rank from those that wait for it; on a lost peer the
communicators are aborted. Not yet run on a GPU.
"""

from __future__ import annotations

import re
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slimefsdp.errors import PeerFailed

# groups of saves, adapters and the like are used outside of calls, or by some ranks only
_COUNTED = ("default_pg", "mesh_")


def collectives_begun(device_type: str) -> int:
    """Returns how many collectives this process has begun in the default group and the groups of meshes.

    Ranks begin the same ones, so of ranks in one call the one with the fewest has kept the others waiting. Answers from
    any thread, also while a collective is stuck.

    Args:
        device_type: of the backend that is counted, cpu or cuda.
    """
    begun = 0
    for group in list(distributed_c10d._world.pg_map):
        if group.group_desc.startswith(_COUNTED):
            with suppress(RuntimeError):  # it has no such backend, or is about to go
                backend = group._get_backend(torch.device(device_type))
                begun += backend._get_sequence_number_for_group()  # type: ignore[attr-defined]
    return begun


def needs_abort() -> bool:
    """Returns whether collectives of this process wait for a lost peer until they are aborted.

    NCCL's do; gloo's raise by themselves when the peer's process ends.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def abort_collectives() -> None:
    """Ends all collectives of this process for good: waiting kernels return, and later collectives raise.

    For where `needs_abort`. What the collectives were to bring is not there, and a thread that waits for it goes on
    with whatever is in its place before this returns: results have to be refused from before the call on.

    Raises:
        RuntimeError: a communicator cannot be aborted.
    """
    distributed_c10d._abort_process_group()


# ---------------------------------------------------------------------- what an error of torch means

# gloo names its source file in most of its errors; after a timeout a pair of connections has only these words left
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

# of RuntimeErrors: torch's allocators, and other libraries that allocate
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
        return True  # the store is where ranks meet
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def peer_failed(error: BaseException) -> PeerFailed:
    """Returns the typed error for an error that `lost_a_peer` accepts, with torch's message in it."""
    said = str(error).partition("\n")[0]
    return PeerFailed(
        f"another rank is gone, or did not come in time: {said}",
        field="cluster.call_timeout_s" if re.search("time(d )?out", said, re.IGNORECASE) else "process_group",
        hint="look at what ended that rank or held it up",
    )
