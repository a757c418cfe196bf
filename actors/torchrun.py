"""A group of the ranks that torchrun started: the first one runs the loop, the others make the calls that it makes.

Every call is sent from rank 0 to all ranks before it is made, so that all call the same method of their `Trainer` with
the same arguments. Ray takes no part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from actors.run_dir import with_model_ids
from slimefsdp.config import RunConfig
from slimefsdp.results import Health

if TYPE_CHECKING:
    from slimefsdp.trainer import Trainer

_CALLS = frozenset(
    (
        "train_step",
        "compute_log_probs",
        "update_ref",
        "save",
        "finish_save",
        "load",
        "restored",
        "export_hf",
        "export_adapter",
    )
)


class TorchrunGroup:
    """The loop's handle of all ranks, on rank 0. The others are in `follow` until `shutdown`.

    Its calls are those of `Trainer` that training from files makes; they return, and raise, what rank 0's trainer does.
    """

    critic = None
    reference_group = None

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.has_failed = False  # a call has, which ends the other ranks by itself
        self._is_shut_down = False

    @classmethod
    def launch(cls, config: RunConfig) -> Self:
        """Rank 0's part of making a trainer on every rank; `follow` is that of the others.

        A model of the Hugging Face hub is sent by its id and commit, and each machine takes it from its own cache.
        """
        return cls(_trainer(_sent(with_model_ids(config))))

    @property
    def config(self) -> RunConfig:
        """The settings, with mesh.dp as a number."""
        return self._trainer.config

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _CALLS:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            _sent((name, args, kwargs))
            return getattr(self._trainer, name)(*args, **kwargs)
        except BaseException:
            self.has_failed = True  # on the others, too, or they will never hear of it
            raise

    def health(self) -> list[Health]:
        """Returns the health of rank 0 alone."""
        return [self._trainer.health()]

    def shutdown(self) -> None:
        """Has the other ranks leave `follow`, unless a call has failed, which ends them by itself. Idempotent."""
        if not self.has_failed and not self._is_shut_down:
            self._is_shut_down = True
            _sent(None)


def follow() -> None:
    """Makes the calls of rank 0 on another rank until its group is shut down.

    Raises:
        SlimeError: a call failed.
    """
    trainer = _trainer(_sent(None))
    while (request := _sent(None)) is not None:
        name, args, kwargs = request
        getattr(trainer, name)(*args, **kwargs)


def _trainer(config: RunConfig) -> Trainer:
    from slimefsdp.distributed.mesh import choose_device
    from slimefsdp.trainer import Trainer

    return Trainer(config, device=choose_device(config.mesh.device))


def _sent(value: Any) -> Any:
    """Collective: what rank 0 brings; what the others bring is not looked at."""
    import torch
    import torch.distributed as dist

    sent = [value]
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    return sent[0]
