"""Which parameters decay, and that optimiser state is whole from the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from slimefsdp.optim.build import build_optimizer
from tests.tiny_models import tiny_model


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
