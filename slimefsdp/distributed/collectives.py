"""Where this process stands in the collectives that it shares with other ranks, and how they are aborted.

gloo's calls wait in Python, and raise when a peer's connections close. NCCL's do neither: the host goes on and waits
elsewhere, for the device, and a kernel whose peer has gone spins until the group's timeout. So a rank says how many
collectives it has begun, by which one that hangs is told from those that wait for it, and whoever knows of a lost peer
has the communicators aborted. Not yet run on a GPU.
"""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# groups of saves, adapters and the like are used beside the call, or by some ranks alone
_COUNTED = ("default_pg", "mesh_")


def collectives_begun(device_type: str) -> int:
    """Collectives that this process has begun in the groups of all ranks and of meshes, in all.

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
    """Whether collectives of this process wait for a peer that is gone until they are aborted.

    NCCL's do; gloo's raise by themselves when the peer's process ends.
    """
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


def abort_collectives() -> None:
    """Ends all collectives of this process for good: kernels that wait for peers return, what is begun later raises.

    For where `needs_abort`. What the collectives were to bring is not there, and a thread that waits for it goes on
    with whatever is in its place before this returns: results have to be refused from before the call on.

    Raises:
        RuntimeError: a communicator cannot be aborted.
    """
    distributed_c10d._abort_process_group()
