"""Updates: global clipping, loss scaling that changes no result, and skips that all ranks take together."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slimefsdp.errors import StateError
from slimefsdp.optim.optimizer_step import MAX_SKIPPED, LossScale, OptimizerStep, learning_rate
from tests.support.optimizers import optimizer_of
from tests.support.rank_pool import RankPool

SHAPES = {"model.layers.0.mlp.weight": (5, 3), "model.layers.1.mlp.weight": (7,), "lm_head.weight": (2, 2)}


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class Rank:
    """An updater over sharded parameters of ones, fed with gradients by hand."""

    def __init__(self, *, dtype: torch.dtype = torch.float64, replicate: int = 1, **options: Any) -> None:
        size = dist.get_world_size() // replicate
        self._mesh = init_device_mesh("cpu", (replicate, size))
        self._dtype = dtype
        self.named = [
            (name, nn.Parameter(self._sharded(torch.ones(shape, dtype=dtype)))) for name, shape in SHAPES.items()
        ]
        optimizer = optimizer_of(self.named, "sgd", lr=0.1, momentum=0.9, weight_decay=0.0)
        self.updater = OptimizerStep(
            optimizer,
            self.named,
            lambda update: 0.1 / (update + 1),
            **{"max_grad_norm": 1.0, **options},
        )

    def step(self, seed: int, *, spoil: tuple[str, int, float] | None = None) -> dict[str, float]:
        """One update with random gradients times the loss scale; `spoil` sets an element on one rank alone."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named:
            gradient = torch.randn(tuple(parameter.shape), generator=generator, dtype=torch.float64).to(self._dtype)
            parameter.grad = self._sharded(gradient * self.updater.loss_scale)
            if spoil is not None and spoil[:2] == (name, dist.get_rank()):
                parameter.grad.to_local().view(-1)[0] = spoil[2]
        return self.updater.step(world())

    def weights(self) -> list[torch.Tensor]:
        return [parameter.full_tensor().detach().clone() for _, parameter in self.named]

    def _sharded(self, tensor: torch.Tensor) -> Any:
        return distribute_tensor(tensor, self._mesh, [Replicate(), Shard(0)])


def plain_steps(seeds: list[int], max_norm: float) -> tuple[list[torch.Tensor], list[float]]:
    """The same updates on whole tensors."""
    parameters = [nn.Parameter(torch.ones(shape, dtype=torch.float64)) for shape in SHAPES.values()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    norms = []
    for update, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        norms.append(nn.utils.get_total_norm([parameter.grad for parameter in parameters]).item())
        for parameter in parameters:
            parameter.grad *= min(1.0, max_norm / norms[-1])
        optimizer.param_groups[0]["lr"] = 0.1 / (update + 1)
        optimizer.step()
    return [parameter.detach() for parameter in parameters], norms


def some_steps(rank: int, seeds: list[int], replicate: int, max_norm: float, scale: float | None) -> tuple[Any, ...]:
    scaling = None if scale is None else LossScale(scale, growth_interval=2)
    one = Rank(replicate=replicate, max_grad_norm=max_norm, loss_scaling=scaling, with_layer_norms=True)
    metrics = [one.step(seed) for seed in seeds]
    return metrics, one.weights(), one.updater.health


@pytest.mark.parametrize(
    ("size", "replicate", "max_norm", "scale"),
    [
        (1, 1, 1.0, None), (2, 1, 1.0, 2.0**16), (2, 2, 1e4, None), (4, 1, 1e4, 2.0**16), (4, 2, 1.0, None),
        (2, 1, 1e4, None),
    ],
)  # fmt: skip
def test_updates_equal_plain_ones_on_any_mesh_with_and_without_loss_scaling(
    ranks: RankPool, size: int, replicate: int, max_norm: float, scale: float | None
) -> None:
    seeds = [1, 2, 3, 4, 5]
    expected, norms = plain_steps(seeds, max_norm)
    for metrics, weights, health in ranks.run(size, some_steps, seeds, replicate, max_norm, scale):
        assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, rel=1e-12)
        assert max((a - b).abs().max().item() for a, b in zip(weights, expected, strict=True)) <= 1e-12
        # two finite updates double it
        scales = [step.get("loss_scale") for step in metrics]
        assert scales == ([None] * 5 if scale is None else [scale * factor for factor in (1, 1, 2, 2, 4)])
        last = metrics[-1]
        layers = [last[f"grad_norm/{group}"] for group in ("layer_0", "layer_1", "head")]
        assert math.hypot(*layers) == pytest.approx(last["grad_norm"], rel=1e-12) and min(layers) > 0
        assert health.norm == last["grad_norm"] and health.update == 4 and health.first_nonfinite is None


