"""Trains several adapters of one base model in turn.

An adapter consists of its matrices, optimiser moments, accumulated gradients, counters, KL coefficient and checkpoints.
The model has matrices for one adapter, of rank `lora.rank`; the other adapters are parked on the device or the host.
Adapters are exchanged by copying bits, so each adapter trains exactly as it would alone. An adapter of a smaller rank
has additional rows of A and columns of B that are 0 and stay 0, because their gradients are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from slimefsdp.config import TrainerConfig
from slimefsdp.distributed.collectives import run_together
from slimefsdp.distributed.fsdp import reshard
from slimefsdp.distributed.memory_manager import StorageOffloader
from slimefsdp.distributed.mesh import Mesh, local_shard
from slimefsdp.errors import StateError
from slimefsdp.models.decoder import DecoderModel
from slimefsdp.models.lora import draw_adapters, set_scale
from slimefsdp.optim.optimizer_step import OptimizerStep
from slimefsdp.results import AdapterInfo
from slimefsdp.rpc import DEFAULT_ADAPTER
from slimefsdp.training.build import is_host_memory_pinned
from slimefsdp.training.checkpointing import Checkpoints


@dataclass(eq=False, slots=True)
class Adapter:
    """Holds one adapter, except its matrices and moments.

    Args:
        updater: optimiser step over the model's parameters, with this adapter's counters.
    """

    name: str
    rank: int
    alpha: float
    updater: OptimizerStep
    checkpoints: Checkpoints
    kl_coefficient: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Parked:
    """Holds copies of an adapter's matrices, moments and gradients while another adapter is in the model.

    Args:
        pin_memory: page-lock the host memory.
    """

    def __init__(self, model: DecoderModel, optimizer: torch.optim.Optimizer, *, pin_memory: bool) -> None:
        self._tensors = [tensor.clone() for tensor in _live_tensors(model, optimizer)]
        # not copied: the model gets new gradient tensors from its next backward pass
        self._gradients = [parameter.grad for _, parameter in model.trained_weights()]
        self._offloader = StorageOffloader(pin_memory=pin_memory)

    def to_host(self) -> None:
        """Moves the copies to the host; idempotent.

        Raises:
            ResourceError: as in `StorageOffloader.sleep`.
        """
        self._offloader.sleep(self._all())

    def to_device(self) -> None:
        """Moves the copies to the device; idempotent.

        Raises:
            ResourceError: as in `StorageOffloader.wake_up`.
        """
        self._offloader.wake_up()

    @torch.no_grad()
    def put_back(self, model: DecoderModel, optimizer: torch.optim.Optimizer) -> None:
        """Copies everything back into the model, bit for bit; the copies must be on the device."""
        for live, copy in zip(_live_tensors(model, optimizer), self._tensors, strict=True):
            live.copy_(copy)
        for (_, parameter), gradient in zip(model.trained_weights(), self._gradients, strict=True):
            parameter.grad = gradient

    @property
    def is_on_host(self) -> bool:
        return self._offloader.is_asleep

    @property
    def host_bytes(self) -> int:
        return self._offloader.host_bytes

    @property
    def has_gradients(self) -> bool:
        """Returns whether there are gradients that no update has used."""
        return any(gradient is not None for gradient in self._gradients)

    def _all(self) -> list[torch.Tensor]:
        return [*self._tensors, *(gradient for gradient in self._gradients if gradient is not None)]


class Adapters:
    """Holds the adapters of one rank; every rank must make the same calls.

    Args:
        first: the adapter that is in the model now.
        make: collective function that makes a new adapter from its name, rank and alpha.
        pin_memory: page-lock host memory.
    """

    def __init__(
        self,
        model: DecoderModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        first: Adapter,
        make: Callable[[str, int, float], Adapter],
        *,
        pin_memory: bool,
    ) -> None:
        self.current = first
        self._model, self._optimizer, self._mesh = model, optimizer, mesh
        self._make, self._pin_memory = make, pin_memory
        self._adapters = {first.name: first}
        self._parked: dict[str, Parked] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def create(self, name: str, rank: int, alpha: float, seed: int) -> None:
        """Collective: initialises a new adapter from `seed` and puts it into the model.

        Raises:
            StateError: an adapter of this name exists.
            ResourceError: there is no memory to park the current adapter, which stays in the model.
        """
        if name in self._adapters:
            raise StateError(
                f"there is an adapter {name!r}", field="name", hint="choose another name, or delete that one first"
            )
        self._park_current()
        try:
            self.to_host()  # may fail for lack of memory, so this runs before anything changes
            adapter = self._make(name, rank, alpha)
        except BaseException:
            self._parked.pop(self.current.name).to_device()  # the model still uses its gradient tensors
            raise
        self._adapters[name] = self.current = adapter
        self.current.updater.begin_anew()
        draw_adapters(self._model, seed, rank=rank)
        set_scale(self._model, adapter.scale)

    def select(self, name: str) -> None:
        """Collective: puts an adapter into the model, unless it is the current one.

        Raises:
            StateError: there is no adapter of this name.
            ResourceError: there is no memory for both adapters at once.
        """
        self.require(name)
        if name == self.current.name:
            return
        selected = self._parked[name]
        run_together(selected.to_device, self._mesh.group)
        self._park_current()
        selected.put_back(self._model, self._optimizer)
        del self._parked[name]
        self.current = self._adapters[name]
        set_scale(self._model, self.current.scale)
        self.to_host()

    def delete(self, name: str) -> None:
        """Collective: removes an adapter, but not its files; if it is current, the run's own adapter becomes current.

        Raises:
            StateError: there is no adapter of this name, or it is the run's own.
        """
        self.require(name)
        if name == DEFAULT_ADAPTER:
            raise StateError(f"{name!r} is the run's own adapter", field="name", hint="delete others")
        if name == self.current.name:
            self.select(DEFAULT_ADAPTER)
        del self._adapters[name], self._parked[name]

    def to_host(self) -> None:
        """Collective: moves all parked adapters to the host.

        Raises:
            ResourceError: a host has not enough memory.
        """
        for parked in self._parked.values():
            run_together(parked.to_host, self._mesh.group)

    def require(self, name: object) -> None:
        """Checks that an adapter of this name exists.

        Raises:
            StateError: there is no such adapter.
        """
        if name not in self._adapters:
            known = ", ".join(sorted(self._adapters))
            raise StateError(f"there is no adapter {name!r}", field="adapter", hint=f"there are {known}")

    def listed(self) -> list[AdapterInfo]:
        return [
            AdapterInfo(
                name=adapter.name,
                rank=adapter.rank,
                alpha=adapter.alpha,
                updates_taken=adapter.updater.updates_taken,
                has_gradients=adapter.updater.has_gradients
                if adapter is self.current
                else self._parked[adapter.name].has_gradients,
                is_on_device=adapter is self.current or not self._parked[adapter.name].is_on_host,
            )
            for adapter in self._adapters.values()
        ]

    @property
    def host_bytes(self) -> int:
        """Returns the bytes of host memory of the parked adapters; safe in any thread."""
        return sum(parked.host_bytes for parked in list(self._parked.values()))

    def _park_current(self) -> None:
        """Copies the current adapter's state; the model keeps these values until another adapter overwrites them."""
        self.current.checkpoints.wait_for_copy()
        reshard(self._model)
        parked: list[Parked] = []
        run_together(
            lambda: parked.append(Parked(self._model, self._optimizer, pin_memory=self._pin_memory)), self._mesh.group
        )
        self._parked[self.current.name] = parked[0]


