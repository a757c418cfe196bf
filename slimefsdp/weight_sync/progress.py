"""Tracks a weight update at the receiver. Importing this file does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from slimefsdp.errors import StateError, SyncError

Manifest = dict[str, tuple[int, ...]]
"""Names and full shapes of the weights of an update."""


class UpdateProgress:
    """Tracks one update at a time: which tensors are missing, and which trainer's frozen weights are present."""

    def __init__(self) -> None:
        self.incoming: int | None = None  # version of the update in progress
        self.manifest: Manifest = {}  # manifest of the last update that was started
        self.missing: set[str] = set()
        # the trainer whose frozen weights are present, that of the update in progress, and that of the last
        # `has_frozen` call
        self._frozen_source: str | None = None
        self._incoming_source: str | None = None
        self._asked_source: str | None = None

    def has_frozen(self, source: str | None) -> bool:
        """Returns whether the frozen weights of trainer `source` are present; the next update must come from there."""
        self._asked_source = source
        return self._frozen_source is not None and self._frozen_source == source

    def begin(self, version: int, manifest: Manifest, kept: Collection[str] = ()) -> None:
        """Starts an update.

        Args:
            kept: tensors of the manifest that are already present, and will not be sent.
        """
        self.incoming, self.manifest, self.missing = version, dict(manifest), set(manifest) - set(kept)
        self._incoming_source, self._asked_source = self._asked_source, None
        if not kept:  # frozen weights are about to be overwritten
            self._frozen_source = None

    def require_begun(self, call: str) -> None:
        if self.incoming is None:
            raise StateError(
                f"{call}() before begin()", field="update_weights", hint="call begin(version, manifest) first"
            )

    def require_announced(self, name: str, shape: Sequence[int]) -> None:
        """Raises a SyncError if a tensor is not in the manifest, or has another shape there."""
        announced = self.manifest.get(name)
        if announced is None or tuple(announced) != tuple(shape):
            raise SyncError(
                f"tensor {name!r} came as {tuple(shape)}, announced was {announced}",
                field="update_weights",
                hint="send the tensors of the manifest",
            )

    def require_complete(self, version: int) -> None:
        """Raises a SyncError if tensors are missing, or if `begin` was called with another version."""
        if self.incoming != version or self.missing:
            missing = f"{len(self.missing)} tensors missing, e.g. {min(self.missing)!r}" if self.missing else ""
            raise SyncError(
                f"cannot commit version {version}: begun was {self.incoming}" + (f", {missing}" if missing else ""),
                field="update_weights",
                hint="send the whole update again",
            )

    def commit(self, version: int) -> None:
        """Ends the update; raises the errors of `require_complete`."""
        self.require_complete(version)
        self.incoming, self._frozen_source = None, self._incoming_source

    def forget(self) -> None:
        """Marks the weights as lost, so that a new update is needed."""
        self.incoming = self._frozen_source = None


def other_model(name: str, sent: object, own: object) -> SyncError:
    """Returns the error for a tensor whose shapes differ between sender and receiver; None for a missing tensor."""
    return SyncError(
        f"tensor {name!r} is {sent} at the sender and {own} here",
        field="update_weights",
        hint="sender and receiver must load the same architecture",
    )
