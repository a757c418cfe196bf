"""Which parameters decay, that optimiser state is whole from the start, and that all implementations take one step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from slimefsdp.optim.optimizer import undecayed_names, update_shards
from tests.support.optimizers import optimizer_of
from tests.support.rank_pool import RankPool
from tests.support.tiny_models import ARCHITECTURES, tiny_model

# the modules that multiply by a weight, by the names that the architectures give them
PRODUCTS = re.compile(
    r"\.(?:[a-z_]*proj|c_attn|c_fc|gate|router)\.weight$"  # linear layers, GPT-2's, routers
    r"|\.experts\.(?:gate_up|down)_proj$"  # all experts of a layer
    r"|^lm_head\.weight$"
)


def build(named: list[tuple[str, nn.Parameter]], name: str = "adamw", **changes: Any) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.5, **changes}
    return optimizer_of(named, name, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_weights_of_products_decay_and_nothing_else(kind: str, tied: bool) -> None:
    model = tiny_model(kind, tie_word_embeddings=tied)
    named = list(model.named_parameters())
    optimizer = build(named, undecayed=undecayed_names(model))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    decayed = {name for name, parameter in named if decay[id(parameter)] == 0.5}
    assert decayed == {name for name, _ in named if PRODUCTS.search(name)}
    assert ("lm_head.weight" in decayed) == (not tied) and len(decayed) >= 8
    assert {decay[id(parameter)] for name, parameter in named if name not in decayed} == {0.0}


@pytest.mark.parametrize(
    ("name", "state_dtype", "expected"),
    [
        ("adamw", None, {"adamw"}),
        ("adamw", torch.bfloat16, {"adamw_bfloat16"}),
        ("adamw", torch.uint8, {"adamw_8bit", "adamw"}),
        ("sgd", None, {"sgd"}),
        ("muon", None, {"muon", "adamw"}),
    ],
)
def test_every_parameter_is_in_a_group_of_one_rule_and_keeps_what_the_rule_reads(
    name: str, state_dtype: torch.dtype | None, expected: set[str]
) -> None:
    shapes = {"wide": (4, 64), "other": (6, 32), "thin": (3, 4), "embedding": (8, 64), "norm": (64,)}
    named = [(own, nn.Parameter(torch.ones(shape))) for own, shape in shapes.items()]
    how = {"undecayed": {"embedding", "norm"}, "matrices": {"wide", "other"}, "state_dtype": state_dtype}
    optimizer = build(named, name, **how)
    kept = {
        "adamw": {"step", "exp_avg", "exp_avg_sq"},
        "adamw_bfloat16": {"step", "exp_avg", "exp_avg_sq"},
        "adamw_8bit": {"step", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"},
        "muon": {"momentum_buffer"},
        "sgd": {"momentum_buffer"},
    }
    names = {id(parameter): own for own, parameter in named}
    found = {names[id(p)]: group for group in optimizer.param_groups for p in group["params"]}
    assert found.keys() == shapes.keys() and sum(len(group["params"]) for group in optimizer.param_groups) == len(named)
    assert {group["rule"] for group in found.values()} == expected
    for own, parameter in named:
        assert optimizer.state[parameter].keys() == kept[found[own]["rule"]]
        assert found[own]["decays"] == (own not in how["undecayed"])
    if state_dtype == torch.uint8:
        assert [own for own, group in found.items() if group["rule"] == "adamw"] == ["thin", "norm"]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_is_whole_at_once(name: str) -> None:
    ours, theirs = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = build([("matrix", ours)], name, **({"momentum": 0.9} if name == "sgd" else {}))
    at_start = {key: value.clone() for key, value in optimizer.state[ours].items()}
    assert all(not value.any() for value in at_start.values())
    reference: torch.optim.Optimizer
    if name == "sgd":
        reference = torch.optim.SGD([theirs], lr=0.1, momentum=0.9, weight_decay=0.5)
    else:
        reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    for _ in range(3):
        ours.grad = torch.randn(3, 2)
        theirs.grad = ours.grad.clone()
        update_shards(optimizer)
        reference.step()
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
    assert optimizer.state[ours].keys() == at_start.keys() == reference.state[theirs].keys()


def layers(shapes: list[tuple[int, ...]]) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(3)
    return nn.ParameterDict(
        {f"p{i}": nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for i, s in enumerate(shapes)}
    )


def steps_of(rank: int, name: str, shapes: list[tuple[int, ...]], world: int) -> tuple[list[torch.Tensor], ...]:
    """Parameters, then states, after five steps of `update_shards`, and of torch's own through the sharded tensors."""
    results = []
    for by_shards in (True, False):
        model = layers(shapes)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        named = list(model.named_parameters())
        undecayed = {own for own, p in named if p.ndim == 1}
        optimizer = build(named, name, undecayed=undecayed, **({"momentum": 0.9} if name == "sgd" else {}))
        generator = torch.Generator().manual_seed(4)
        for _ in range(5):
            for _, parameter in named:
                whole = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.grad = torch.distributed.tensor.distribute_tensor(
                    whole, parameter.device_mesh, parameter.placements
                )
            if by_shards:
                update_shards(optimizer)
            else:
                optimizer.step()
        assert name == "sgd" or all(state["step"] == 5 for state in optimizer.state.values())
        states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
        assert len(states) == len(named) * (1 if name == "sgd" else 2)
        results.append([tensor.full_tensor().detach().clone() for tensor in [*(p for _, p in named), *states]])
    return tuple(results)


@pytest.mark.parametrize(("world", "name"), [(1, "adamw"), (2, "adamw"), (2, "sgd"), (4, "adamw")])
def test_steps_of_shards_equal_torchs_own_in_bits_and_those_of_whole_tensors(
    ranks: RankPool, name: str, world: int
) -> None:
    shapes = [(5, 3), (7,), (1, 4), (8, 2, 3)]  # some ranks hold nothing of some
    plain = list(layers(shapes).values())
    groups = [
        {"params": [p for p in plain if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in plain if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)
    else:
        optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    generator = torch.Generator().manual_seed(4)
    start = [parameter.detach().clone() for parameter in plain]
    for _ in range(5):
        for parameter in plain:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        optimizer.step()
    assert all((a - b).abs().min() > 1e-3 for a, b in zip(start, plain, strict=True))
    for ours, through_sharded in ranks.run(world, steps_of, name, shapes, world):
        assert all(torch.equal(a, b) for a, b in zip(ours, through_sharded, strict=True))
        assert max((a - b).abs().max().item() for a, b in zip(ours[: len(plain)], plain, strict=True)) <= 1e-12
