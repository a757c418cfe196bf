"""Runs the loop on ranks that torchrun started: rank 0 runs the loop, and the other ranks repeat its calls.

Rank 0 sends every call to all ranks before it makes the call, so that all ranks call the same method of their `Trainer`
with the same arguments. Ray is not used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from actors.run_dir import with_model_ids
from slimefsdp.config import RunConfig, TrainerConfig
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
    """The loop's handle on all ranks, used on rank 0; the other ranks are in `follow` until `shutdown`.

    The handle has the calls of `Trainer` that supervised training needs. Each call returns or raises what rank 0's
    trainer returns or raises.
    """

    critic = None
    reference_group = None

    def __init__(self, trainer: Trainer, config: RunConfig) -> None:
        self._trainer, self._config = trainer, config
        self.has_failed = False  # whether a call has failed, which ends the other ranks, too
        self._is_shut_down = False

    @classmethod
    def launch(cls, config: RunConfig) -> Self:
        """Builds the trainer of rank 0, while the other ranks build their trainers in `follow`.

        A model of the Hugging Face hub is sent as id and commit, since each machine has its own cache.
        """
        config = with_model_ids(config)
        return cls(_trainer(_sent(config)), config)

    @property
    def config(self) -> RunConfig:
        """Returns the settings, with the values that the trainer chose for settings such as fsdp.sharding=auto."""
        resolved = self._trainer.config
        return self._config.model_copy(update={name: getattr(resolved, name) for name in TrainerConfig.model_fields})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _CALLS:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return partial(self._call, name)

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        try:
            _sent((name, args, kwargs))
            return getattr(self._trainer, name)(*args, **kwargs)
        except BaseException:
            self.has_failed = True  # the call failed on the other ranks, too, or they will never receive it
            raise

    def health(self) -> list[Health]:
        """Returns the health of rank 0 only."""
        return [self._trainer.health()]

    def shutdown(self) -> None:
        """Has the other ranks leave `follow`, unless a failed call has ended them. Idempotent."""
        if not self.has_failed and not self._is_shut_down:
            self._is_shut_down = True
            _sent(None)


def follow() -> None:
    """Repeats the calls of rank 0 on this rank until rank 0 shuts its `TorchrunGroup` down.

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
    """Returns the value of rank 0 on all ranks; ignores the values of other ranks. Collective."""
    import torch
    import torch.distributed as dist

    sent = [value]
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    return sent[0]
