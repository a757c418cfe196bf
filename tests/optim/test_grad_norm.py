"""Norms over shards and replicas equal those of whole tensors; each parameter finds its part of the model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from slimefsdp.optim.optimizer_step import gradient_health, layer_group, scale_gradients, squared_norms
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import ARCHITECTURES, tiny_model

SHAPES = [(5, 3), (1, 4), (7,), (2, 2, 2)]  # fewer rows than ranks, and rows that no number of ranks divides
LAYOUTS: dict[tuple[int, ...], list[Placement]] = {
    (1,): [Shard(0)],
    (2,): [Shard(0)],
    (4,): [Shard(0)],
    (2, 2): [Replicate(), Shard(0)],
    (4, 1): [Replicate(), Shard(0)],
}


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def with_gradients(gradients: list[torch.Tensor], sizes: tuple[int, ...]) -> list[nn.Parameter]:
    """Sharded parameters with these gradients, and before them one without any."""
    mesh = init_device_mesh("cpu", sizes)
    parameters = [nn.Parameter(torch.zeros(2))]
    for gradient in gradients:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, LAYOUTS[sizes]))
        parameter.grad = distribute_tensor(gradient, mesh, LAYOUTS[sizes])
        parameters.append(parameter)
    return parameters


def sharded_norms(rank: int, gradients: list[torch.Tensor], sizes: tuple[int, ...]) -> list[float]:
    return squared_norms(with_gradients(gradients, sizes), world())


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_norms_are_those_of_whole_gradients_on_any_layout(ranks: RankPool, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape) * 10 for shape in SHAPES]
    truth = [0.0, *(gradient.double().square().sum().item() for gradient in gradients)]
    for found in ranks.run(math.prod(sizes), sharded_norms, gradients, sizes):
        assert found == pytest.approx(truth, rel=1e-14)


def plain_norms(rank: int) -> list[float]:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full((3,), 2.0)
    return squared_norms([parameter], world())


def test_a_tensor_that_all_ranks_hold_whole_counts_once(ranks: RankPool) -> None:
    assert ranks.run(3, plain_norms) == [[pytest.approx(12.0, rel=1e-14)]] * 3


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
def test_one_element_that_is_not_finite_is_known_to_all_ranks_by_its_parameter(
    ranks: RankPool, sizes: tuple[int, ...], value: float
) -> None:
    gradients = [torch.ones(4, 2), torch.ones(3), torch.ones(4)]
    gradients[1][2] = value  # the last shard's
    gradients[2][0] = value  # a later parameter, on an earlier rank
    for squares in ranks.run(math.prod(sizes), sharded_norms, gradients, sizes):
        health = gradient_health(["none", "a", "b", "c"], squares, loss_scale=1.0, update=3)
        assert health.first_nonfinite == "b" and health.is_skipped and not math.isfinite(health.norm)
        assert "b" in str(health) and squares[1] == pytest.approx(8.0)


def scaled(rank: int, gradients: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    parameters = with_gradients(gradients, (2,))
    scale_gradients(parameters, factor)
    return [parameter.grad.full_tensor() for parameter in parameters[1:]]


def test_gradients_are_scaled_in_place_and_a_factor_of_one_changes_no_bit(ranks: RankPool) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape) for shape in SHAPES]
    for factor in (1.0, 0.5, 2.0**-16):
        for ours in ranks.run(2, scaled, gradients, factor):
            assert all(torch.equal(a, b * factor) for a, b in zip(ours, gradients, strict=True))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_parameter_of_a_model_is_in_a_group_of_its_own_part(kind: str) -> None:
    groups = dict.fromkeys(layer_group(name) for name, _ in tiny_model(kind).named_parameters())
    assert list(groups) == ["embedding", "layer_0", "layer_1", "final_norm", "head"]
