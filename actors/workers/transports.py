"""Chooses the transport of a weight update, and sends weights to engines by shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from actors.workers.broadcast_update import BroadcastUpdate
from actors.workers.disk_update import DiskUpdate
from actors.workers.weight_update import ObjectStoreUpdate, WeightUpdate
from slimefsdp.weight_sync.buckets import Bucket, KeptBuffers, SharedBuffer, digest_of, layout_of, pack, packed_bytes

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer


class IpcUpdate(WeightUpdate):
    """A weight update by two shared buffers: engines read one buffer while the trainer fills the other.

    Args:
        device: the device of the sent tensors. Engines use the same GPU or, for a CPU, the same machine.
        before: the previous update by this transport; its buffers are used again.
    """

    call = "receive_ipc"
    takes_device_tensors = True

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, device: torch.device, before: IpcUpdate | None = None,
        **options: bool,
    ) -> None:  # fmt: skip
        super().__init__(actors, timeout_s, **options)
        self._device = device
        new_buffers = KeptBuffers(2, lambda nbytes: SharedBuffer(nbytes, device))
        self._buffers: KeptBuffers = new_buffers if before is None else before._buffers

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **options: bool
    ) -> IpcUpdate:
        return cls(actors, config.cluster.sync_timeout_s, device=trainer.mesh.device, before=before, **options)

    def _prepared(self, bucket: Bucket) -> Any:
        layout = layout_of(bucket)
        buffer: SharedBuffer = self._buffers.next(packed_bytes(layout))
        flat = pack((tensor for _, tensor in bucket), into=buffer.data)
        if self._device.type == "cuda":  # engines cannot wait for this process's streams
            torch.cuda.synchronize(self._device)
        return buffer.handle, layout, *((digest_of(flat),) if self._checksums else ())


TRANSPORTS: dict[str, type[WeightUpdate]] = {
    "object_store": ObjectStoreUpdate,
    "broadcast": BroadcastUpdate,
    "ipc": IpcUpdate,
    "disk": DiskUpdate,
}
"""All values of `rollout.weight_transport` except `auto`."""


def transport_to(receivers: Sequence[Any], wanted: str) -> type[WeightUpdate]:
    """Returns the class of the transport to these Ray actors.

    Args:
        wanted: a name in `TRANSPORTS`. If a receiver lacks this transport's method, as the ranks of a reference group
            do, the object store is used instead.
    """
    kind = TRANSPORTS[wanted]
    return kind if all(hasattr(receiver, kind.call) for receiver in receivers) else ObjectStoreUpdate
