"""Takes one optimiser update: clips gradients by their global norm, or skips the update if the norm is not finite.

It is also skipped where the clipped norm's square is not finite in float32.

`OptimizerStep` keeps the schedule's place and the counters; the norms it looks at and the loss scale that float16
needs follow below it.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.optim.optimizer import update_shards
from slimefsdp.results import GradientHealth
from slimefsdp.rpc import UpdateSettings

_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)  # AdamW's second moment would be infinite ever after


class OptimizerStep:
    """Takes optimiser updates and counts them.

    Args:
        optimizer: over the parameters, from `build_optimizer`.
        named_parameters: the trained parameters, in model order; their gradients are clipped together.
        schedule: update number, counted from 0, to learning rate.
        max_grad_norm: the global L2 norm that gradients are scaled down to; 0: they are left as they are.
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
        self._built = [dict(one) for one in optimizer.param_groups]  # with the settings that hold where none are given
        self._is_half_taken = False
        self._max_grad_norm = max_grad_norm
        self._max_skipped = max_skipped
        self._loss_scaling = loss_scaling
        self._with_layer_norms = with_layer_norms

    def another(self) -> OptimizerStep:
        """Returns a new one over the same optimiser and parameters that has taken no update."""
        made = copy(self)
        made.updates_taken = made.skipped_in_a_row = 0
        made.health, made._is_half_taken = None, False
        made._loss_scaling = None if self._loss_scaling is None else self._loss_scaling.another()
        return made

    @property
    def loss_scale(self) -> float:
        """The factor on every loss before backward, until the next `step`."""
        return 1.0 if self._loss_scaling is None else self._loss_scaling.scale

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients for the next `step`."""
        return any(parameter.grad is not None for parameter in self._parameters)

    @property
    def next_lr(self) -> float:
        return self._schedule(self.updates_taken)

    def require_whole(self, call: str) -> None:
        """Refuses a call after an update that failed halfway, until `restore`.

        The weights and moments that are there then are those of no update.

        Raises:
            StateError: there was one.
        """
        if self._is_half_taken:
            raise StateError(
                f"{call}() after update {self.updates_taken} failed halfway: some weights and moments have taken it, "
                "others have not",
                field=call,
                hint="load a checkpoint",
            )

    @torch.no_grad()  # outside of it, every look at a shard is an operation of autograd
    def step(self, group: dist.ProcessGroup, settings: UpdateSettings | None = None) -> dict[str, float]:
        """Collective: takes one update with the accumulated gradients, drops them, and returns metrics.

        A skipped update changes no weight and does not advance the schedule. While the loss scale can still be lowered,
        a norm that is not finite counts as the scale's fault, and towards no limit.

        An error while weights change, no memory for one, leaves an update that is taken in part: see `require_whole`.

        Args:
            settings: of this update alone.

        Raises:
            StateError: there are no gradients, too many updates in a row were skipped, or one before failed halfway.
            ConfigError: `settings` has an eps, and the optimiser is SGD.
        """
        self.require_whole("optimizer_step")
        own = settings or UpdateSettings()
        if own.eps is not None and all(built["rule"] == "sgd" for built in self._built):
            problem = f"eps={own.eps} of an optimiser update, and optim.name=sgd has none"
            raise ConfigError(problem, field="eps", hint="leave it out, or set optim.name=adamw")
        if not self.has_gradients:
            message = "optimizer_step() without gradients"
            raise StateError(message, field="optimizer_step", hint="call forward_backward first")
        lr, loss_scale = self.next_lr if own.lr is None else own.lr, self.loss_scale
        squares = squared_norms(self._parameters, group)
        most = self._max_grad_norm if own.max_grad_norm is None else own.max_grad_norm
        self.health = gradient_health(
            self._names, squares, loss_scale=loss_scale, update=self.updates_taken, max_grad_norm=most
        )
        norm, is_skipped = self.health.norm, self.health.is_skipped
        if not is_skipped:
            # unscaled and clipped in one pass; the scale is a power of two, so the order rounds nothing
            factor = (min(1.0, most / max(norm, 1e-300)) if most else 1.0) / loss_scale
            for parameter_group, built in zip(self.optimizer.param_groups, self._built, strict=True):
                parameter_group.update(_of_group(built, own), lr=lr * built["lr_ratio"])
            try:
                scale_gradients(self._parameters, factor)
                self._is_half_taken = True
                update_shards(self.optimizer, group, update=self.updates_taken)
                self._is_half_taken = False
            except BaseException:
                self._forget_gradients()  # they are scaled, and written over in part
                raise
            self.updates_taken += 1
            self.skipped_in_a_row = 0
        elif self._loss_scaling is None or self._loss_scaling.is_at_floor:
            self.skipped_in_a_row += 1
        self._forget_gradients()
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
        """Returns the counters as JSON, for `restore`."""
        state: dict[str, Any] = {"updates_taken": self.updates_taken, "skipped_in_a_row": self.skipped_in_a_row}
        if self._loss_scaling is not None:
            state["loss_scale"] = self._loss_scaling.scale
            state["finite_in_a_row"] = self._loss_scaling.finite_in_a_row
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `progress()`, once weights and moments are those of that moment; drops gradients.

        Where it has no loss scale (it was not float16, or is older than loss scaling) the present one stays.
        """
        self._forget_gradients()  # of the weights before: no part of what was saved
        self.health, self._is_half_taken = None, False
        self.updates_taken = state["updates_taken"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self._loss_scaling is not None and "loss_scale" in state:
            self._loss_scaling.scale = state["loss_scale"]
            self._loss_scaling.finite_in_a_row = state["finite_in_a_row"]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Resets moments and counters to 0, as if no update had been taken, and drops gradients."""
        self._forget_gradients()
        for parameter in self._parameters:
            for value in self.optimizer.state[parameter].values():
                local_shard(value).zero_()
        self.health, self.updates_taken, self.skipped_in_a_row = None, 0, 0

    def _forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

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
                stacklevel=4,
            )


def _of_group(built: dict[str, Any], settings: UpdateSettings) -> dict[str, Any]:
    """Returns the update settings of a parameter group: those it was built with, unless `settings` override them."""
    given: dict[str, Any] = {"weight_decay": settings.weight_decay if built["decays"] else None}
    if built["rule"] == "sgd":
        given["momentum"] = None if settings.betas is None else settings.betas[0]
    elif built["rule"] != "muon":
        given |= {"betas": settings.betas, "eps": settings.eps}
    return {name: built[name] if value is None else value for name, value in given.items()}


# ---------------------------------------------------------------------- the loss scale of float16

GROWTH = 2.0
BACKOFF = 0.5
FLOOR = 1.0


class LossScale:
    """The factor on the loss. It is constant between two calls of `adjust`, so that micro-batches add up.

    float16 gradients below 6e-8 vanish and above 65504 overflow. The scale is a power of two, so that taking it out of
    float32 gradients again is exact. It is halved after an update whose gradients were not finite, and doubled after so
    many in a row that were. Both follow from a norm that all ranks share, so the scale is the same everywhere without
    being communicated.

    Args:
        init: the first scale, a power of two of at least 1.
        growth_interval: finite updates in a row after which the scale doubles.
    """

    def __init__(self, init: float, growth_interval: int) -> None:
        self.scale = float(init)
        self.finite_in_a_row = 0  # since the scale last changed
        self._init, self._growth_interval = init, growth_interval

    def another(self) -> LossScale:
        """Returns a new one with the initial scale."""
        return LossScale(self._init, self._growth_interval)

    @property
    def is_at_floor(self) -> bool:
        """Whether the scale cannot be lowered, so that the scale is not to blame for an overflow."""
        return self.scale <= FLOOR

    def adjust(self, *, is_finite: bool) -> None:
        """Adapts the scale after an update, whose gradients were finite or not."""
        if not is_finite:
            self.scale = max(FLOOR, self.scale * BACKOFF)
            self.finite_in_a_row = 0
            return
        self.finite_in_a_row += 1
        if self.finite_in_a_row == self._growth_interval:
            self.scale *= GROWTH
            self.finite_in_a_row = 0


# ---------------------------------------------------------------------- gradient norms
#
# The squared norms travel as one float64 vector, so the global norm that clipping needs, the norm of each layer and the
# name of the first parameter that is not finite cost one reduction and one look from the host.

_LAYER = re.compile(r"\.(\d+)\.")  # model.layers.3.mlp.experts.5.w1: the first number is the layer's
_GROUPS = {
    "embedding": re.compile(r"embed_tokens|embed_in|embeddings?\b|\bwte\b|\bwpe\b|embed_positions"),
    "head": re.compile(r"head\b|embed_out|\bscore\b"),
    "final_norm": re.compile(r"norm\b|\bln_f\b|layernorm|layer_norm"),
}


@cache
def layer_group(name: str) -> str:
    """Returns the part of the model that a parameter of this Hugging Face name belongs to.

    Returns:
        `layer_3` for anything in a numbered layer, else `embedding`, `head`, `final_norm`, or `other`.
    """
    if numbered := _LAYER.search(name):
        return f"layer_{numbered[1]}"
    return next((group for group, pattern in _GROUPS.items() if pattern.search(name)), "other")


def squared_norms(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[float]:
    """Collective: returns the squared L2 norm of each parameter's whole gradient, float64; 0 without a gradient.

    However the gradients are sharded: each shard counts once, also where several ranks hold replicas of it. Every rank
    gets the same numbers, because all ranks take part, not only those that hold different shards.

    Args:
        parameters: at least one of them with a gradient.
        group: all ranks.
    """
    gradients = [parameter.grad for parameter in parameters]
    norms = torch._foreach_norm([local_shard(one) for one in gradients if one is not None], 2, torch.float64)
    found = iter(norms)
    nothing = torch.zeros_like(norms[0])
    own = []
    last: tuple[Any, ...] = ()
    for gradient in gradients:
        if gradient is None:
            own.append(nothing)
            continue
        # neighbours are sharded alike: asking the mesh for each costs more than all else here
        how = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None,)
        if how != last:
            is_counted, last = _is_first_replica(gradient, group), how
        norm = next(found)
        own.append(norm if is_counted else nothing)
    total = torch.stack(own).square()
    dist.all_reduce(total, group=group)
    squares: list[float] = total.tolist()  # the update's one host synchronisation
    return squares


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    """Multiplies all gradients in place; a factor of 1 touches nothing."""
    if factor != 1.0:
        torch._foreach_mul_([local_shard(one) for p in parameters if (one := p.grad) is not None], factor)


def gradient_health(
    names: Sequence[str], squares: Sequence[float], *, loss_scale: float, update: int, max_grad_norm: float = 0.0
) -> GradientHealth:
    """Returns the report on gradients with the squared norms `squares`.

    Args:
        names: of the parameters, in model order.
        squares: as `squared_norms` returns them, for gradients that are `loss_scale` times too large.
        update: updates taken so far.
        max_grad_norm: what the norm is clipped to; 0: it is not clipped.
    """
    groups: dict[str, float] = {}
    for name, square in zip(names, squares, strict=True):
        group = layer_group(name)
        groups[group] = groups.get(group, 0.0) + square
    first_nonfinite = next((n for n, square in zip(names, squares, strict=True) if not math.isfinite(square)), None)
    norm = math.sqrt(sum(squares)) / loss_scale
    clipped = min(norm, max_grad_norm) if max_grad_norm else norm
    return GradientHealth(
        update=update,
        norm=norm,
        group_norms={group: math.sqrt(square) / loss_scale for group, square in groups.items()},
        first_nonfinite=first_nonfinite,
        is_skipped=not math.isfinite(norm) or clipped > _LARGEST_NORM,
    )


def _is_first_replica(gradient: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether this rank counts among the ranks that hold the same rows."""
    if not isinstance(gradient, DTensor):
        return dist.get_rank(group) == 0
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None, "a gradient on ranks outside its mesh"
    return all(
        place == 0 or not isinstance(placement, Replicate)
        for place, placement in zip(coordinate, gradient.placements, strict=True)
    )
