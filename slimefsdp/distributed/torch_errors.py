"""What an error of torch's means: there is no memory left, or another rank is gone, or kept this one waiting too long.

Inside of a rank the error stays what torch raises: a typed one says that all ranks raised alike, and memory may be
short on one alone.
"""

from __future__ import annotations

import re

import torch
import torch.distributed as dist

from slimefsdp.errors import PeerFailed

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

# of RuntimeErrors: torch's allocators, and libraries that allocate beside them
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, the host or Python had no memory to give."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def lost_a_peer(error: BaseException) -> bool:
    """Whether this rank failed only because another one did, or did not come to a collective in time."""
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError):
        return True  # the store is where ranks meet
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def peer_failed(error: BaseException) -> PeerFailed:
    """The typed error of one that `lost_a_peer`, with torch's own words in it."""
    said = str(error).partition("\n")[0]
    return PeerFailed(
        f"another rank is gone, or did not come in time: {said}",
        field="cluster.call_timeout_s" if re.search("time(d )?out", said, re.IGNORECASE) else "process_group",
        hint="look at what ended that rank or held it up",
    )
