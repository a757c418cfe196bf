"""Holds the frozen reference model in the actor's processes.

The reference is loaded at its first use and may be moved to the host between uses. If adapters are trained, the
reference is the policy itself with its adapters off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slimefsdp.distributed.fsdp import reshard
from slimefsdp.distributed.memory_manager import MemoryManager
from slimefsdp.errors import SlimeError, StateError
from slimefsdp.models.decoder import PolicyModel
from slimefsdp.models.lora import adapters_off, merged_rows


class Reference(Protocol):
    """A rank's interface to its reference model."""

    model: PolicyModel | None
    follows: bool  # whether the weights were copied from the policy, and are no longer those of the model's folder

    def load(self) -> None: ...
    def awake(self) -> AbstractContextManager[PolicyModel]: ...
    def resting(self) -> AbstractContextManager[None]: ...
    def rest(self) -> None: ...
    def follow(self, policy: PolicyModel) -> None: ...
    def saved_weights(self) -> list[tuple[str, nn.Parameter]]: ...
    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]: ...
    def loaded(self, follows: bool) -> None: ...


class PolicyWithoutAdapters:
    """Uses the policy with its adapters off as the reference, which has no weights of its own.

    Args:
        memory_manager: the rank's memory manager; its tag `parameters` is the policy.
    """

    def __init__(self, policy: PolicyModel, memory_manager: MemoryManager) -> None:
        self.model: PolicyModel | None = None  # there is no separate model
        self.follows = False
        self._policy = policy
        self._memory_manager = memory_manager

    def load(self) -> None:
        """Does nothing: the policy is already loaded."""

    @contextmanager
    def awake(self) -> Iterator[PolicyModel]:
        """Collective: yields the policy on the device; its adapters are off within the block."""
        self._memory_manager.wake_up(("parameters",))
        with adapters_off(self._policy):
            yield self._policy

    def resting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rest(self) -> None:
        """Does nothing."""

    def follow(self, policy: PolicyModel) -> None:
        """Refuses to take the policy's weights.

        Raises:
            StateError: always, because the reference is the base of the adapters.
        """
        raise StateError(
            "update_ref() on a reference that is the policy without its adapters",
            field="reference.path",
            hint="set it, for a reference with weights of its own",
        )

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]:
        """Returns no weights. A checkpoint with a reference's weights, which has no adapters, was refused earlier."""
        assert not follows
        return []

    def loaded(self, follows: bool) -> None:
        """Does nothing."""


class ColocatedReference:
    """Holds one rank's part of a reference model that has its own weights.

    Args:
        load: collective; builds the model with the weights of its folder.
        memory_manager: the rank's memory manager; its tag `reference` is this model.
        sleeps: whether the shards are moved to the host between uses.
    """

    def __init__(self, load: Callable[[], PolicyModel], memory_manager: MemoryManager, *, sleeps: bool) -> None:
        self.model: PolicyModel | None = None
        self.follows = False  # True after `follow`: checkpoints save the weights, which are no longer the folder's
        self._next: PolicyModel | None = None  # replaces the model when the load of a checkpoint completes
        self._load = load
        self._memory_manager = memory_manager
        self._sleeps = sleeps

    def load(self) -> None:
        """Collective: loads the model, unless it is loaded.

        Raises:
            ConfigError: the reference is a separate group.
            ModelError: the model cannot be loaded.
        """
        if self.model is None:
            self.model = self._memory_manager.models["reference"] = self._load()
            self.rest()

    @contextmanager
    def awake(self) -> Iterator[PolicyModel]:
        """Collective: loads the model if needed, and yields it on the device.

        Raises:
            ConfigError, ModelError: as in `load`.
        """
        self.load()
        assert self.model is not None
        with self.resting():
            self._memory_manager.wake_up(("reference",))
            yield self.model

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Collective: calls `rest` at the end of the block."""
        try:
            yield
        except SlimeError:  # raised by all ranks; after any other error the group is lost
            self.rest()
            raise
        self.rest()

    def rest(self) -> None:
        """Collective: frees gathered weights, and moves the shards to the host if the reference sleeps between uses."""
        if self.model is None:
            return
        reshard(self.model)
        if self._sleeps:
            self._memory_manager.sleep(("reference",))

    def follow(self, policy: PolicyModel) -> None:
        """Collective: copies the policy's weights, merged with its adapters, shard by shard.

        Args:
            policy: must be on the device.

        Raises:
            StateError: there is no model yet, or it has another architecture.
        """
        if self.model is None:
            raise StateError("there is no colocated reference", field="reference.dp", hint="set it up first")
        if not policy.is_like(self.model):
            raise StateError(
                "update_ref() on a reference of another architecture",
                field="reference.path",
                hint="leave reference.path out, or name a model of the policy's own configuration",
            )
        merged = merged_rows(policy)
        with self.awake() as reference, torch.no_grad():
            weights = zip(reference.named_weights(), policy.named_weights(), strict=True)
            for (name, frozen), (_, trained) in weights:
                assert isinstance(frozen, DTensor) and isinstance(trained, DTensor)
                # both are sharded the same way, so local shards correspond
                frozen.to_local().copy_(merged[name]() if name in merged else trained.to_local())
        self.follows = True

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Collective: returns the weights that a checkpoint saves, on the device.

        While `follows` is False, the reference has the weights of its folder, and the result is empty.
        """
        return self._awake_weights() if self.follows else []

    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]:
        """Collective: returns the weights to load from a checkpoint, on the device.

        Until `loaded` is called, the load can still be abandoned.

        Args:
            follows: the value of `follows` in the checkpoint. If False, the folder's weights are loaded again.

        Raises:
            ConfigError, ModelError: as in `load`.
        """
        self._next = None
        if follows:
            self.load()
            return self._awake_weights()
        if self.follows:
            self._next = self._load()
        return []

    def loaded(self, follows: bool) -> None:
        """Completes a load after all `weights_to_load` have their values.

        Args:
            follows: as in `weights_to_load`.
        """
        if self._next is not None:
            self._memory_manager.drop("reference")
            self.model = self._memory_manager.models["reference"] = self._next
        self.follows, self._next = follows, None

    def _awake_weights(self) -> list[tuple[str, nn.Parameter]]:
        assert self.model is not None
        self._memory_manager.wake_up(("reference",))
        return [(f"reference.{name}", parameter) for name, parameter in self.model.named_weights()]
