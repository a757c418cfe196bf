"""Takes optimiser updates: clips gradients by their global norm, and skips updates whose norm is not finite.

An update is also skipped if the square of the clipped norm is not finite in float32. `OptimizerStep` counts updates and
applies the learning-rate schedule. The loss scale for float16 and gradient norms follow below.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from slimefsdp.distributed.mesh import local_shard
from slimefsdp.errors import ConfigError, StateError
from slimefsdp.optim.optimizer import update_shards
from slimefsdp.results import GradientHealth
from slimefsdp.rpc import UpdateSettings

MAX_SKIPPED = 3  # so many skipped updates in a row raise an error, because a single bad batch cannot cause them
_NO_OVERRIDES = UpdateSettings()
_LARGEST_NORM = math.sqrt(torch.finfo(torch.float32).max)  # a larger one makes AdamW's second moment infinite


class OptimizerStep:
    """Takes optimiser updates and counts them.

    Args:
        optimizer: an optimiser over the parameters, from `build_optimizer`.
        named_parameters: the trained parameters, in model order; their gradients are clipped together.
        schedule: maps an update's number, counted from 0, to its learning rate.
        max_grad_norm: the largest global L2 norm of gradients; larger gradients are scaled down to it. 0 means no
            clipping.
        loss_scaling: the loss scale for float16; None means that losses are not scaled.
        with_layer_norms: whether an update's metrics include the gradient norm of each layer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        schedule: Callable[[int], float],
        *,
        max_grad_norm: float,
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
        self._built = [dict(group) for group in optimizer.param_groups]  # each group's settings from the run
        self._is_half_taken = False  # an update failed after some weights had changed
        self._max_grad_norm = max_grad_norm
        self._loss_scaling = loss_scaling
        self._with_layer_norms = with_layer_norms

    def another(self) -> OptimizerStep:
        """Returns an OptimizerStep for the same optimiser and parameters, with counters at 0."""
        other = copy(self)
        other.updates_taken = other.skipped_in_a_row = 0
        other.health, other._is_half_taken = None, False
        other._loss_scaling = None if self._loss_scaling is None else self._loss_scaling.another()
        return other

    @property
    def loss_scale(self) -> float:
        """Returns the factor on every loss before backward; it changes only in `step`."""
        return 1.0 if self._loss_scaling is None else self._loss_scaling.scale

    @property
    def has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    @property
    def next_lr(self) -> float:
        return self._schedule(self.updates_taken)

    def require_whole(self, call: str) -> None:
        """Checks that no update failed halfway since the last `restore`.

        After such a failure, only some of the weights and moments are updated.

        Raises:
            StateError: an update failed halfway.
        """
        if self._is_half_taken:
            raise StateError(
                f"{call}() after update {self.updates_taken} failed halfway: some weights and moments have taken it, "
                "others have not",
                field=call,
                hint="load a checkpoint",
            )

    @torch.no_grad()  # with autograd, every access to a shard would be recorded
    def step(self, group: dist.ProcessGroup, settings: UpdateSettings | None = None) -> dict[str, float]:
        """Collective: takes one update with the accumulated gradients, removes the gradients, and returns metrics.

        A skipped update changes no weight and does not advance the schedule. It does not count towards `MAX_SKIPPED`
        while the loss scale can still be lowered, because the scale may be the cause. If an error, such as a lack of
        memory, occurs while weights change, only some of them are updated: see `require_whole`.

        Args:
            settings: settings for this update only; None values keep the run's settings.

        Raises:
            StateError: there are no gradients, too many updates in a row were skipped, or an earlier update failed
                halfway.
            ConfigError: `settings` has an eps, and the optimiser is SGD.
        """
        self.require_whole("optimizer_step")
        overrides = settings or _NO_OVERRIDES
        if overrides.eps is not None and all(built["rule"] == "sgd" for built in self._built):
            problem = f"eps={overrides.eps} of an optimiser update, and optim.name=sgd has none"
            raise ConfigError(problem, field="eps", hint="leave it out, or set optim.name=adamw")
        if not self.has_gradients:
            message = "optimizer_step() without gradients"
            raise StateError(message, field="optimizer_step", hint="call forward_backward first")
        lr, loss_scale = self.next_lr if overrides.lr is None else overrides.lr, self.loss_scale
        squares = squared_norms(self._parameters, group)
        max_norm = self._max_grad_norm if overrides.max_grad_norm is None else overrides.max_grad_norm
        self.health = gradient_health(
            self._names, squares, loss_scale=loss_scale, update=self.updates_taken, max_grad_norm=max_norm
        )
        norm, is_skipped = self.health.norm, self.health.is_skipped
        if not is_skipped:
            # gradients are unscaled and clipped in one pass; the loss scale is a power of two, so the division is exact
            factor = (min(1.0, max_norm / max(norm, 1e-300)) if max_norm else 1.0) / loss_scale
            for parameter_group, built in zip(self.optimizer.param_groups, self._built, strict=True):
                parameter_group.update(_of_group(built, overrides), lr=lr * built["lr_ratio"])
            try:
                scale_gradients(self._parameters, factor)
                self._is_half_taken = True
                update_shards(self.optimizer, group, update=self.updates_taken)
                self._is_half_taken = False
            except BaseException:
                self._forget_gradients()  # the gradients are scaled already, and may be overwritten
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
        """Returns the counters as plain JSON, for `restore`."""
        state: dict[str, Any] = {"updates_taken": self.updates_taken, "skipped_in_a_row": self.skipped_in_a_row}
        if self._loss_scaling is not None:
            state["loss_scale"] = self._loss_scaling.scale
            state["finite_in_a_row"] = self._loss_scaling.finite_in_a_row
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the counters that `progress` returned, and removes gradients.

        Weights and moments must be restored before. If `state` has no loss scale, because it is from a run without
        float16 or an older version, the current scale stays.
        """
        self._forget_gradients()  # the gradients belong to the weights before the restore
        self.health, self._is_half_taken = None, False
        self.updates_taken = state["updates_taken"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self._loss_scaling is not None and "loss_scale" in state:
            self._loss_scaling.scale = state["loss_scale"]
            self._loss_scaling.finite_in_a_row = state["finite_in_a_row"]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Resets moments and counters to 0, as before the first update, and removes gradients."""
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
        if self.skipped_in_a_row >= MAX_SKIPPED:
            raise StateError(
                f"{self.skipped_in_a_row} gradient norms in a row were not finite, at last first in {culprit}",
                field="optim.lr",
                hint="lower it, or look at the batch",
            )
        if dist.get_rank(group) == 0:
            scaling = "" if self._loss_scaling is None else f"; the loss scale is now {self.loss_scale:g}"
            warnings.warn(
                f"update {self.updates_taken} was skipped: gradients are not finite, first in {culprit}{scaling}",
                stacklevel=4,
            )


