"""Holds the frozen reference model in the actor's own processes; it is loaded at its first use and moved to the host
between uses.

Under adapters it is the policy itself, with them off.
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
    follows: bool

    def load(self) -> None: ...
    def awake(self) -> AbstractContextManager[PolicyModel]: ...
    def resting(self) -> AbstractContextManager[None]: ...
    def rest(self) -> None: ...
    def follow(self, policy: PolicyModel) -> None: ...
    def saved_weights(self) -> list[tuple[str, nn.Parameter]]: ...
    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]: ...
    def loaded(self, follows: bool) -> None: ...


class PolicyWithoutAdapters:
    """The policy with its adapters off, as the reference: it has no weights of its own.

    Args:
        memory_manager: of the rank; its tag `parameters` stands for the policy.
    """

    def __init__(self, policy: PolicyModel, memory_manager: MemoryManager) -> None:
        self.model: PolicyModel | None = None  # none of its own
        self.follows = False
        self._policy = policy
        self._memory_manager = memory_manager

    def load(self) -> None:
        """It is there."""

    @contextmanager
    def awake(self) -> Iterator[PolicyModel]:
        """Collective: yields the policy on the device, its adapters off inside."""
        self._memory_manager.wake_up(("parameters",))
        with adapters_off(self._policy):
            yield self._policy

    def resting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def rest(self) -> None:
        """Nothing has to be put to rest."""

    def follow(self, policy: PolicyModel) -> None:
        """Refuses to follow the policy.

        Raises:
            StateError: the reference is the base of the adapters.
        """
        raise StateError(
            "update_ref() on a reference that is the policy without its adapters",
            field="reference.path",
            hint="set it, for a reference with weights of its own",
        )

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        return []

    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]:
        """None: a checkpoint whose reference followed is of a run without adapters, which is refused before."""
        assert not follows
        return []

    def loaded(self, follows: bool) -> None:
        """Nothing changes."""


class ColocatedReference:
    """One rank's part of a reference model with weights of its own.

    Args:
        load: collective; makes the model with the weights of its folder.
        memory_manager: of the rank; its tag `reference` stands for this model.
        sleeps: the shards go to the host between uses.
    """

    def __init__(self, load: Callable[[], PolicyModel], memory_manager: MemoryManager, *, sleeps: bool) -> None:
        self.model: PolicyModel | None = None
        self.follows = False  # since an update its weights are no folder's: checkpoints hold them
        self._next: PolicyModel | None = None  # what takes its place when a checkpoint is loaded
        self._load = load
        self._memory_manager = memory_manager
        self._sleeps = sleeps

    def load(self) -> None:
        """Collective: makes the model, unless it is there.

        Raises:
            ConfigError: the reference is a group of its own. ModelError: it cannot be loaded.
        """
        if self.model is None:
            self.model = self._memory_manager.models["reference"] = self._load()
            self.rest()

    @contextmanager
    def awake(self) -> Iterator[PolicyModel]:
        """Collective: yields the model on the device, for as long as it is used.

        Raises:
            ConfigError, ModelError: as `load`.
        """
        self.load()
        assert self.model is not None
        with self.resting():
            self._memory_manager.wake_up(("reference",))
            yield self.model

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Collective: moves the model to its resting place at the end of the block."""
        try:
            yield
        except SlimeError:  # raised by all ranks alike; after any other error the group is lost
            self.rest()
            raise
        self.rest()

    def rest(self) -> None:
        """Collective: ends a use and frees everything that was gathered for it."""
        if self.model is None:
            return
        reshard(self.model)
        if self._sleeps:
            self._memory_manager.sleep(("reference",))

    def follow(self, policy: PolicyModel) -> None:
        """Collective: takes the weights of a policy that is on the device, shard by shard, merged with its adapters.

        Raises:
            StateError: there is no model yet, or it is of another architecture.
        """
        if self.model is None:
            raise StateError("there is no colocated reference", field="reference.placement", hint="set it up first")
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
                # sharded alike, wherever the shards lie
                frozen.to_local().copy_(merged[name]() if name in merged else trained.to_local())
        self.follows = True

    def saved_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Collective: returns what a checkpoint holds of the reference, on the device; nothing, unless it followed."""
        return self._awake_weights() if self.follows else []

    def weights_to_load(self, follows: bool) -> list[tuple[str, nn.Parameter]]:
        """Collective: returns what a checkpoint fills, on the device. Until `loaded` the load can still be abandoned.

        Args:
            follows: as it was when the checkpoint was written; where not, it will have the weights of its folder again.

        Raises:
            ConfigError, ModelError: as `load`.
        """
        self._next = None
        if follows:
            self.load()
            return self._awake_weights()
        if self.follows:
            self._next = self._load()
        return []

    def loaded(self, follows: bool) -> None:
        """Completes a load after the `weights_to_load` were filled."""
        if self._next is not None:
            self._memory_manager.drop("reference")
            self.model = self._memory_manager.models["reference"] = self._next
        self.follows, self._next = follows, None

    def _awake_weights(self) -> list[tuple[str, nn.Parameter]]:
        assert self.model is not None
        self._memory_manager.wake_up(("reference",))
        return [(f"reference.{name}", parameter) for name, parameter in self.model.named_weights()]