def make_adapters(
    config: TrainerConfig,
    model: DecoderModel,
    mesh: Mesh,
    updater: OptimizerStep,
    checkpoints: Checkpoints,
    kl_coefficient: float,
) -> Adapters:
    """Returns the adapters of a rank; the run's own adapter is in the model.

    Args:
        updater, checkpoints, kl_coefficient: the state of the run's own adapter.
    """
    settings = config.lora
    assert settings.rank is not None
    first = Adapter(DEFAULT_ADAPTER, settings.rank, settings.alpha, updater, checkpoints, kl_coefficient)

    def make(name: str, rank: int, alpha: float) -> Adapter:
        own = checkpoints.of_adapter(name, rank, alpha)
        return Adapter(name, rank, alpha, updater.another(), own, kl_coefficient)

    return Adapters(
        model,
        updater.optimizer,
        mesh,
        first,
        make,
        pin_memory=is_host_memory_pinned(config, mesh.device),
    )


def _live_tensors(model: DecoderModel, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns this rank's shards of the adapter matrices in the model and of their optimiser state."""
    tensors: list[torch.Tensor] = []
    for _, parameter in model.trained_weights():
        tensors.append(local_shard(parameter).detach())
        tensors += [local_shard(value) for value in optimizer.state[parameter].values()]
    return tensors
