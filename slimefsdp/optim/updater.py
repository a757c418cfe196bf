"""The optimiser with its schedule and counters: each update is clipped by global norm, a non-finite one skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.errors import StateError
from slimefsdp.optim.build import clip_gradients


class Updater:
    """Takes optimiser updates and counts them.

    Args:
        optimizer: over `parameters`.
        parameters: whose gradients are clipped together.
        schedule: update number, counted from 0, to learning rate.
        max_grad_norm: the global L2 norm that gradients are scaled down to.
        max_skipped: this many non-finite norms in a row are an error.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        schedule: Callable[[int], float],
        *,
        max_grad_norm: float,
        max_skipped: int,
    ) -> None:
        self.optimizer = optimizer
        self.updates_taken = 0
        self.skipped_in_a_row = 0
        self._parameters = parameters
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._max_skipped = max_skipped

    def step(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Collective: one update with the gradients gathered so far; they are gone afterwards. Returns its metrics.

        A skipped update changes no weight and does not advance the schedule.

        Raises:
            StateError: there are no gradients, or too many updates in a row were skipped.
        """
        if all(parameter.grad is None for parameter in self._parameters):
            raise StateError("optimizer_step() without gradients", hint="call forward_backward first")
        lr = self._schedule(self.updates_taken)
        norm = clip_gradients(self._parameters, self._max_grad_norm, group)
        is_finite = math.isfinite(norm)
        if is_finite:
            for parameter_group in self.optimizer.param_groups:
                parameter_group["lr"] = lr
            self.optimizer.step()
            self.updates_taken += 1
            self.skipped_in_a_row = 0
        else:
            self.skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self.skipped_in_a_row >= self._max_skipped:
            raise StateError(
                f"{self.skipped_in_a_row} gradient norms in a row were not finite",
                field="optim.max_skipped_updates",
                hint="lower optim.lr, look at the batch, or raise the limit",
            )
        return {"grad_norm": norm, "lr": lr, "skipped_update": float(not is_finite)}
