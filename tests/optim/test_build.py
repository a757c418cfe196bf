"""Which parameters decay, that optimiser state is whole from the start, and global-norm clipping over shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slimefsdp.optim.build import build_optimizer, clip_gradients
from tests.rank_pool import RankPool
from tests.tiny_models import tiny_model

SHAPES = [(5, 3), (1, 4), (7,), (2, 2, 2)]  # fewer rows than ranks, and rows that no number of ranks divides


def build(named: list[tuple[str, nn.Parameter]], name: str = "adamw", **changes: Any) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5, **changes}
    return build_optimizer(named, name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])  # with biases, and with norms inside the attention
def test_only_matrices_other_than_the_embedding_decay(kind: str) -> None:
    named = list(tiny_model(kind).named_parameters())
    optimizer = build(named)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    decayed = {name for name, parameter in named if decay[id(parameter)] == 0.5}
    assert decayed == {name for name, _ in named if "proj.weight" in name or name == "lm_head.weight"}
    assert {decay[id(parameter)] for name, parameter in named if name not in decayed} == {0.0}


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_steps_equal_torchs_own_from_a_state_that_is_whole_at_once(name: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = build([("matrix", ours)], name)
    reference: torch.optim.Optimizer
    if name == "sgd":
        reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.5)
    else:
        reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    at_start = {key: value.clone() for key, value in optimizer.state[ours].items()}
    assert all(not value.any() for value in at_start.values())
    for _ in range(3):
        ours.grad = torch.randn(3, 2)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        assert torch.equal(ours, theirs)
    assert optimizer.state[ours].keys() == at_start.keys() == reference.state[theirs].keys()


def sharded_clip(rank: int, gradients: list[torch.Tensor], max_norm: float) -> tuple[float, list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), mesh, [Shard(0)]))
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        parameters.append(parameter)
    parameters.append(nn.Parameter(torch.zeros(2)))  # one without a gradient
    norm = clip_gradients(parameters, max_norm, mesh.get_group())
    return norm, [parameter.grad.full_tensor().clone() for parameter in parameters[:-1]]


@pytest.mark.parametrize("max_norm", [1.0, 1e4])
def test_clipping_is_by_the_global_norm_on_any_number_of_ranks(ranks: RankPool, max_norm: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(shape) * 10 for shape in SHAPES]
    plain = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter, gradient in zip(plain, gradients, strict=True):
        parameter.grad = gradient.clone()
    torchs_norm = nn.utils.clip_grad_norm_(plain, max_norm).item()
    for world_size in (1, 2, 4):
        for norm, clipped in ranks.run(world_size, sharded_clip, gradients, max_norm):
            assert norm == pytest.approx(torchs_norm, rel=1e-6)
            for ours, parameter, gradient in zip(clipped, plain, gradients, strict=True):
                assert torch.allclose(ours, parameter.grad, rtol=1e-5, atol=0)
                assert torch.equal(ours, gradient) == (max_norm > torchs_norm)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_one_gradient_that_is_not_finite_is_known_to_all_ranks_and_left_alone(ranks: RankPool, value: float) -> None:
    gradients = [torch.ones(4, 2), torch.ones(3)]
    gradients[0][3, 1] = value  # the last rank's
    for norm, left in ranks.run(2, sharded_clip, gradients, 0.5):
        assert not torch.tensor(norm).isfinite()
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(left, gradients, strict=True))