def _of_group(built: dict[str, Any], settings: UpdateSettings) -> dict[str, Any]:
    """Returns the settings of a parameter group for one update: those of the run, with `settings` as overrides."""
    overrides: dict[str, Any] = {"weight_decay": settings.weight_decay if built["decays"] else None}
    if built["rule"] == "sgd":
        overrides["momentum"] = None if settings.betas is None else settings.betas[0]
    elif built["rule"] != "muon":
        overrides |= {"betas": settings.betas, "eps": settings.eps}
    return {name: built[name] if value is None else value for name, value in overrides.items()}


def learning_rate(
    update: int,
    *,
    peak: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_updates: int,
    total_updates: int,
    min_ratio: float,
) -> float:
    """Returns the learning rate of update number `update`, counted from 0.

    The rate rises linearly during warm-up, and is `peak` in the last update of warm-up. Then it decays to `peak *
    min_ratio` in update total_updates - 1, and stays constant.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    progress = min(1.0, (update - warmup_updates) / max(1, total_updates - 1 - warmup_updates))
    shape = 1 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (min_ratio + (1 - min_ratio) * shape)


# ---------------------------------------------------------------------- the loss scale of float16

GROWTH = 2.0
BACKOFF = 0.5
FLOOR = 1.0


class LossScale:
    """Holds the factor on the loss for float16, and adapts it after every update.

    float16 gradients below 6e-8 vanish and above 65504 overflow. The scale is a power of two, so that dividing float32
    gradients by it is exact. It is halved after an update with non-finite gradients, and doubled after
    `growth_interval` finite ones in a row. The global norm decides both, so the scale is equal on all ranks.

    Args:
        init: the first scale, a power of two of at least 1.
        growth_interval: number of finite updates in a row after which the scale is doubled.
    """

    def __init__(self, init: float, growth_interval: int = 2000) -> None:
        self.scale = float(init)
        self.finite_in_a_row = 0  # finite updates since the scale last changed
        self._init, self._growth_interval = init, growth_interval

    def another(self) -> LossScale:
        return LossScale(self._init, self._growth_interval)

    @property
    def is_at_floor(self) -> bool:
        """Returns whether the scale cannot be lowered further, so that an overflow must have another cause."""
        return self.scale <= FLOOR

    def adjust(self, *, is_finite: bool) -> None:
        """Adapts the scale after an update.

        Args:
            is_finite: whether the update's gradients were finite.
        """
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
# One reduction of a float64 vector of squared norms, and one synchronisation with the host, give the global norm for
# clipping, the norm of each layer, and the name of the first parameter whose gradient is not finite.

_LAYER = re.compile(r"\.(\d+)\.")  # model.layers.3.mlp.experts.5.w1: the first number is the layer's
_GROUPS = {
    "embedding": re.compile(r"embed_tokens|embed_in|embeddings?\b|\bwte\b|\bwpe\b|embed_positions"),
    "head": re.compile(r"head\b|embed_out|\bscore\b"),
    "final_norm": re.compile(r"norm\b|\bln_f\b|layernorm|layer_norm"),
}


@cache
def layer_group(name: str) -> str:
    """Returns the part of the model that has a parameter: `layer_3`, `embedding`, `head`, `final_norm` or `other`.

    Args:
        name: the parameter's Hugging Face name.
    """
    if numbered := _LAYER.search(name):
        return f"layer_{numbered[1]}"
    return next((group for group, pattern in _GROUPS.items() if pattern.search(name)), "other")


def squared_norms(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[float]:
    """Collective: returns the squared L2 norm of each parameter's full gradient in float64; 0 without a gradient.

    A shard counts once, even if several ranks hold it. Every rank gets the same numbers.

    Args:
        parameters: at least one must have a gradient.
        group: all ranks.
    """
    gradients = [parameter.grad for parameter in parameters]
    norms = torch._foreach_norm([local_shard(grad) for grad in gradients if grad is not None], 2, torch.float64)
    remaining_norms = iter(norms)
    zero = torch.zeros_like(norms[0])
    counted_norms = []
    last: tuple[Any, ...] = ()
    for gradient in gradients:
        if gradient is None:
            counted_norms.append(zero)
            continue
        # successive parameters mostly have the same sharding, and querying the mesh is the slowest operation here
        sharding = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None,)
        if sharding != last:
            is_counted, last = _is_first_replica(gradient, group), sharding
        norm = next(remaining_norms)
        counted_norms.append(norm if is_counted else zero)
    total = torch.stack(counted_norms).square()
    dist.all_reduce(total, group=group)
    squares: list[float] = total.tolist()  # the only synchronisation with the host in an update
    return squares


def scale_gradients(parameters: Sequence[nn.Parameter], factor: float) -> None:
    if factor != 1.0:
        torch._foreach_mul_([local_shard(grad) for p in parameters if (grad := p.grad) is not None], factor)


def gradient_health(
    names: Sequence[str], squares: Sequence[float], *, loss_scale: float, update: int, max_grad_norm: float = 0.0
) -> GradientHealth:
    """Returns the report on the gradients of an update.

    Args:
        names: names of the parameters, in model order.
        squares: the result of `squared_norms`, for gradients of scaled losses.
        update: number of updates taken so far.
        max_grad_norm: the norm to which gradients are clipped; 0 means no clipping.
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
    """Returns whether this rank is the first rank that holds these rows."""
    if not isinstance(gradient, DTensor):
        return dist.get_rank(group) == 0
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None, "a gradient on ranks outside its mesh"
    return all(
        index == 0 or not isinstance(placement, Replicate)
        for index, placement in zip(coordinate, gradient.placements, strict=True)
    )