def one_of_several(rank: int, scale: float | None, dtype: torch.dtype) -> list[torch.Tensor]:
    scaling = None if scale is None else LossScale(scale, growth_interval=1)
    one = Rank(dtype=dtype, loss_scaling=scaling)
    for seed in range(3):
        one.step(seed)
    return one.weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scale_changes_no_bit_of_the_weights(ranks: RankPool, dtype: torch.dtype) -> None:
    plain = ranks.run(2, one_of_several, None, dtype)[0]
    for scaled in ranks.run(2, one_of_several, 2.0**12, dtype):
        assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))


def collectives_of_a_step(rank: int) -> list[str]:
    one = Rank(loss_scaling=LossScale(4.0, growth_interval=1), with_layer_norms=True)
    called = []
    original = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        called.append(f"{tuple(tensor.shape)} {tensor.dtype}")
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        one.step(0)
    finally:
        dist.all_reduce = original
    return called


def test_an_update_takes_one_reduction_of_a_number_per_parameter(ranks: RankPool) -> None:
    assert ranks.run(2, collectives_of_a_step) == [["(3,) torch.float64"]] * 2


def caught(call: Callable[[], object]) -> StateError | None:
    try:
        call()
    except StateError as error:
        return error
    return None


def overflows(rank: int, scale: float | None, spoiled: tuple[str, int, float], times: int) -> dict[str, Any]:
    scaling = None if scale is None else LossScale(scale, growth_interval=100)
    one = Rank(loss_scaling=scaling)
    before = one.weights()
    steps, warned = [], []
    for _ in range(times):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            error = caught(lambda: steps.append(one.step(0, spoil=spoiled)))
        warned.append([str(warning.message) for warning in found])
        if error is not None:
            break
    unchanged = all(torch.equal(a, b) for a, b in zip(one.weights(), before, strict=True))
    return {
        "steps": steps, "warned": warned, "error": error, "unchanged": unchanged, "scale": one.updater.loss_scale,
        "counts": (one.updater.updates_taken, one.updater.skipped_in_a_row), "next_lr": one.updater.next_lr,
        "health": one.updater.health, "gradients": [p.grad for _, p in one.named],
    }  # fmt: skip


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_overflow_on_one_rank_alone_is_skipped_by_all_and_blames_the_scale(ranks: RankPool, value: float) -> None:
    name = "model.layers.1.mlp.weight"
    for rank, result in enumerate(ranks.run(3, overflows, 2.0**16, (name, 1, value), 2)):
        assert result["unchanged"] and result["error"] is None and result["gradients"] == [None] * 3
        assert [step["skipped_update"] for step in result["steps"]] == [1.0, 1.0]
        assert [step["loss_scale"] for step in result["steps"]] == [2.0**16, 2.0**15] and result["scale"] == 2.0**14
        # the schedule stands still, and as the scale can go lower the run is in no danger
        assert result["counts"] == (0, 0) and result["next_lr"] == 0.1
        assert result["health"].first_nonfinite == name and result["health"].is_skipped
        assert [len(texts) for texts in result["warned"]] == ([1, 1] if rank == 0 else [0, 0])
        assert all(name in text and "loss scale" in text for texts in result["warned"] for text in texts)


