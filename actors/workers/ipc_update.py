"""Weights to engines on the machine of rank 0, in memory that they share with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from actors.workers.weight_update import WeightUpdate
from slimefsdp.weight_sync.gather import Bucket
from slimefsdp.weight_sync.packed_bucket import KeptBuffers, digest_of, layout_of, pack, packed_bytes
from slimefsdp.weight_sync.shared_buffer import SharedBuffer

if TYPE_CHECKING:
    from slimefsdp.config import RunConfig
    from slimefsdp.trainer import Trainer


class IpcUpdate(WeightUpdate):
    """An update of engines (`actors.engines.protocol.Engine`), which read one of two buffers while the other is filled.

    Args:
        device: of the tensors that are sent. If it is a GPU, engines are on the same one; else on the same machine.
        before: the last update, whose buffers are taken over.
    """

    call = "receive_ipc"
    takes_device_tensors = True

    def __init__(
        self, actors: Sequence[Any], timeout_s: float, *, device: torch.device, before: IpcUpdate | None = None,
        **how: bool,
    ) -> None:  # fmt: skip
        super().__init__(actors, timeout_s, **how)
        self._device = device
        made = KeptBuffers(2, lambda nbytes: SharedBuffer(nbytes, device))
        self._buffers: KeptBuffers = made if before is None else before._buffers

    @classmethod
    def from_trainer(
        cls, trainer: Trainer, config: RunConfig, actors: Sequence[Any], *, before: Any = None, **how: bool
    ) -> IpcUpdate:
        """Makes an update of the trainer's weights; see `WeightUpdate`."""
        return cls(actors, config.cluster.sync_timeout_s, device=trainer.mesh.device, before=before, **how)

    def _prepared(self, bucket: Bucket) -> Any:
        layout = layout_of(bucket)
        buffer: SharedBuffer = self._buffers.next(packed_bytes(layout))
        flat = pack((tensor for _, tensor in bucket), into=buffer.data)
        if self._device.type == "cuda":  # engines do not know this process's streams
            torch.cuda.synchronize(self._device)
        return buffer.handle, layout, *((digest_of(flat),) if self._checksums else ())

    def _send(self, ready: Any) -> None:
        self._call("receive_ipc", *ready)
