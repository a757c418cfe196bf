"""Receives weight updates into a rollout engine's model or into the shards of a reference model.

An update has three kinds of calls: `begin(version, manifest)`, `receive(bucket)` once per bucket, and
`commit(version)`. Between begin and commit the model is a mixture of two versions, and must not be used.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.mesh import local_block
from slimefsdp.weight_sync.buckets import Bucket
from slimefsdp.weight_sync.progress import Manifest, UpdateProgress, other_model


class Receiver(Protocol):
    """The interface of receivers of updates.

    A receiver gets tensors on the host unless its `takes_device_tensors` is true.
    """

    def begin(self, version: int, manifest: Manifest) -> None: ...

    def receive(self, bucket: Bucket) -> None: ...

    def commit(self, version: int) -> None: ...


class WeightReceiver(UpdateProgress):
    """Copies full tensors into the parameters of a whole or sharded model, and checks that updates are complete."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._parameters: Mapping[str, nn.Parameter] = dict(named)
        self.version: int | None = None  # version of the weights; None before the first commit and during updates

    def begin(self, version: int, manifest: Manifest, kept: Collection[str] = ()) -> None:
        """Starts an update, see `UpdateProgress.begin`.

        Raises:
            SyncError: names or shapes of the sender's tensors differ from this model's.
        """
        own = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        if own != manifest:
            different = sorted(name for name in own.keys() | manifest.keys() if own.get(name) != manifest.get(name))
            raise other_model(different[0], manifest.get(different[0]), own.get(different[0]))
        super().begin(version, manifest, kept)
        self.version = None

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        """Copies tensors of the manifest into the model.

        Raises:
            StateError: there is no update in progress.
            SyncError: a tensor is not in the manifest, or has another shape there.
        """
        self.require_begun("receive")
        for name, tensor in bucket:
            self.require_announced(name, tensor.shape)  # otherwise copy_ might broadcast the tensor silently
            parameter = self._parameters[name]
            if isinstance(parameter, DTensor):
                parameter.to_local().copy_(tensor[local_block(parameter).slices])
            else:
                parameter.copy_(tensor)
            self.missing.discard(name)

    def forget(self) -> None:
        super().forget()
        self.version = None

    def commit(self, version: int) -> None:
        """Ends the update, after which the model may be used; raises the errors of `require_complete`."""
        super().commit(version)
        self.version = version