@pytest.mark.parametrize("scale", [None, 1.0], ids=["no scale", "at the floor"])
def test_where_no_scale_is_to_blame_skips_count_and_the_error_names_the_parameter(
    ranks: RankPool, scale: float | None
) -> None:
    for result in ranks.run(2, overflows, scale, ("lm_head.weight", 1, float("nan")), MAX_SKIPPED):
        assert result["unchanged"] and result["counts"] == (0, MAX_SKIPPED) and len(result["steps"]) == MAX_SKIPPED - 1
        error = result["error"]
        assert error is not None and error.field == "optim.lr" and "lm_head.weight" in str(error)
        assert result["scale"] == 1.0


def takes_large(rank: int, max_norm: float) -> list[float]:
    one = Rank(max_grad_norm=max_norm)
    return [one.step(0, spoil=("lm_head.weight", 0, value))["skipped_update"] for value in (1e19, 1e20)]


def test_gradients_that_float32_cannot_square_are_skipped_unless_they_are_clipped(ranks: RankPool) -> None:
    for max_norm, skipped in ((0.0, [0.0, 1.0]), (1.0, [0.0, 0.0])):
        assert ranks.run(1, takes_large, max_norm) == [skipped]


def resumed(rank: int) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Six updates in one go, and the same with a change of process after the second."""
    spoiled = {3: ("lm_head.weight", 0, float("inf"))}

    def fresh() -> Rank:
        return Rank(loss_scaling=LossScale(8.0, growth_interval=3))

    whole = fresh()
    expected = [whole.step(seed, spoil=spoiled.get(seed)) for seed in range(6)]
    first, second = fresh(), fresh()
    found = [first.step(seed) for seed in range(2)]
    state = json.loads(json.dumps(first.updater.progress()))
    second.updater.restore(state)
    for (_, source), (_, target) in zip(first.named, second.named, strict=True):
        target.data.copy_(source.data)
        momentum = second.updater.optimizer.state[target]["momentum_buffer"]
        momentum.copy_(first.updater.optimizer.state[source]["momentum_buffer"])
    found += [second.step(seed, spoil=spoiled.get(seed)) for seed in range(2, 6)]
    equal = all(torch.equal(a, b) for a, b in zip(whole.weights(), second.weights(), strict=True))
    ends = (whole.updater.progress(), second.updater.progress())
    return expected, found, {"equal": equal, "state": state, "ends": ends}


def test_resuming_in_the_middle_of_an_interval_changes_nothing(ranks: RankPool) -> None:
    for expected, found, rest in ranks.run(2, resumed):
        assert str(found) == str(expected) and rest["equal"] and rest["ends"][0] == rest["ends"][1]
        assert [step["loss_scale"] for step in expected] == [8.0, 8.0, 8.0, 16.0, 8.0, 8.0]
        assert rest["state"] == {
            "updates_taken": 2, "skipped_in_a_row": 0, "loss_scale": 8.0, "finite_in_a_row": 2
        }  # fmt: skip


def rates(rank: int, schedule: str) -> tuple[list[float], list[float]]:
    """The learning rates of eight updates in one go, and with two changes of process; the fourth is skipped."""

    def fresh() -> Rank:
        one = Rank()
        one.updater._schedule = partial(
            learning_rate, peak=0.3, schedule=schedule, warmup_updates=2, total_updates=7, min_ratio=0.1
        )
        return one

    def step(one: Rank, seed: int) -> float:
        return one.step(seed, spoil=("lm_head.weight", 0, math.nan) if seed == 3 else None)["lr"]

    whole = fresh()
    straight, found, state = [step(whole, seed) for seed in range(8)], [], fresh().updater.progress()
    for seeds in (range(3), range(3, 5), range(5, 8)):
        one = fresh()
        one.updater.restore(json.loads(json.dumps(state)))
        found += [step(one, seed) for seed in seeds]
        state = one.updater.progress()
    return straight, found


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rates_of_a_resumed_run_are_those_of_a_straight_one(ranks: RankPool, schedule: str) -> None:
    for straight, found in ranks.run(2, rates, schedule):
        assert found == straight and straight[3] == straight[4] and len(set(straight)) >= 2
