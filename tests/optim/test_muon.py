"""Muon over sharded matrices takes torch's own steps, whoever owns a matrix, and deals the work evenly."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from slimefsdp.models.decoder import PolicyModel
from slimefsdp.optim.muon import assign_owners, newton_schulz
from slimefsdp.optim.optimizer import matrix_names, update_shards
from tests.support.optimizers import optimizer_of
from tests.support.plain_muon import is_matrix_of_a_layer
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import ARCHITECTURES, tiny_model

SHAPES = {"wide": (5, 9), "tall": (13, 4), "thin": (1, 7), "square": (8, 8), "stack": (5, 6, 4), "vector": (6,)}
MATRICES = {name for name, shape in SHAPES.items() if len(shape) > 1}
OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.3}
MOMENTUM = 0.8


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradients(update: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + update)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


@pytest.mark.parametrize("shape", [(5, 9), (13, 4), (8, 8), (1, 7), (64, 64)])
def test_newton_schulz_is_torchs_own_in_bits_and_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    half = matrix.bfloat16()
    coefficients = (3.4445, -4.7750, 2.0315)
    theirs = torch.optim._muon._zeropower_via_newtonschulz(half.clone(), coefficients, 5, 1e-7)
    assert torch.equal(newton_schulz(half, 5), theirs)
    values = torch.linalg.svdvals(newton_schulz(matrix.double(), 5))
    assert values.dtype == torch.float64 and values.min() > 0.3 and values.max() < 1.3
    assert torch.equal(newton_schulz(torch.zeros(shape), 5), torch.zeros(shape))


def torchs_own(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Three steps of torch.optim.Muon, each matrix of a stack by itself, and of its AdamW on the vector."""
    if dtype != torch.bfloat16:
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # its iterations have no other dtype
    whole = {name: parameter.detach() for name, parameter in parameters(dtype).items()}
    matrices = {
        name: [nn.Parameter(one) for one in whole[name].reshape(-1, *whole[name].shape[-2:])] for name in MATRICES
    }
    vector = nn.Parameter(whole["vector"])
    muon = torch.optim.Muon(
        [one for stack in matrices.values() for one in stack],
        lr=0.1,
        weight_decay=0.3,
        momentum=MOMENTUM,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW([vector], lr=0.1, betas=(0.9, 0.95), weight_decay=0.3, fused=True)
    for update in range(3):
        of_update = gradients(update, dtype)
        for name, stack in matrices.items():
            for one, gradient in zip(stack, of_update[name].reshape(-1, *SHAPES[name][-2:]), strict=True):
                one.grad = gradient.clone()
        vector.grad = of_update["vector"]
        muon.step()
        adamw.step()
    stacked = {
        name: torch.stack([one.detach() for one in stack]).view(SHAPES[name]) for name, stack in matrices.items()
    }
    return {**stacked, "vector": vector.detach()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_of_one_process_are_torchs_own_in_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    named = parameters(dtype)
    optimizer = optimizer_of(named.items(), "muon", matrices=MATRICES, momentum=MOMENTUM, **OPTIONS)
    assert all(state.keys() == {"momentum_buffer"} for p, state in optimizer.state.items() if p is not named["vector"])
    for update in range(3):
        for name, gradient in gradients(update, dtype).items():
            named[name].grad = gradient
        update_shards(optimizer)
    theirs = torchs_own(dtype, monkeypatch)
    assert all(torch.equal(named[name], theirs[name]) for name in SHAPES)


def steps_on_ranks(rank: int, copies: int) -> dict[str, torch.Tensor]:
    """All weights after three steps on a mesh of so many copies of the parameters."""
    mesh = init_device_mesh("cpu", (copies, dist.get_world_size() // copies))

    def shards(whole: torch.Tensor) -> Any:
        return distribute_tensor(whole, mesh, [Replicate(), Shard(0)])

    named = {name: nn.Parameter(shards(parameter.detach())) for name, parameter in parameters().items()}
    optimizer = optimizer_of(named.items(), "muon", matrices=MATRICES, momentum=MOMENTUM, **OPTIONS)
    for update in range(3):
        for name, gradient in gradients(update).items():
            named[name].grad = shards(gradient)
        update_shards(optimizer, dist.group.WORLD)
    return {name: parameter.full_tensor().detach().clone() for name, parameter in named.items()}


@pytest.mark.parametrize(("world", "copies"), [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)])
def test_steps_on_any_ranks_are_those_of_whole_matrices(
    ranks: RankPool, world: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = torchs_own(torch.float64, monkeypatch)
    start = parameters()
    assert all((theirs[name] - start[name]).abs().max() > 1e-2 for name in SHAPES)
    alone = ranks.run(1, steps_on_ranks, 1)[0]
    for ours in ranks.run(world, steps_on_ranks, copies):
        assert max((ours[name] - theirs[name]).abs().max().item() for name in SHAPES) <= 1e-12
        assert all(torch.equal(ours[name], alone[name]) for name in SHAPES), "the same bits on every mesh"


@pytest.mark.parametrize(("world", "shards"), [(1, 1), (4, 4), (6, 3), (8, 8)])
def test_every_matrix_has_one_owner_and_the_work_is_even(world: int, shards: int) -> None:
    shapes = tuple([(64, 64), (32, 64), (64, 32), (64, 160), (160, 64), (5, 24, 64)] * 8)
    rounds = assign_owners(shapes, world, shards, 20_000)
    owned = [[matrix for one in rounds for matrix in one[rank]] for rank in range(world)]
    found = sorted((matrix.parameter, matrix.first_row) for matrices in owned for matrix in matrices)
    assert found == [(i, row) for i, s in enumerate(shapes) for row in range(0, math.prod(s[:-1]), s[-2])]
    for matrix in (matrix for matrices in owned for matrix in matrices):
        held = [matrix.rows_of_matrix(shard) for shard in range(shards)]
        assert [row for piece in held for row in range(matrix.rows)[piece]] == list(range(matrix.rows))
    loads = [sum(matrix.cost for matrix in matrices) for matrices in owned]
    assert max(loads) - min(loads) <= max(matrix.cost for matrices in owned for matrix in matrices)
    sizes = [[matrix.rows * matrix.columns for matrix in matrices] for one in rounds for matrices in one]
    assert max(sum(of_rank) for of_rank in sizes) <= 20_000 and len(rounds) > 1
    assert len(assign_owners(shapes, world, shards, 1)) == max(map(len, owned))  # one at a time, be it larger


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_matrices_of_layers_are_muons_and_nothing_else(kind: str, tied: bool) -> None:
    model = PolicyModel(tiny_model(kind, tie_word_embeddings=tied))
    names = matrix_names(model.hf, model.decoder_layers())
    assert names == {name for name, p in model.named_weights() if is_matrix_of_a_layer(name, p)}
    assert len(names) >= 8 and not any("embed" in name or "head" in name or "norm" in name for name in names)
