"""The optimiser with its schedule and counters: each update is clipped by global norm, a non-finite one skipped."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from slimefsdp.errors import StateError
from slimefsdp.optim.grad_norm import gradient_health, scale_gradients, squared_norms
from slimefsdp.optim.loss_scale import LossScale
from slimefsdp.optim.optimizer import update_shards
from slimefsdp.results import GradientHealth


class OptimizerStep:
    """Takes optimiser updates and counts them.

    Args:
        optimizer: over the parameters.
        named_parameters: those that are trained, whose gradients are clipped together, in model order.
        schedule: update number, counted from 0, to learning rate.
        max_grad_norm: the global L2 norm that gradients are scaled down to.
        max_skipped: this many non-finite norms in a row are an error.
        loss_scaling: of float16; None: losses are not scaled.
        with_layer_norms: put the norm of each layer group into the metrics of an update.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        schedule: Callable[[int], float],
        *,
        max_grad_norm: float,
        max_skipped: int,
        loss_scaling: LossScale | None = None,
        with_layer_norms: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.updates_taken = 0
        self.skipped_in_a_row = 0
        self.health: GradientHealth | None = None  # of the last update
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._schedule = schedule
        self._max_grad_norm = max_grad_norm
        self._max_skipped = max_skipped
        self._loss_scaling = loss_scaling
        self._with_layer_norms = with_layer_norms

    @property
    def loss_scale(self) -> float:
        """What every loss is multiplied by before backward, until the next `step`."""
        return 1.0 if self._loss_scaling is None else self._loss_scaling.scale

    @property
    def has_gradients(self) -> bool:
        """Whether gradients wait for the next `step`."""
        return any(parameter.grad is not None for parameter in self._parameters)

    @property
    def next_lr(self) -> float:
        """The learning rate of the next update."""
        return self._schedule(self.updates_taken)

    def step(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Collective: one update with the gradients gathered so far; they are gone afterwards. Returns its metrics.

        A skipped update changes no weight and does not advance the schedule. While the loss scale can still be lowered,
        a norm that is not finite counts as the scale's fault, and towards no limit.

        Raises:
            StateError: there are no gradients, or too many updates in a row were skipped.
        """
        if not self.has_gradients:
            message = "optimizer_step() without gradients"
            raise StateError(message, field="optimizer_step", hint="call forward_backward first")
        lr, loss_scale = self.next_lr, self.loss_scale
        squares = squared_norms(self._parameters, group)
        self.health = gradient_health(self._names, squares, loss_scale=loss_scale, update=self.updates_taken)
        norm, is_skipped = self.health.norm, self.health.is_skipped
        if not is_skipped:
            # unscaled and clipped in one pass; the scale is a power of two, so the order rounds nothing
            scale_gradients(self._parameters, min(1.0, self._max_grad_norm / max(norm, 1e-300)) / loss_scale)
            for parameter_group in self.optimizer.param_groups:
                parameter_group["lr"] = lr
            update_shards(self.optimizer)
            self.updates_taken += 1
            self.skipped_in_a_row = 0
        elif self._loss_scaling is None or self._loss_scaling.is_at_floor:
            self.skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        if self._loss_scaling is not None:
            self._loss_scaling.adjust(is_finite=not is_skipped)
        if is_skipped:
            self._report_skip(group)
        metrics = {"grad_norm": norm, "lr": lr, "skipped_update": float(is_skipped)}
        if self._loss_scaling is not None:
            metrics["loss_scale"] = loss_scale
        if self._with_layer_norms:
            metrics |= {f"grad_norm/{name}": value for name, value in self.health.group_norms.items()}
        return metrics

    def progress(self) -> dict[str, Any]:
        """The counters as JSON: what `restore` needs to go on from here."""
        state: dict[str, Any] = {"updates_taken": self.updates_taken, "skipped_in_a_row": self.skipped_in_a_row}
        if self._loss_scaling is not None:
            state["loss_scale"] = self._loss_scaling.scale
            state["finite_in_a_row"] = self._loss_scaling.finite_in_a_row
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a `progress()`, and forgets the gradients gathered so far.

        Where it has no loss scale (it was not float16, or is older than loss scaling) the present one stays.
        """
        self.optimizer.zero_grad(set_to_none=True)  # of the weights before: no part of what was saved
        self.health = None
        self.updates_taken = state["updates_taken"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self._loss_scaling is not None and "loss_scale" in state:
            self._loss_scaling.scale = state["loss_scale"]
            self._loss_scaling.finite_in_a_row = state["finite_in_a_row"]

    def _report_skip(self, group: dist.ProcessGroup) -> None:
        assert self.health is not None
        culprit = self.health.first_nonfinite or "their sum"
        if self.skipped_in_a_row >= self._max_skipped:
            raise StateError(
                f"{self.skipped_in_a_row} gradient norms in a row were not finite, at last first in {culprit}",
                field="optim.max_skipped_updates",
                hint="lower optim.lr, look at the batch, or raise the limit",
            )
        if dist.get_rank(group) == 0:
            scaling = "" if self._loss_scaling is None else f"; the loss scale is now {self.loss_scale:g}"
            warnings.warn(
                f"update {self.updates_taken} was skipped: gradients are not finite, first in {culprit}{scaling}",
                stacklevel=3,
            )
