"""Receives weight updates into a rollout engine's model or a reference model's shards.

The protocol has three calls: `begin(version, manifest)`, `receive(bucket)` once per bucket, and `commit(version)`.
Between begin and commit the model is a mixture of two versions and must not be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from slimefsdp.errors import StateError, SyncError
from slimefsdp.weight_sync.buckets import Bucket

Manifest = dict[str, tuple[int, ...]]  # name -> full shape


class Receiver(Protocol):
    """The interface of receivers; they get tensors on the host unless they have `takes_device_tensors`."""

    def begin(self, version: int, manifest: Manifest) -> None: ...

    def receive(self, bucket: Bucket) -> None: ...

    def commit(self, version: int) -> None: ...


class WeightReceiver:
    """Copies full tensors into the parameters of a plain or sharded model, and checks that updates are complete."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._parameters: Mapping[str, nn.Parameter] = dict(named)
        self._missing: set[str] = set()
        self._incoming: int | None = None
        self.version: int | None = None  # version of the model's weights; None before the first commit and in an update

    def begin(self, version: int, manifest: Manifest, kept: Collection[str] = ()) -> None:
        """Begins an update.

        Args:
            kept: tensors of the manifest that the model already has and that are not sent.

        Raises:
            SyncError: names or shapes of the sender's tensors differ from this model's.
        """
        own = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if own != manifest:
            different = sorted(name for name in own.keys() | manifest.keys() if own.get(name) != manifest.get(name))
            name = different[0]
            raise SyncError(
                f"tensor {name!r} is {manifest.get(name)} at the sender and {own.get(name)} here",
                field="update_weights",
                hint="sender and receiver must load the same architecture",
            )
        self._incoming, self.version = version, None
        self._missing = set(manifest) - set(kept)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Copies some of the announced tensors into the model.

        Raises:
            StateError: there is no update in progress.
            SyncError: a tensor was not announced, or has another shape.
        """
        if self._incoming is None:
            raise StateError(
                "receive() before begin()", field="update_weights", hint="call begin(version, manifest) first"
            )
        for name, tensor in bucket:
            parameter = self._parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:  # copy_ would broadcast silently
                raise SyncError(
                    f"tensor {name!r} came as {tuple(tensor.shape)}, announced was "
                    f"{None if parameter is None else tuple(parameter.shape)}",
                    field="update_weights",
                    hint="send the tensors of the manifest",
                )
            if isinstance(parameter, DTensor):
                shape, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                parameter.to_local().copy_(tensor[offset[0] : offset[0] + shape[0]])
            else:
                parameter.copy_(tensor)
            self._missing.discard(name)

    @property
    def is_receiving(self) -> bool:
        return self._incoming is not None

    def forget(self) -> None:
        """Marks the weights as lost, so that a new update is needed."""
        self._incoming, self.version = None, None

    def commit(self, version: int) -> None:
        """Ends the update; the model may be used again.

        Raises:
            SyncError: tensors are missing, or `begin` had another version.
        """
        if self._incoming != version or self._missing:
            missing = f"{len(self._missing)} tensors missing, e.g. {min(self._missing)!r}" if self._missing else ""
            raise SyncError(
                f"cannot commit version {version}: begun was {self._incoming}" + (f", {missing}" if missing else ""),
                field="update_weights",
                hint="send the whole update again",
            )
        self._incoming, self.version = None, version
